#!/bin/sh
# Install Debian packages, as root: sh tools/apt.sh PACKAGE...
# Debian's packages start their servers. While this script runs, policy-rc.d forbids that, because
# Fairlead runs its own processes.
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
