#!/bin/sh
# Put the OVN and Open vSwitch of another Debian release into the cache outside the tree, beside the
# ones of `make tools`, and print the directory: sh tools/ovn.sh [SUITE]. The default is trixie,
# Debian 13. Tests, labs and benchmarks of OVN use the directory that FAIRLEAD_OVN names:
#     FAIRLEAD_OVN="$(sh tools/ovn.sh)" .venv/bin/pytest tests/drivers/ovn
# The packages come from the mirror of Debian that apt is configured to use. They are unpacked and
# not installed: apt works on a state of its own, and each program runs with the loader and the
# libraries of its own release.
set -eu
suite="${1:-trixie}"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead"
place="$cache/ovn-$suite"
if [ -x "$place/bin/ovn-controller" ]; then
    echo "$place"
    exit 0
fi
mirror="$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(SUITE) $(COMPONENT)' \
    'Created-By: Packages' | awk '$2 == "Debian" && $3 !~ /-/ && $4 == "main" {print $1; exit}')"
if [ -z "$mirror" ]; then
    echo "setup: apt has no mirror of Debian, or no lists yet: run apt-get update" >&2
    exit 1
fi
echo "setup: unpacking OVN of $suite into $place" >&2
mkdir -p "$cache"
draft="$(mktemp -d "$cache/.ovn.XXXXXX")"
trap 'rm -rf "$draft"' EXIT
chmod 755 "$draft"
cd "$draft"
mkdir -p state/lists/partial cache/archives/partial
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >sources
cat >apt.conf <<END
Dir::State "$draft/state";
Dir::State::status "/dev/null";
Dir::Cache "$draft/cache";
Dir::Etc::sourcelist "$draft/sources";
Dir::Etc::sourceparts "-";
Dir::Etc::preferencesparts "-";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";  // the mirror may be a snapshot
APT::Sandbox::User "root";
END
export APT_CONFIG="$draft/apt.conf"
{
    apt-get -q update
    apt-get -q install -y --download-only --no-install-recommends \
        ovn-central ovn-host openvswitch-switch
} >log 2>&1 || { cat log >&2; exit 1; }
for package in cache/archives/ovn-*.deb cache/archives/openvswitch-*.deb cache/archives/lib*.deb; do
    dpkg -x "$package" unpacked
done
root="$draft/unpacked"
loader="$(find "$root" -name 'ld-linux*.so.*' | head -n 1)"
library="$(dirname "$(find "$root" -name libc.so.6 | head -n 1)")"
mkdir "$root/bin.own"
for program in "$root"/usr/bin/ov[ns]* "$root"/usr/sbin/ov[ns]* \
    "$root"/usr/lib/openvswitch-switch/ovs-vswitchd; do
    # Scripts are left out. They are not needed.
    [ -f "$program" ] && [ "$(head -c 4 "$program" | tail -c 3)" = ELF ] || continue
    wrapper="$root/bin.own/$(basename "$program")"
    {
        echo '#!/bin/sh'
        echo "exec '$place${loader#"$root"}' --library-path '$place${library#"$root"}' \\"
        echo "    '$place${program#"$root"}' \"\$@\""
    } >"$wrapper"
    chmod 755 "$wrapper"
done
# In releases with a merged /usr, packages may still have a directory of this name.
rm -rf "$root/bin"
mv "$root/bin.own" "$root/bin"
rm -rf "$place"
mv "$root" "$place"
echo "$place"
