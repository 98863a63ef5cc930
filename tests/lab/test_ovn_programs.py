"""The programs of OVN are found, and versions are not mixed."""

from pathlib import Path

import pytest

from fairlead.errors import Refused
from fairlead.lab.ovn.programs import VARIABLE, program, schema


def test_with_a_chosen_version_programs_with_their_own_libraries_come_first(tmp_path: Path) -> None:
    for folder in ("bin", "usr/bin"):
        executable(tmp_path / folder / "ovn-nbctl")
    executable(tmp_path / "usr/lib/openvswitch-switch/ovs-vswitchd")
    chosen = {VARIABLE: str(tmp_path)}
    assert program("ovn-nbctl", chosen) == tmp_path / "bin/ovn-nbctl"
    assert program("ovs-vswitchd", chosen) == tmp_path / "usr/lib/openvswitch-switch/ovs-vswitchd"


def test_with_a_chosen_version_no_other_version_is_used(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    executable(installed / "ovn-nbctl")
    assert program("ovn-nbctl", {"PATH": str(installed)}).name == "ovn-nbctl"
    chosen = {VARIABLE: str(tmp_path / "empty"), "PATH": str(installed)}
    with pytest.raises(Refused, match=f"ovn-nbctl is not in .*empty, which {VARIABLE} names"):
        program("ovn-nbctl", chosen)
    with pytest.raises(Refused, match=r"ovn-nb\.ovsschema is not in"):
        schema("ovn-nb.ovsschema", chosen)


def test_the_schema_is_that_of_the_chosen_version(tmp_path: Path) -> None:
    path = tmp_path / "usr/share/openvswitch/vswitch.ovsschema"
    path.parent.mkdir(parents=True)
    path.touch()
    assert schema("vswitch.ovsschema", {VARIABLE: str(tmp_path)}) == path


def executable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
