# shellcheck shell=sh
# What the scripts of the set-up share: `. tools/cache.sh`, in the root of the tree.
#
# A directory in the cache is made from its requirements, a text that is kept in it. It is checked
# before it is moved into its place, and again whenever a script needs it: if it does not work any
# more, it is made again. Only one process at a time makes it.

cache="${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/fairlead"
RETRY_AFTER_S=5
WORK_TO_DO=100

say() { printf 'setup: %s\n' "$*"; }
stop() {
    say "$*" >&2
    exit 1
}

# Announce work that is not done yet. With FAIRLEAD_SETUP=expected no script works: it ends here,
# with the exit code WORK_TO_DO (see expected.sh).
begin() {
    [ "${FAIRLEAD_SETUP:-}" != expected ] || exit "$WORK_TO_DO"
    say "$*"
    [ -z "${FAIRLEAD_BEGUN:-}" ] || echo "$*" >>"$FAIRLEAD_BEGUN"
}

# Run a command that downloads something, and repeat it if it fails: three times in all.
retry() {
    for attempt in 1 2; do
        ! "$@" || return 0
        say "attempt $attempt of 3 failed: $*" >&2
        sleep "$RETRY_AFTER_S"
    done
    "$@"
}

# Wait until no other process makes NAME. The lock is held until the script ends or takes another.
lock() {
    [ "${FAIRLEAD_SETUP:-}" != expected ] || return 0
    mkdir -p "$cache"
    exec 9>"$cache/.$1.lock"
    flock -n 9 || {
        say "waiting for another process, which makes $1"
        flock 9
    }
}

# Have a directory in the cache: cached NAME REQUIREMENTS. The caller defines `fill DIRECTORY`, which
# makes it, and `works DIRECTORY`, which fails if a program in it does not run.
cached() {
    place="$cache/$1"
    lock "$1"
    if [ "$(cat "$place/.requirements" 2>/dev/null)" != "$2" ]; then
        begin "making $place"
    elif [ "${FAIRLEAD_SETUP:-}" = expected ] || works "$place" >/dev/null 2>&1; then
        return 0
    else
        begin "making $place again, because it does not work any more"
    fi
    rm -rf "$cache/.$1".?????? # of a set-up that was killed
    draft="$(mktemp -d "$cache/.$1.XXXXXX")"
    trap 'rm -rf "$draft"' EXIT
    chmod 755 "$draft"
    fill "$draft"
    works "$draft" || stop "what was made for $place does not work;" \
        "remove the cache with 'make clean-cache', then repeat 'make tools'"
    printf '%s\n' "$2" >"$draft/.requirements"
    rm -rf "$place"
    mv "$draft" "$place"
}

# The release of the system, for the requirements of `unpack`.
release() { sed -n 's/^PRETTY_NAME="\(.*\)"$/\1/p' /etc/os-release; }

# Unpack Debian packages that would start services if they were installed:
# unpack DIRECTORY PACKAGE...
unpack() (
    cd "$1"
    shift
    retry download "$@"
    for package in *.deb; do
        dpkg -x "$package" .
        rm "$package"
    done
)
download() {
    apt-get -q download "$@" ||
        { [ "$(id -u)" = 0 ] && apt-get -q update && apt-get -q download "$@"; }
}

# Make a virtual environment, which can be moved, at the versions and hashes of a lock file:
# environment DIRECTORY LOCK
environment() {
    export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=true
    build/tools/bin/uv venv --quiet --clear --relocatable --python "$(command -v python3)" "$1"
    retry build/tools/bin/uv pip sync --quiet --python "$1/bin/python" --require-hashes "$2"
}
