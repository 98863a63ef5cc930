"""What others do to the interfaces of a gateway: a removed program is attached again, and while the
gateway does not forward, it says why."""

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest
from tests.drivers.direct.conftest import (
    DEADLINE_S,
    NAME,
    NODE1,
    PINS,
    Run,
    add_cable,
    driver,
    ip,
    load_balancer,
    reconcile,
)
from tests.drivers.direct.site import (
    CLIENT,
    Conversation,
    made_site,  # noqa: F401 - a fixture
    pods,
    running_gateway,
)
from tests.drivers.direct.test_attach import in_site

from fairlead.config import AttachKind
from fairlead.drivers.direct import DirectDriver, remove_pins
from fairlead.drivers.direct.driver import INTERFACE_NOT_FORWARDING, NOT_FORWARDING, PROGRAM_REMOVED
from fairlead.drivers.direct.host_network.attach import Attachments, Problems, Programs
from fairlead.drivers.direct.maps import pins
from fairlead.drivers.direct.maps.pins import OBJECTS
from fairlead.net import tc, xdp
from fairlead.net.bpf import create_maps
from fairlead.net.elf import read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program
from fairlead.net.routing import Routing
from fairlead.role_state import InterfaceState

pytestmark = pytest.mark.root

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def index() -> int:
    return socket.if_nametoindex("eth0")


def change(*words: str) -> None:
    command = ["tc", "-n", NAME, *words]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)


async def delete_qdisc() -> None:
    change("qdisc", "del", "dev", "eth0", "clsact")


async def delete_filter() -> None:
    change("filter", "del", "dev", "eth0", "ingress")


async def replace_filter() -> None:
    """Another program takes the position of ours."""
    read = read_object(OBJECTS / "direct_tc.o")
    maps = create_maps([*read.maps.values()])
    with Program.load(
        read.programs["direct"], maps, program_type=PROGRAM_TYPE_SCHED_CLS
    ) as program:
        await tc.attach(index(), program.descriptor, name="foreign", priority=100)


async def detach_xdp() -> None:
    xdp.detach(PINS / f"xdp-{index()}")


async def delete_xdp_pin() -> None:
    (PINS / f"xdp-{index()}").unlink()


def codes(made: DirectDriver) -> set[str]:
    return {each.code for each in made.findings()}


def problems(made: DirectDriver) -> list[str]:
    """Return why the gateway does not forward."""
    return [each.message for each in made.findings() if each.blocks == "Ready"]


def is_shown(made: DirectDriver, problem: str) -> bool:
    """Return whether this problem keeps the gateway from forwarding; empty: none does."""
    return problems(made) == ([problem] if problem else [])


def is_told(made: DirectDriver, problem: str) -> bool:
    """Return whether this problem is the only one of interfaces that the gateway can do without."""
    others = [each.message for each in made.findings() if each.code == INTERFACE_NOT_FORWARDING]
    return others == [f"{problem}, and the gateway forwards at other interfaces only"]


