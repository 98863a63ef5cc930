"""Where the parts of the real OpenStack are that `make setup` installed.

Out: the Python of its environment, the data directory that databases start from, programs. Raises
Refused where one is missing or is not of the versions that the tree asks for; a test then says so.
"""

import hashlib
import os
import shutil
from pathlib import Path

from fairlead.errors import Refused

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead"
ENVIRONMENT = CACHE / "openstack"
OVN = CACHE / "ovn"
FIX = "run `make setup`"


def python() -> Path:
    """The interpreter that has Octavia, Neutron and Keystone as locked."""
    stamp, lock = ENVIRONMENT / ".requirements", HERE / "requirements.lock"
    if not stamp.is_file() or stamp.read_bytes() != lock.read_bytes():
        raise Refused(f"OpenStack is not in {ENVIRONMENT} at the versions of {lock.name}", fix=FIX)
    return ENVIRONMENT / "bin" / "python"


def template() -> Path:
    """A data directory of MariaDB with the schemas of all services."""
    if not template_of_now().is_dir():
        raise Refused(
            f"there is no {template_of_now()}, from which OpenStack's databases start", fix=FIX
        )
    return template_of_now()


def template_of_now() -> Path:
    """Where it is, or is to be: each version of the schemas has its own."""
    parts = [HERE / name for name in ("requirements.lock", "template.py")]
    return (
        CACHE
        / f"openstack-data-{hashlib.sha256(b''.join(part.read_bytes() for part in parts)).hexdigest()[:12]}"
    )


def program(name: str) -> Path:
    """A program of Debian's packages."""
    folders = (
        str(OVN / "usr/bin"),
        str(OVN / "usr/lib/openvswitch-switch"),
        os.environ.get("PATH", os.defpath),
        "/usr/sbin",
        "/sbin",
    )
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise Refused(f"{name} is neither on the PATH nor in {OVN}", fix=FIX)
    return Path(found)


def whole() -> Path:
    """The interpreter, once everything else has been found, too."""
    template()
    for name in (
        "mariadbd",
        "ovsdb-server",
        "ovsdb-tool",
        "ovn-nbctl",
        "ovn-sbctl",
        "ovn-northd",
        "ovn-controller",
    ):
        program(name)
    for name in ("ovs-vswitchd", "ovs-vsctl"):
        program(name)
    return python()
