"""The selection of a gateway's interfaces by pattern, subnet and default route, on real interfaces
that appear and disappear, and with real packets."""

import asyncio
import socket
import subprocess
from collections.abc import Sequence

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
from tests.drivers.direct.gateway import Options
from tests.drivers.direct.site import (
    CLIENT,
    Conversation,
    made_site,  # noqa: F401 - a fixture
    pods,
    running_gateway,
)

from fairlead.errors import Unavailable
from fairlead.net import tc

pytestmark = pytest.mark.root


async def attached() -> set[str]:
    """Return the interfaces to which the program is attached, as the kernel reports them."""
    return {socket.if_indextoname(each.interface) for each in await tc.filters(f"fairlead:{PINS}")}


def routed() -> set[str]:
    """Return the interfaces with a rule for the table of blackhole routes."""
    command = ["ip", "-n", NAME, "rule", "show"]
    rules = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout
    return {line.split("iif ")[1].split()[0] for line in rules.splitlines() if "iif " in line}


async def until_served(names: set[str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not (await attached() == names == routed()):
            await asyncio.sleep(0.01)


def test_interfaces_are_served_while_they_match(run: Run) -> None:
    """The driver follows events of the kernel; no audit runs."""

    async def scenario() -> None:
        made = driver(interfaces=["192.0.2.0/24", "late?"])
        await made.open()
        assert await attached() == {"eth0"}
        await reconcile(made, load_balancer(NODE1))
        following = asyncio.create_task(made.run())
        add_cable("late0", "198.18.0.1/24")
        await until_served({"eth0", "late0"})
        add_cable("other", "198.18.1.1/24")
        ip("address", "add", "192.0.2.99/24", "dev", "other")
        await until_served({"eth0", "late0", "other"})
        ip("address", "delete", "192.0.2.99/24", "dev", "other")
        await until_served({"eth0", "late0"})
        ip("link", "delete", "late0")
        await until_served({"eth0"})
        ip("address", "delete", "192.0.2.10/24", "dev", "eth0")
        await made.read(None)
        await until_served({"eth0"})
        ip("address", "add", "192.0.2.10/24", "dev", "other")
        await until_served({"other"})
        following.cancel()
        await made.close(remove=True)
        assert await attached() == set()

    run(scenario)


def test_the_interface_of_the_default_route_is_followed(run: Run) -> None:
    async def scenario() -> None:
        ip("route", "add", "default", "via", "192.0.2.1")
        made = driver(interfaces=["default-route"])
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        following = asyncio.create_task(made.run())
        await until_served({"eth0"})
        add_cable("eth1", "198.18.0.1/24")
        ip("route", "replace", "default", "via", "198.18.0.2")
        await until_served({"eth1"})
        ip("-6", "address", "add", "2001:db8::10/64", "dev", "eth0", "nodad")
        ip("-6", "route", "add", "default", "via", "2001:db8::1")
        await until_served({"eth0", "eth1"})
        following.cancel()
        await made.close(remove=True)

    run(scenario)


@pytest.mark.parametrize(
    ("selectors", "words"),
    [
        (["eth0", "eth9"], r"there is no interface eth9; this host has .*eth0 \(192.0.2.10\)"),
        (
            ["ens*", "198.51.100.0/24"],
            r"no interface matches ens\*, 198.51.100.0/24; this host has .*eth0 \(192.0.2.10\)",
        ),
    ],
)
def test_a_start_without_its_interfaces_names_the_present_ones(
    run: Run, selectors: Sequence[str], words: str
) -> None:
    async def scenario() -> None:
        ip("-6", "address", "flush", "dev", "eth0")
        made = driver(interfaces=selectors)
        with pytest.raises(Unavailable, match=words):
            await made.open()

    run(scenario)


@pytest.mark.parametrize("selector", ["eth*", "192.0.2.0/24", "2001:db8::/64"])
async def test_packets_are_forwarded_on_an_interface_that_was_not_named(
    site: None, selector: str
) -> None:
    async with pods(), running_gateway(Options("tc", interfaces=(selector,))) as gateway:
        answer = await gateway.serve({"node1": 1})
        assert [name for name, *_ in answer["interfaces"]] == ["eth0"]
        for family in (socket.AF_INET, socket.AF_INET6):
            assert await (await Conversation.start(family)).ask() == ("node1", CLIENT[family])
        await gateway.send("remove")
