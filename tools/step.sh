#!/bin/sh
# Run one step of the set-up: sh tools/step.sh NAME COMMAND...
# The whole output goes to build/setup.log; only the lines of progress are also shown. If the step
# fails, its error is shown: the log's name and last lines. The exit code is that of the command.
# The seconds of a step that had something to do are kept in the cache, for expected.sh.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
name="$1"
shift
log=build/setup.log
mkdir -p build
ended="$(mktemp)"
begun="$(mktemp)"
trap 'rm -f "$ended" "$begun"' EXIT
start="$(date +%s)"
printf '\n== %s: %s\n' "$(date '+%F %T')" "$name" >>"$log"
# The exit code of a pipeline is that of its last part alone. Without a code the step has failed:
# the disk may be full.
{
    code=0
    FAIRLEAD_BEGUN="$begun" "$@" 2>&1 || code="$?"
    echo "$code" >"$ended"
} | tee -a "$log" | grep --line-buffered -E '^(setup: |building src/)' || true
code="$(cat "$ended")"
if [ "${code:-1}" = 0 ]; then
    [ -s "$begun" ] || exit 0
    { mkdir -p "$cache/seconds" && echo "$(($(date +%s) - start))" >"$cache/seconds/$name"; } ||
        say "the duration of $name could not be kept in $cache/seconds"
    exit 0
fi
case "$(tail -n 1 "$log")" in
"setup: "*) ;; # The step has printed the reason itself.
*) tail -n 20 "$log" | sed 's/^/    /' >&2 ;;
esac
echo "setup: failed: $name; the whole output is in $(pwd)/$log" >&2
exit "${code:-1}"
