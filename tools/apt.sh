#!/bin/sh
# Install Debian packages, as root: sh tools/apt.sh PACKAGE...
# Packages of servers start them, unless policy-rc.d says no, as it does for as long as this runs: Fairlead runs its own.
set -eu
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install -y --no-install-recommends "$@"
