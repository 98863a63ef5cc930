#!/bin/sh
# Put Debian's etcd and etcdctl into the cache outside the tree, once. Unpacked rather than installed: the package would start
# a service of its own on this machine.
set -eu
cache="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead/bin"
[ ! -x "$cache/etcd" ] || [ ! -x "$cache/etcdctl" ] || exit 0
printf 'setup: unpacking etcd into %s\n' "$cache"
mkdir -p "$cache"
draft="$(mktemp -d "$cache/.etcd.XXXXXX")"
trap 'rm -rf "$draft"' EXIT
chmod 755 "$draft"
cd "$draft"
apt-get -q download etcd-server etcd-client >log 2>&1 ||
    { { [ "$(id -u)" != 0 ] || apt-get -q update; } && apt-get -q download etcd-server etcd-client; } >log 2>&1 ||
    { cat log >&2; exit 1; }
for package in etcd-*.deb; do
    dpkg -x "$package" .
done
mv usr/bin/etcd usr/bin/etcdctl "$cache/"
