#!/bin/sh
# Install the dependencies of Fairlead that are missing: Debian packages, uv, .venv from
# requirements.lock, the eBPF objects. Safe to repeat; a second run takes about a second. Each step
# prints what it does.
# Without root no Debian package can be installed. `fairlead plan` works without them, so everything
# else is set up anyway.
set -eu
cd "$(dirname "$0")"
PATH="$PATH:/usr/sbin:/sbin"

say() { printf 'setup: %s\n' "$*"; }
stop() {
    say "$*" >&2
    exit 1
}

# Packages that every part needs; packages that the lab, the gateway, the node and the tests need in
# addition; packages that build the eBPF objects.
basic=""
more=""
to_build=""
# package:file, where the file exists if the package is installed
for pair in libbpf-dev:/usr/include/bpf/bpf_helpers.h linux-libc-dev:/usr/include/linux/bpf.h \
    libc6-dev:/usr/include/stdlib.h; do
    [ -e "${pair#*:}" ] || to_build="$to_build ${pair%%:*}"
done
for tool in clang gcc; do
    command -v "$tool" >/dev/null 2>&1 || to_build="$to_build $tool"
done
# package:command
for pair in nftables:nft iproute2:ip curl:curl kubernetes-client:kubectl openssl:openssl \
    ethtool:ethtool conntrack:conntrack iptables:iptables haproxy:haproxy bird2:bird frr:vtysh \
    gobgpd:gobgpd; do
    command -v "${pair#*:}" >/dev/null 2>&1 || more="$more ${pair%%:*}"
done
[ -e "/usr/lib/$(uname -m)-linux-gnu/faketime/libfaketime.so.1" ] || more="$more libfaketime"
ldconfig -p | grep -q 'libnftables\.so\.1' || more="$more libnftables1"
python3 -c 'import venv, ensurepip' 2>/dev/null || basic="$basic python3-venv"
[ -e /etc/ssl/certs/ca-certificates.crt ] || basic="$basic ca-certificates"
needed="$basic$to_build$more"
if [ -n "$needed" ] && [ "$(id -u)" = 0 ]; then
    command -v apt-get >/dev/null 2>&1 ||
        stop "there is no apt-get; install the equivalents of these packages, then repeat:$needed"
    say "installing Debian packages:$needed"
    # shellcheck disable=SC2086
    sh tools/apt.sh $needed
    needed=""
    basic=""
    to_build=""
elif [ -n "$needed" ]; then
    say "missing Debian packages:$needed"
    say "to install them: run this as root, or: sudo apt-get install --no-install-recommends$needed"
    [ -z "$basic" ] || stop "nothing can be set up without$basic"
    say "continuing without them, which is enough for 'fairlead plan'"
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
# Use the system's interpreter and never download one. Use the system's certificates, which may
# include a company's own CA.
export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=true
if [ ! -x .venv/bin/python ]; then
    say "creating .venv"
    "$uv" venv --quiet --python "$(command -v python3)" .venv
fi
stamp=.venv/.requirements
if ! cmp -s requirements.lock "$stamp" || ! cmp -s pyproject.toml .venv/.pyproject; then
    say "installing the packages of requirements.lock into .venv"
    "$uv" pip sync --quiet --python .venv/bin/python --compile-bytecode --require-hashes \
        requirements.lock
    say "installing fairlead"
    "$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
    cp requirements.lock "$stamp"
    cp pyproject.toml .venv/.pyproject
fi
[ -n "$to_build" ] || .venv/bin/python hatch_build.py
# As in the image. With PYTHONDONTWRITEBYTECODE in the environment, each process of a lab would
# otherwise compile all modules at its start, which takes half a second.
.venv/bin/python -m compileall -q src/fairlead
if [ -n "$needed" ]; then
    say "ready in part: '.venv/bin/fairlead plan -f examples/plan' works"
    say "the lab, the demo, the tests, the gateway and the node need the packages above, and root"
elif [ "$(id -u)" != 0 ]; then
    say "ready: .venv/bin/fairlead; without root: 'fairlead plan' and 'fairlead controller'"
else
    say "ready: .venv/bin/fairlead"
fi
