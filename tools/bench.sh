#!/bin/sh
# Install the tools and comparison programs of `make bench` that are missing, from Debian: wrk,
# nginx, HAProxy, iperf3, ethtool. None of them is started as a service: the benchmark runs its own
# processes in network namespaces.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
PATH="$PATH:/usr/sbin:/sbin"
needed=""
for pair in wrk:wrk nginx-light:nginx haproxy:haproxy iperf3:iperf3 ethtool:ethtool curl:curl; do
    command -v "${pair#*:}" >/dev/null 2>&1 || needed="$needed ${pair%%:*}"
done
[ -n "$needed" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    stop "missing packages:$needed; install them, or run this as root on Debian"
fi
begin "installing Debian packages:$needed"
# shellcheck disable=SC2086
sh tools/apt.sh $needed
