"""Settings that do harm: found, named, changed with consent only, and put back."""

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
NEED = SysctlRequirement(FILTER, lambda value: value == "1", "2", "packets are dropped")
GONE = SysctlRequirement("net/ipv4/conf/nowhere/rp_filter", lambda value: True, "2", "nothing")


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    """This thread is in a namespace of its own, where strictness is at its worst."""
    name = f"flt-{os.getpid()}-host"
    namespace.create(name)
    try:
        with namespace.inside(name):
            sysctl.write(FILTER, "1")
            yield
    finally:
        namespace.delete(name)


def test_only_values_that_do_harm_are_found_and_settings_that_are_not_there_do_none() -> None:
    values = {"a": "1", "b": "0"}
    requirements = [
        SysctlRequirement(name, lambda value: value == "1", "2", f"why {name}") for name in "abc"
    ]
    assert harmful_settings(requirements, values.get) == (HarmfulSetting(requirements[0], "1"),)


def test_without_consent_nothing_is_changed_and_the_remedy_is_named(tmp_path: Path) -> None:
    host = Host("node", adjust=False, directory=tmp_path)
    (found,) = host.check([NEED, GONE])
    assert found == Finding(
        "HostSettingHarmful",
        f"{FILTER} is 1, should be 2: packets are dropped",
        severity="warning",
        subject=f"sysctl {FILTER}",
        remedy="sysctl -w net/ipv4/conf/lo/rp_filter=2",
    )
    assert sysctl.read(FILTER) == "1"
    assert host.restore() == ()


def test_with_consent_it_is_changed_shown_as_such_and_put_back_by_whoever_comes_later(
    tmp_path: Path,
) -> None:
    host = Host("node", adjust=True, directory=tmp_path)
    for _ in range(2):
        (found,) = host.check([NEED, GONE])
        assert (found.code, found.severity) == ("HostSettingAdjusted", "info")
        assert str(found) == f"{FILTER} was 1, set to 2: packets are dropped"
        assert sysctl.read(FILTER) == "2"
    assert Host("node", adjust=False, directory=tmp_path).restore() == (FILTER,)
    assert sysctl.read(FILTER) == "1"
    assert list(tmp_path.iterdir()) == []


def test_the_first_value_is_remembered_and_what_somebody_else_set_since_is_left_alone(
    tmp_path: Path,
) -> None:
    Host("node", adjust=True, directory=tmp_path).check([NEED])
    sysctl.write(FILTER, "0")
    anything = NEED._replace(harmful=lambda value: value != "2")
    Host("node", adjust=True, directory=tmp_path).check([anything])
    assert sysctl.read(FILTER) == "2"
    Host("node", adjust=True, directory=tmp_path).restore()
    assert sysctl.read(FILTER) == "1"
    Host("node", adjust=True, directory=tmp_path).check([NEED])
    sysctl.write(FILTER, "0")
    assert Host("node", adjust=True, directory=tmp_path).restore() == ()
    assert sysctl.read(FILTER) == "0"


def test_roles_remember_apart(tmp_path: Path) -> None:
    Host("node", adjust=True, directory=tmp_path).check([NEED])
    assert Host("gateway", adjust=True, directory=tmp_path).restore() == ()
    assert Host("node", adjust=True, directory=tmp_path).restore() == (FILTER,)


def test_what_cannot_be_written_says_how_else() -> None:
    with pytest.raises(Refused, match="sysctl -w net/ipv4/conf/lo/rp_filter=x"):
        sysctl.write(FILTER, "x")
    with pytest.raises(Conflict, match="does not exist"):
        sysctl.write(GONE.setting, "1")
