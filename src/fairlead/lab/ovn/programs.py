"""The programs of OVN and Open vSwitch: where they are, and their database schemas.

In: the name of a program or schema. Out: its path. `make tools` unpacks Debian's packages into a
directory of the cache; programs that are installed on the machine are used as well. If the
environment variable FAIRLEAD_OVN names a directory with unpacked packages of another version, such
as `tools/ovn.sh` creates, only this directory is used, so that versions are not mixed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fairlead.errors import Refused

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead" / "ovn"
PACKAGES = "ovn-central ovn-host openvswitch-switch"
"""Debian's packages that contain all programs, and with them ovn-common and openvswitch-common."""
FIX = (
    "run `make tools`, which unpacks OVN from Debian, or install it: apt-get install "
    f"--no-install-recommends {PACKAGES}"
)
VARIABLE = "FAIRLEAD_OVN"
NAMES = (
    *("ovsdb-server", "ovsdb-tool", "ovn-nbctl", "ovn-sbctl", "ovn-northd", "ovn-controller"),
    *("ovs-vswitchd", "ovs-vsctl"),
)


def program(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a program. Raise Refused if it is missing."""
    if chosen := environment.get(VARIABLE):
        root = Path(chosen)
        # `bin` has programs that start the ones in `usr` with the libraries of their own release.
        places = [root / each for each in ("bin", "usr/bin", "usr/sbin")]
        folders = [*map(str, places), str(root / "usr/lib/openvswitch-switch")]
    else:
        path = environment.get("PATH", os.defpath)
        places = [CACHE / each for each in ("usr/bin", "usr/lib/openvswitch-switch")]
        folders = [*map(str, places), path, "/usr/sbin", "/sbin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise _missing(name, environment)
    return Path(found)


def schema(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a schema, such as `ovn-nb.ovsschema`. Raise Refused if it is missing."""
    chosen = environment.get(VARIABLE)
    for root in (Path(chosen),) if chosen else (CACHE, Path("/")):
        for folder in ("ovn", "openvswitch"):
            found = root / "usr/share" / folder / name
            if found.is_file():
                return found
    raise _missing(f"the schema {name}", environment)


def require_all() -> Path:
    """Return the path of ovsdb-server if all programs and schemas exist. Raise Refused if one is
    missing."""
    for name in NAMES:
        program(name)
    for name in ("ovn-nb", "ovn-sb", "vswitch"):
        schema(f"{name}.ovsschema")
    return program("ovsdb-server")


def _missing(what: str, environment: Mapping[str, str]) -> Refused:
    if chosen := environment.get(VARIABLE):
        return Refused(
            f"{what} is not in {chosen}, which {VARIABLE} names",
            fix=f"unpack the packages there, or unset {VARIABLE}",
        )
    return Refused(f"{what} is neither on the PATH nor in {CACHE}", fix=FIX)
