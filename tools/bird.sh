#!/bin/sh
# Put Debian's BIRD 2, a routing daemon, into the cache outside the tree. The tests of BGP run it as
# a router and as a speaker. The package is unpacked and not installed, because it would start a
# service on this machine; a library of it comes with it.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
fill() {
    unpack "$1" bird2 libssh-gcrypt-4
    mkdir "$1/libraries"
    mv "$1"/usr/lib/*/libssh-gcrypt.so.* "$1/libraries/"
    cat >"$1/bird" <<'END'
#!/bin/sh
here="$(dirname "$0")"
LD_LIBRARY_PATH="$here/libraries" exec "$here/usr/sbin/bird" "$@"
END
    chmod 755 "$1/bird"
}
works() { "$1/bird" --version; }
cached bird "bird2 of $(release)"
