"""Links, addresses, routes and neighbours in a separate namespace, compared with the output of
ip(8)."""

import ctypes
import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.net.interfaces import Link
from fairlead.net.link import Neighbour, Nexthop, Rtnetlink

pytestmark = pytest.mark.root

MAC, PEER_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
_numbers = itertools.count(1)
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


class Netns:
    """A namespace created with ip(8), and a connection into it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = Path("/run/netns", name)
        with Path("/proc/thread-self/ns/net").open() as home, self.path.open() as there:
            assert _libc.setns(there.fileno(), 0) == 0
            try:
                self.links = Rtnetlink()
            finally:
                assert _libc.setns(home.fileno(), 0) == 0

    def show(self, *arguments: str) -> Any:
        return json.loads(ip("-n", self.name, "-json", "-details", *arguments) or "[]")


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Netns, Netns]]:
    """Two namespaces, joined by a veth pair: `left` in one, `right` in the other; both up."""
    names = [f"flt-{os.getpid()}-link{next(_numbers)}" for _ in range(2)]
    for name in names:
        ip("netns", "add", name)
    try:
        one, two = (Netns(name) for name in names)
        async with one.links, two.links:
            await one.links.add_veth("left", MAC, "right", PEER_MAC, two.path, mtu=1400)
            await one.links.set_state("left", up=True)
            await two.links.set_state("right", up=True)
            yield one, two
    finally:
        for name in names:
            ip("netns", "del", name)


async def test_a_veth_joins_two_namespaces(pair: tuple[Netns, Netns]) -> None:
    one, two = pair
    left, right = (await one.links.links())["left"], (await two.links.links())["right"]
    assert left == Link("left", left.index, MAC, 1400, True)
    assert right == Link("right", right.index, PEER_MAC, 1400, True)
    await one.links.set_state("left", up=False)
    assert not (await one.links.links())["left"].up
    for _ in range(2):
        await one.links.delete_link("left")
    assert "right" not in await two.links.links()
    with pytest.raises(Conflict, match="network device left"):
        await one.links.index("left")


async def test_a_bridge_forwards_at_once(pair: tuple[Netns, Netns]) -> None:
    one, _ = pair
    await one.links.add_bridge("lan")
    await one.links.set_bridge("left", "lan")
    (bridge,) = one.show("link", "show", "lan")
    data = bridge["linkinfo"]["info_data"]
    assert (data["stp_state"], data["forward_delay"], data["mcast_snooping"]) == (0, 0, 0)
    (port,) = one.show("link", "show", "left")
    assert port["master"] == "lan"
    assert await one.links.ports("lan") == ["left"]
    await one.links.add_bridge("other")
    for _ in range(2):
        await one.links.set_bridge("left", "other")
    assert await one.links.ports("lan") == []
    assert await one.links.ports("other") == ["left"]
    assert await one.links.ports("wan") == []


@pytest.mark.parametrize("interface", ["192.0.2.1/24", "2001:db8::1/64"])
async def test_an_address_is_usable_at_once_and_may_be_set_twice(
    pair: tuple[Netns, Netns], interface: str
) -> None:
    one, _ = pair
    for _ in range(2):
        await one.links.set_address("left", interface)
    (link,) = one.show("address", "show", "dev", "left", "scope", "global")
    shown = [entry for entry in link["addr_info"] if entry]
    assert [f"{entry['local']}/{entry['prefixlen']}" for entry in shown] == [interface]
    assert not shown[0].get("tentative")


async def test_routes_are_replaced_shared_and_deleted(pair: tuple[Netns, Netns]) -> None:
    one, _ = pair
    for family, network in (("-4", "192.0.2"), ("-6", "2001:db8:")):
        mark = "." if family == "-4" else ":"
        vips = "203.0.113.0/24" if family == "-4" else "2001:db8:f::/64"
        await one.links.set_address("left", f"{network}{mark}1/{24 if family == '-4' else 64}")
        await one.links.set_route(vips, Nexthop(f"{network}{mark}11"))
        await one.links.set_route(vips, Nexthop(f"{network}{mark}12", "left"))
        (route,) = one.show(family, "route", "show", vips)
        assert (route["gateway"], route["dev"]) == (f"{network}{mark}12", "left")
        await one.links.delete_route(vips)
        await one.links.set_route(
            vips, *(Nexthop(f"{network}{mark}{last}", "left", last) for last in (11, 12))
        )
        (route,) = one.show(family, "route", "show", vips)
        assert [(hop["gateway"], hop["weight"]) for hop in route["nexthops"]] == [
            (f"{network}{mark}11", 11),
            (f"{network}{mark}12", 12),
        ]
        for _ in range(2):
            await one.links.delete_route(vips)
        assert one.show(family, "route", "show", vips) == []


async def test_a_default_route_through_a_router_that_no_address_leads_to(
    pair: tuple[Netns, Netns],
) -> None:
    _, two = pair
    for address, default, via in (
        ("10.244.1.2/32", "0.0.0.0/0", "169.254.1.1"),
        ("2001:db8::2/128", "::/0", "fe80::1"),
    ):
        await two.links.set_address("right", address)
        await two.links.set_neighbour("right", via, MAC)
        await two.links.set_route(default, Nexthop(via, "right"), onlink=True)
    index = await two.links.index("right")
    found = await two.links.neighbours()
    assert sorted(found, key=lambda neighbour: neighbour.address) == [
        Neighbour("169.254.1.1", MAC, index),
        Neighbour("fe80::1", MAC, index),
    ]
    for family, via in (("-4", "169.254.1.1"), ("-6", "fe80::1")):
        (route,) = two.show(family, "route", "show", "default")
        assert (route["gateway"], route["dev"]) == (via, "right")


async def test_a_route_out_of_a_device_prefers_a_source(pair: tuple[Netns, Netns]) -> None:
    one, _ = pair
    await one.links.set_state("lo", up=True)
    for address, prefix in (
        ("192.0.2.21", "10.244.1.2/32"),
        ("2001:db8:1::15", "2001:db8:244::2/128"),
    ):
        await one.links.set_address("lo", f"{address}/{128 if ':' in address else 32}")
        await one.links.set_route(prefix, Nexthop(device="left"), source=address)
        family = "-6" if ":" in address else "-4"
        (route,) = one.show(family, "route", "show", prefix.partition("/")[0])
        assert (route["dev"], route["prefsrc"]) == ("left", address)


async def test_errors_name_the_operation(pair: tuple[Netns, Netns]) -> None:
    one, two = pair
    with pytest.raises(Unavailable, match=r"add veth left .* EEXIST"):
        await one.links.add_veth("left", MAC, "other", PEER_MAC, two.path)
    with pytest.raises(FairleadError, match=r"set route 203\.0\.113\.0/24 via 192\.0\.2\.9"):
        await one.links.set_route("203.0.113.0/24", Nexthop("192.0.2.9"))
    with pytest.raises(Conflict, match="nothing0"):
        await one.links.set_address("nothing0", "192.0.2.1/24")
