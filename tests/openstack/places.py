"""Paths of the parts of the real OpenStack that `make setup` installed.

Out: the Python interpreter of its environment, the data directory that databases start from,
programs. Each function raises Refused if its part is missing or has another version than the tree
requires; a test then reports this."""

import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from fairlead.errors import Refused

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead"
ENVIRONMENT = CACHE / "openstack"
OVN = CACHE / "ovn"
FIX = "run `make setup`"
TEMPLATE_INPUTS = (
    "requirements.lock",
    "database.py",
    "keystone.py",
    "servers/content.py",
    "settings.py",
    "template.py",
)
"""The files that determine the content of the databases, and how it is checked."""


def python() -> Path:
    """Return the interpreter with the locked versions of Octavia, Neutron and Keystone."""
    stamp, lock = ENVIRONMENT / ".requirements", HERE / "requirements.lock"
    if not stamp.is_file() or stamp.read_bytes() != lock.read_bytes():
        raise Refused(f"OpenStack is not in {ENVIRONMENT} at the versions of {lock.name}", fix=FIX)
    return ENVIRONMENT / "bin" / "python"


def template() -> Path:
    """Return a data directory of MariaDB with the schemas of all services."""
    if not template_of_now().is_dir():
        raise Refused(
            f"there is no {template_of_now()}, from which OpenStack's databases start", fix=FIX
        )
    return template_of_now()


@cache
def template_of_now() -> Path:
    """Return the path of the data directory, which differs for each version of its inputs."""
    parts = [(HERE / name).read_bytes() for name in TEMPLATE_INPUTS]
    parts.append(subprocess.check_output([program("mariadbd"), "--version"]))
    return CACHE / f"openstack-data-{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}"


def program(name: str) -> Path:
    """Return the path of a program from Debian's packages."""
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


def require_all() -> Path:
    """Return the interpreter if everything else exists, too."""
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