def is_counted(made: DirectDriver, removals: int) -> bool:
    """Return whether the metric shows this number of removals at eth0."""
    return any(
        sample.value == removals
        for collector in made.collectors()
        for family in collector.collect()
        for sample in family.samples
        if sample.name == "fairlead_programs_removed_total"
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@contextmanager
def following(made: DirectDriver) -> Iterator[None]:
    """Run the driver during the block. Nothing else, such as an audit, repairs anything."""
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("attach_kind", "remove"),
    [
        ("tc", delete_qdisc),
        ("tc", delete_filter),
        ("tc", replace_filter),
        ("xdp-generic", detach_xdp),
        ("xdp-generic", delete_xdp_pin),
    ],
)
def test_a_program_that_others_remove_is_attached_again(
    run: Run, attach_kind: AttachKind, remove: Callable[[], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        made = driver(attach_kind=attach_kind)
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        before = await tc.filters(f"fairlead:{PINS}"), await xdp.attached(index())
        assert codes(made) == set()
        with following(made):
            for times in (1, 2):
                await remove()
                await until(partial(is_counted, made, times))
                after = await tc.filters(f"fairlead:{PINS}"), await xdp.attached(index())
                assert after == before
                assert codes(made) == {PROGRAM_REMOVED}
        await made.close(remove=True)

    run(scenario)


def test_an_interface_without_its_program_loses_what_arrives_there(run: Run) -> None:
    """That another interface forwards does not help: the neighbours still send to this one, until
    its link is down."""

    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        opened = pins.open_pins(PINS, pins.Sizes())
        with closing(Routing()) as routing:
            present = {each.name: each for each in routing.interfaces().values()}
        attachments = Attachments(("eth0", "eth1"), "tc", PINS, 100)
        programs = Programs(opened.tc, opened.xdp, lambda: None)
        await attachments.attach(programs, opened.maps["tags"], present)
        why = "requested by gateway.attach"
        both = tuple(InterfaceState(name, "tc", why) for name in ("eth0", "eth1"))
        assert attachments.shown == both
        await delete_qdisc()
        assert await attachments.look() == {"eth0"}
        problem = "another process has removed the gateway's program from interface eth0"
        assert attachments.shown == (InterfaceState("eth0", "none", why, problem), both[1])
        assert attachments.problems == Problems({"eth0": problem}, {})
        unplugged = present | {"eth0": present["eth0"]._replace(carrier=False)}
        assert attachments.is_current(unplugged)
        assert attachments.problems == Problems({}, {"eth0": problem})
        await attachments.attach(programs, opened.maps["tags"], present)
        assert await attachments.look() == set()
        assert attachments.problems == Problems({}, {})
        attachments.close()
        opened.close()
        await remove_pins(PINS)

    run(scenario)


def test_an_interface_that_is_down_or_absent_does_not_forward(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        with following(made):
            for words, problem in (
                (("set", "eth0", "down"), "interface eth0 is down"),
                (("set", "eth0", "up"), ""),
                (("set", "eth0-end", "down"), "interface eth0 has no carrier"),
                (("set", "eth0-end", "up"), ""),
                (("set", "eth0", "name", "eth9"), "there is no interface eth0"),
                (("set", "eth9", "name", "eth0"), "interface eth0 is down"),
                (("set", "eth0", "up"), ""),
                (("delete", "eth0"), "there is no interface eth0"),
            ):
                if words == ("set", "eth0", "name", "eth9"):
                    ip("link", "set", "eth0", "down")  # before Linux 6.2, to rename it
                ip("link", *words)
                await until(partial(is_shown, made, problem))
                (shown,) = made.interfaces
                assert shown.problem == problem
            add_cable("eth0", "192.0.2.10/24")
            await until(partial(is_shown, made, ""))
        assert codes(made) == set(), "a removed interface is not a removed program"
        await made.close(remove=True)

    run(scenario)


def test_one_of_two_interfaces_may_be_down_or_absent(run: Run) -> None:
    """The neighbours at the other interface still reach the gateway. Loopback is no such
    interface."""

    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        made = driver(interfaces=("eth0", "eth1", "lo"))
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        with following(made):
            for words, problem in (
                (("set", "eth1-end", "down"), "interface eth1 has no carrier"),
                (("set", "eth1", "down"), "interface eth1 is down"),
                (("delete", "eth1"), "there is no interface eth1"),
            ):
                ip("link", *words)
                await until(partial(is_told, made, problem))
                assert problems(made) == []
                assert {each.problem for each in made.interfaces} == {"", problem}
            ip("link", "set", "eth0", "down")
            await until(
                partial(is_shown, made, "interface eth0 is down; there is no interface eth1")
            )
            assert codes(made) == {NOT_FORWARDING}
            ip("link", "set", "eth0", "up")
            await until(partial(is_told, made, problem))
            assert problems(made) == []
        await made.close(remove=True)

    run(scenario)


def test_unused_interfaces_of_a_pattern_may_be_down(run: Run) -> None:
    async def scenario() -> None:
        add_cable("eth1", "198.51.100.10/24")
        ip("link", "add", "eth2", "type", "veth", "peer", "name", "other")
        made = driver(interfaces=("eth?",))
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        assert problems(made) == []
        assert [each.problem for each in made.interfaces] == ["", "", "interface eth2 is down"]
        with following(made):
            ip("link", "set", "eth1", "down")
            await until(partial(is_told, made, "interface eth1 is down"))
            ip("address", "flush", "dev", "eth1")
            await until(lambda: codes(made) == set())
            ip("link", "set", "eth0", "down")
            await until(partial(is_shown, made, "interface eth0 is down"))
            for each in ("eth0", "eth1", "eth2"):
                ip("link", "delete", each)
            await until(partial(is_shown, made, "no interface matches eth?"))
        await made.close(remove=True)

    run(scenario)


async def test_packets_pass_again_after_the_program_was_removed(site: None) -> None:
    """Nothing but an event of the kernel tells the gateway."""
    async with pods(), running_gateway() as gateway:
        await gateway.serve({"node1": 1})
        for family in FAMILIES:
            in_site("gateway", "tc", "qdisc", "del", "dev", "eth0", "clsact")
            assert await (await Conversation.start(family)).ask() == ("node1", CLIENT[family])
        await gateway.send("remove")
