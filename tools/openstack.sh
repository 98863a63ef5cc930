#!/bin/sh
# Put a real OpenStack for the tests into the cache outside the tree: Octavia, Neutron, OVN's
# provider and Keystone in their own virtual environment, at the versions and hashes of
# tests/openstack/requirements.lock; MariaDB, OVN and Open vSwitch from Debian; and the initial data
# directory of their databases. Each part is created again when its inputs change.
# Debian packages that start no service are installed; packages that would start one are unpacked.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin:/sbin"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead"

needed=""
for pair in mariadb-server-core:mariadbd openvswitch-common:ovsdb-server ovn-common:ovn-nbctl; do
    command -v "${pair#*:}" >/dev/null 2>&1 || needed="$needed ${pair%%:*}"
done
if [ -n "$needed" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "setup: missing packages:$needed; install them, or run this as root on Debian" >&2
        exit 1
    fi
    echo "setup: installing Debian packages:$needed"
    # shellcheck disable=SC2086
    sh tools/apt.sh $needed
fi

unpacked="$cache/ovn"
for program in bin/ovn-northd bin/ovn-controller bin/ovs-vsctl \
    lib/openvswitch-switch/ovs-vswitchd; do
    [ ! -x "$unpacked/usr/$program" ] || continue
    packages="ovn-central ovn-host openvswitch-switch"
    echo "setup: unpacking $packages into $unpacked"
    mkdir -p "$cache"
    draft="$(mktemp -d "$cache/.ovn.XXXXXX")"
    trap 'rm -rf "$draft"' EXIT
    chmod 755 "$draft"
    (
        cd "$draft"
        # shellcheck disable=SC2086
        apt-get -q download $packages >log 2>&1 ||
            {
                { [ "$(id -u)" != 0 ] || apt-get -q update; } && apt-get -q download $packages
            } >log 2>&1 ||
            { cat log >&2; exit 1; }
        for package in *.deb; do
            dpkg -x "$package" unpacked
        done
    )
    rm -rf "$unpacked"
    mv "$draft/unpacked" "$unpacked"
    break
done

place="$cache/openstack"
lock=tests/openstack/requirements.lock
if ! cmp -s "$lock" "$place/.requirements"; then
    echo "setup: installing OpenStack into $place"
    uv=build/tools/bin/uv
    export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=true
    "$uv" venv --quiet --clear --python "$(command -v python3)" "$place"
    "$uv" pip sync --quiet --python "$place/bin/python" --require-hashes "$lock"
    cp "$lock" "$place/.requirements"
fi
.venv/bin/python -m tests.openstack.template
