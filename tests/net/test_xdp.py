"""XDP programs on real interfaces: attached, replaced, listed, detached; programs of other
processes are left alone."""

import asyncio
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.errors import Refused
from fairlead.lab import namespace
from fairlead.net import bpffs, xdp
from fairlead.net.elf import ProgramSpec
from fairlead.net.program import PROGRAM_TYPE_XDP, Program

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-xdp"
PASS = struct.pack("<BBhi", 0xB7, 0, 0, 2) + struct.pack("<BBhi", 0x95, 0, 0, 0)


def ip(*words: str) -> None:
    subprocess.run(["ip", "-n", NAME, *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def interface() -> Iterator[int]:
    """Yield the index of eth0, one end of a veth pair, in a namespace that this thread enters."""
    namespace.create(NAME)
    try:
        ip("link", "add", "eth0", "index", "77", "type", "veth", "peer", "name", "end")
        with namespace.inside(NAME):
            yield 77
    finally:
        namespace.delete(NAME)


@pytest.fixture
def pins() -> Iterator[Path]:
    path = bpffs.ROOT / NAME
    bpffs.prepare(path)
    yield path
    bpffs.remove(path)


def passing(name: str) -> Program:
    return Program.load(ProgramSpec(name, "xdp", PASS, ()), {}, program_type=PROGRAM_TYPE_XDP)


def attach(interface: int, name: str, pin: Path, mode: str) -> None:
    with passing(name) as program:
        asyncio.run(xdp.attach(interface, program, pin, mode=mode))


def at(interface: int) -> tuple[str, str] | None:
    found = asyncio.run(xdp.attached(interface))
    return (found.mode, found.program) if found else None


@pytest.mark.parametrize("mode", [xdp.NATIVE, xdp.GENERIC])
def test_a_program_stays_attached_until_its_link_is_detached(
    interface: int, pins: Path, mode: str
) -> None:
    assert at(interface) is None
    attach(interface, "first", pins / "link", mode)
    assert at(interface) == (mode, "first")
    link = xdp.read_link(pins / "link")
    assert link
    assert link.interface == interface
    xdp.detach(pins / "link")
    assert at(interface) is None
    assert xdp.read_link(pins / "link") is None
    xdp.detach(pins / "link")


def test_another_program_replaces_it_in_the_same_link(interface: int, pins: Path) -> None:
    attach(interface, "first", pins / "link", xdp.GENERIC)
    before = (pins / "link").stat().st_ino
    attach(interface, "second", pins / "link", xdp.GENERIC)
    assert at(interface) == (xdp.GENERIC, "second")
    assert (pins / "link").stat().st_ino == before


def test_another_mode_creates_a_new_link(interface: int, pins: Path) -> None:
    attach(interface, "first", pins / "link", xdp.GENERIC)
    attach(interface, "second", pins / "link", xdp.NATIVE)
    assert at(interface) == (xdp.NATIVE, "second")


def test_a_recreated_interface_gets_a_new_link(interface: int, pins: Path) -> None:
    attach(interface, "first", pins / "link", xdp.NATIVE)
    ip("link", "delete", "eth0")
    link = xdp.read_link(pins / "link")
    assert link
    assert link.interface == 0
    ip("link", "add", "eth0", "index", str(interface), "type", "veth", "peer", "name", "end")
    assert at(interface) is None
    attach(interface, "second", pins / "link", xdp.NATIVE)
    assert at(interface) == (xdp.NATIVE, "second")


@pytest.mark.parametrize("mode", [xdp.NATIVE, xdp.GENERIC])
def test_a_program_of_another_process_is_left_alone(interface: int, pins: Path, mode: str) -> None:
    with passing("theirs") as program:
        program.pin(pins / "theirs")
    # Run it in this thread's namespace: `ip -n` would mount another /sys, without the pin.
    subprocess.run(
        ["ip", "link", "set", "eth0", "xdpgeneric", "pinned", pins / "theirs"],
        check=True,
        timeout=20,
    )
    with pytest.raises(Refused, match=r"theirs \(id \d+, generic\) is already attached"):
        attach(interface, "ours", pins / "link", mode)
    assert at(interface) == (xdp.GENERIC, "theirs")
    assert xdp.read_link(pins / "link") is None


def test_a_driver_without_xdp_is_an_error(interface: int, pins: Path) -> None:
    ip("link", "add", "plain", "index", "78", "type", "bridge")
    with pytest.raises(Refused, match=r"Operation not supported.*gateway.attach"):
        attach(78, "ours", pins / "link", xdp.NATIVE)


def test_a_test_run_returns_packet_and_duration() -> None:
    with passing("ours") as program:
        trial = program.test_run(bytes(64), with_context=False, repeat=1000)
    assert trial[:3] == (2, bytes(64), b"")
    assert trial.duration_ns > 0
