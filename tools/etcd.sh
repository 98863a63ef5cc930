#!/bin/sh
# Put Debian's etcd into the cache outside the tree, once, in addition to the one that tools/etcd
# builds. It is older than 3.4.25, so a kube-apiserver that uses it rejects streamed lists, as
# control planes of existing clusters still do; the tests of watches run with both. The package is
# unpacked and not installed, because it would start a service on this machine.
set -eu
cache="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead/debian-etcd"
[ ! -x "$cache/etcd" ] || exit 0
printf 'setup: unpacking etcd into %s\n' "$cache"
mkdir -p "$cache"
draft="$(mktemp -d "$cache/.etcd.XXXXXX")"
trap 'rm -rf "$draft"' EXIT
chmod 755 "$draft"
cd "$draft"
apt-get -q download etcd-server >log 2>&1 ||
    {
        { [ "$(id -u)" != 0 ] || apt-get -q update; } && apt-get -q download etcd-server
    } >log 2>&1 ||
    { cat log >&2; exit 1; }
dpkg -x etcd-server*.deb .
mv usr/bin/etcd "$cache/"
