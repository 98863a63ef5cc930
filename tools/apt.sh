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
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get -q update && apt-get -q install -y --no-install-recommends "$@"; }
retry install "$@"
