#!/bin/sh
# Install what Fairlead needs, and only what is missing: Debian packages, uv, .venv from requirements.lock, the eBPF objects.
# Safe to repeat; a second run takes about a second. Each step says what it does.
set -eu
cd "$(dirname "$0")"

say() { printf 'setup: %s\n' "$*"; }

# package:file that proves it is there
needed=""
for pair in clang:clang gcc:gcc nftables:nft iproute2:ip; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${pair#*:}" >/dev/null 2>&1 || needed="$needed ${pair%%:*}"
done
for pair in libbpf-dev:/usr/include/bpf/bpf_helpers.h linux-libc-dev:/usr/include/linux/bpf.h libc6-dev:/usr/include/stdlib.h \
    ca-certificates:/etc/ssl/certs/ca-certificates.crt; do
    [ -e "${pair#*:}" ] || needed="$needed ${pair%%:*}"
done
ldconfig -p | grep -q 'libnftables\.so\.1' || needed="$needed libnftables1"
command -v kubectl >/dev/null 2>&1 || needed="$needed kubernetes-client"
python3 -c 'import venv, ensurepip' 2>/dev/null || needed="$needed python3-venv"
if [ -n "$needed" ]; then
    if [ "$(id -u)" != 0 ]; then
        say "missing Debian packages:$needed"
        say "run as root, or: sudo apt-get install --no-install-recommends$needed"
        exit 1
    fi
    say "installing Debian packages:$needed"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q update
    # shellcheck disable=SC2086
    apt-get -q install -y --no-install-recommends $needed
fi

python3 - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"setup: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
PY

uv=build/tools/bin/uv
if [ ! -x "$uv" ]; then
    say "installing uv into build/tools"
    python3 -m venv build/tools
    build/tools/bin/pip install --quiet --disable-pip-version-check 'uv>=0.9'
fi
# The interpreter that is here, never a fetched one; certificates of the system, which may know a company's own authority.
export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=true
[ -x .venv/bin/python ] || { say "making .venv"; "$uv" venv --quiet --python "$(command -v python3)" .venv; }
stamp=.venv/.requirements
if ! cmp -s requirements.lock "$stamp" || ! cmp -s pyproject.toml .venv/.pyproject; then
    say "installing the packages of requirements.lock into .venv"
    "$uv" pip sync --quiet --python .venv/bin/python --require-hashes requirements.lock
    say "building and installing fairlead"
    "$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
    cp requirements.lock "$stamp"
    cp pyproject.toml .venv/.pyproject
fi
.venv/bin/python hatch_build.py
say "ready: .venv/bin/fairlead"
