#!/bin/sh
# Print a step of the set-up if it has something to do, and how long it took the last time on this
# machine: sh tools/expected.sh NAME COMMAND... It does nothing else.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
name="$1"
shift
code=0
FAIRLEAD_SETUP=expected "$@" >/dev/null 2>&1 || code="$?"
[ "$code" = "$WORK_TO_DO" ] || exit 0
if seconds="$(cat "$cache/seconds/$name" 2>/dev/null)"; then
    say "to do: $name, which took $seconds s here the last time"
else
    case "$name" in
    kubernetes) minutes="8 minutes" ;;
    helm) minutes="3 minutes" ;;
    *) minutes="1 minute" ;;
    esac
    say "to do: $name, not yet measured here; $minutes on two cores"
fi
