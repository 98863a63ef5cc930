#!/bin/sh
# Install Debian packages, as root: sh tools/apt.sh PACKAGE...
# Debian's packages start their servers. While this script runs, policy-rc.d forbids that, because
# Fairlead runs its own processes.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
lock debian-packages
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    # dash runs the trap above only if it ends by itself.
    trap 'exit 130' INT
    trap 'exit 143' TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
# Another program, such as unattended-upgrades, may hold dpkg's lock for minutes.
install() {
    apt-get -q update &&
        apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}
retry install "$@"
