"""Harmful kernel settings are found and reported, changed only if the configuration allows it, and
restored."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.drivers.host import HarmfulSetting, Host, harmful_settings
from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.errors import Conflict, Refused
from fairlead.lab import namespace
from fairlead.model import Finding
from fairlead.net import sysctl

FILTER = "net/ipv4/conf/lo/rp_filter"
REQUIREMENT = SysctlRequirement(FILTER, lambda value: value == "1", "2", "packets are dropped")
GONE = SysctlRequirement("net/ipv4/conf/nowhere/rp_filter", lambda value: True, "2", "nothing")


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    """Move this thread into a namespace in which reverse path filtering is strict."""
    name = f"flt-{os.getpid()}-host"
    namespace.create(name)
    try:
        with namespace.inside(name):
            sysctl.write(FILTER, "1")
            yield
    finally:
        namespace.delete(name)


def test_only_harmful_values_of_existing_settings_are_found() -> None:
    values = {"a": "1", "b": "0"}
    requirements = [
        SysctlRequirement(name, lambda value: value == "1", "2", f"why {name}") for name in "abc"
    ]
    assert harmful_settings(requirements, values.get) == (HarmfulSetting(requirements[0], "1"),)


def test_without_permission_no_value_is_changed_and_the_remedy_is_named(tmp_path: Path) -> None:
    host = Host("node", adjust=False, directory=tmp_path)
    (found,) = host.check([REQUIREMENT, GONE])
    assert found == Finding(
        "HostSettingHarmful",
        f"{FILTER} is 1, should be 2: packets are dropped",
        severity="warning",
        subject=f"sysctl {FILTER}",
        remedy="sysctl -w net/ipv4/conf/lo/rp_filter=2",
    )
    assert sysctl.read(FILTER) == "1"
    assert host.restore() == ()


def test_with_permission_the_value_is_changed_reported_and_restored_by_a_later_process(
    tmp_path: Path,
) -> None:
    host = Host("node", adjust=True, directory=tmp_path)
    for _ in range(2):
        (found,) = host.check([REQUIREMENT, GONE])
        assert (found.code, found.severity) == ("HostSettingAdjusted", "info")
        assert str(found) == f"{FILTER} was 1, set to 2: packets are dropped"
        assert sysctl.read(FILTER) == "2"
    assert Host("node", adjust=False, directory=tmp_path).restore() == (FILTER,)
    assert sysctl.read(FILTER) == "1"
    assert list(tmp_path.iterdir()) == []


def test_the_original_value_is_restored_unless_another_program_has_changed_it_since(
    tmp_path: Path,
) -> None:
    Host("node", adjust=True, directory=tmp_path).check([REQUIREMENT])
    sysctl.write(FILTER, "0")
    anything = REQUIREMENT._replace(harmful=lambda value: value != "2")
    Host("node", adjust=True, directory=tmp_path).check([anything])
    assert sysctl.read(FILTER) == "2"
    Host("node", adjust=True, directory=tmp_path).restore()
    assert sysctl.read(FILTER) == "1"
    Host("node", adjust=True, directory=tmp_path).check([REQUIREMENT])
    sysctl.write(FILTER, "0")
    assert Host("node", adjust=True, directory=tmp_path).restore() == ()
    assert sysctl.read(FILTER) == "0"


def test_each_role_restores_only_its_own_changes(tmp_path: Path) -> None:
    Host("node", adjust=True, directory=tmp_path).check([REQUIREMENT])
    assert Host("gateway", adjust=True, directory=tmp_path).restore() == ()
    assert Host("node", adjust=True, directory=tmp_path).restore() == (FILTER,)


def test_the_error_about_a_failed_write_names_the_command() -> None:
    with pytest.raises(Refused, match="sysctl -w net/ipv4/conf/lo/rp_filter=x"):
        sysctl.write(FILTER, "x")
    with pytest.raises(Conflict, match="does not exist"):
        sysctl.write(GONE.setting, "1")
