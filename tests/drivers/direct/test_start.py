"""Starts that fail, starts while a program without pins still forwards, and a cleanup next to the
pins of other gateways."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.direct.conftest import (
    NODE1,
    PINS,
    WEB,
    Run,
    add_cable,
    driver,
    ip,
    load_balancer,
    reconcile,
)
from tests.drivers.direct.site import PINS as SITE_PINS
from tests.drivers.direct.site import (
    Conversation,
    made_site,  # noqa: F401 - a fixture
    pods,
    running_gateway,
)

from fairlead.config import AttachKind, GatewayConfig
from fairlead.drivers.direct import DirectDriver, Sizes, remove_pins
from fairlead.drivers.direct.maps.pins import OBJECTS
from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.lab.rundir import RunDirectory
from fairlead.net import bpffs, tc, xdp
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import MapSpec, read_object
from fairlead.net.program import PROGRAM_TYPE_XDP, Program

pytestmark = pytest.mark.root

MACHINE = Path(GatewayConfig().pin_path)
FOREIGN = PINS.with_name(f"{PINS.name}-foreign")


@pytest.fixture(autouse=True)
def _without_foreign_pins() -> Iterator[None]:
    yield
    bpffs.remove(FOREIGN)


def two_interfaces(attach_kind: AttachKind = "tc") -> DirectDriver:
    sizes = Sizes(1 << 20, connections=1024, datagrams=1024)
    return DirectDriver(["eth0", "eth1"], pin_path=PINS, sizes=sizes, attach_kind=attach_kind)


async def occupy_xdp(interface: str) -> None:
    """Attach an XDP program of another owner."""
    object_file = read_object(OBJECTS / "direct_xdp.o")
    maps = create_maps(list(object_file.maps.values()))
    with Program.load(
        object_file.programs["direct"], maps, program_type=PROGRAM_TYPE_XDP
    ) as program:
        await xdp.attach(socket.if_nametoindex(interface), program, FOREIGN, mode=xdp.GENERIC)


@pytest.mark.parametrize("why", ["an interface is missing", "XDP is taken on the second"])
def test_a_failed_start_leaves_no_pins_or_programs(run: Run, why: str) -> None:
    async def scenario() -> None:
        refusal: type[FairleadError] = Unavailable
        made = two_interfaces()
        if why != "an interface is missing":
            refusal, made = Refused, two_interfaces(attach_kind="xdp-generic")
            add_cable("eth1", "198.51.100.10/24")
            await occupy_xdp("eth1")
        with pytest.raises(refusal):
            await made.open()
        assert await tc.filters(f"fairlead:{PINS}") == ()
        assert list(PINS.iterdir()) == []

    run(scenario)


def test_a_failed_start_leaves_the_programs_of_its_predecessor(run: Run) -> None:
    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        first = two_interfaces()
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        await first.close()
        before = await tc.filters(f"fairlead:{PINS}")
        assert len(before) == 2
        ip("link", "delete", "eth1")
        with pytest.raises(Unavailable, match="there is no interface eth1"):
            await two_interfaces().open()
        assert await tc.filters(f"fairlead:{PINS}") == before[:1]
        add_cable("eth1", "198.51.100.10/24")
        successor = two_interfaces()
        await successor.open()
        assert WEB in await successor.read(None)
        await successor.close(remove=True)

    run(scenario)


async def test_a_program_whose_pins_are_gone_forwards_until_the_new_tables_are_filled(
    site: None,
) -> None:
    """The second process is killed before it has filled its maps, so the third one finds pinned
    maps that no program uses."""
    async with pods():
        async with running_gateway() as gateway:
            await gateway.serve({"node1": 1})
            gateway.kill()
        bpffs.remove(SITE_PINS)
        async with running_gateway() as second:
            assert await nodes_that_answer() == {"node1"}
            second.kill()
        async with running_gateway() as third:
            assert await nodes_that_answer() == {"node1"}
            await third.serve({"node2": 1})
            assert await nodes_that_answer() == {"node2"}
            await third.send("remove")


async def nodes_that_answer() -> set[str]:
    return {
        (await (await Conversation.start(family)).ask())[0] for family in (2, 10) for _ in range(5)
    }


def test_a_cleanup_keeps_foreign_pins_in_subdirectories(run: Run) -> None:
    async def scenario() -> None:
        deeper = PINS / "other"
        first = driver()
        await first.open()
        await reconcile(first, load_balancer(NODE1))
        await first.close()
        bpffs.prepare(deeper / "layout-1")
        with Map.create(MapSpec("settings", 2, 4, 8, 1)) as settings:
            settings.pin(deeper / "layout-1" / "settings")
        assert f"pins in {PINS}" in await remove_pins(PINS)
        assert [found.name for found in PINS.rglob("*")] == ["other", "layout-1", "settings"]
        assert await remove_pins(PINS) == []

    run(scenario)


def test_the_pins_of_labs_and_of_the_gateway_of_this_machine_are_separate() -> None:
    pins: Path = RunDirectory("lab").pins("gw1")
    assert MACHINE not in pins.parents
    assert pins not in MACHINE.parents
