#!/bin/sh
# Put Debian's etcd into the cache outside the tree, in addition to the one that tools/etcd builds.
# It is older than 3.4.25, so a kube-apiserver that uses it rejects streamed lists, as control planes
# of existing clusters still do; the tests of watches run with both. The package is unpacked and not
# installed, because it would start a service on this machine.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
fill() {
    unpack "$1" etcd-server
    mv "$1/usr/bin/etcd" "$1/"
}
works() { "$1/etcd" --version; }
cached debian-etcd "etcd-server of $(release)"
