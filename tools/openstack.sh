#!/bin/sh
# Put a real OpenStack for the tests into the cache outside the tree: Octavia, Neutron, OVN's
# provider and Keystone in their own virtual environment, at the versions and hashes of
# tests/openstack/requirements.lock; MariaDB, OVN and Open vSwitch from Debian; and the initial data
# directory of their databases. Each part is created again when its inputs change.
# Debian packages that start no service are installed; packages that would start one are unpacked.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
PATH="$PATH:/usr/sbin:/sbin"

needed=""
for pair in mariadb-server-core:mariadbd openvswitch-common:ovsdb-server ovn-common:ovn-nbctl; do
    command -v "${pair#*:}" >/dev/null 2>&1 || needed="$needed ${pair%%:*}"
done
if [ -n "$needed" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        stop "missing packages:$needed; install them, or run this as root on Debian"
    fi
    begin "installing Debian packages:$needed"
    # shellcheck disable=SC2086
    sh tools/apt.sh $needed
fi

packages="ovn-central ovn-host openvswitch-switch"
# shellcheck disable=SC2086
fill() { unpack "$1" $packages; }
works() {
    for program in bin/ovn-northd bin/ovn-controller bin/ovs-vsctl \
        lib/openvswitch-switch/ovs-vswitchd; do
        "$1/usr/$program" --version || return
    done
}
cached ovn "$packages of $(release)"

lock=tests/openstack/requirements.lock
fill() { environment "$1" "$lock"; }
works() {
    "$1/bin/alembic" --version && "$1/bin/python" -W ignore -c \
        'import keystone, neutron, octavia, oslo_messaging, ovn_octavia_provider, pymysql'
}
cached openstack "$(cat "$lock")"

.venv/bin/python -c 'from tests.openstack import places; places.template()' 2>/dev/null ||
    begin "making the databases of OpenStack's services"
.venv/bin/python -m tests.openstack.template
