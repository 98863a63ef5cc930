"""Weights as several next hops of one host, at real routers: BIRD and FRR."""

import re
from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import HOST as HOST_NAMESPACE
from tests.drivers.bgp.conftest import SECOND, Routers
from tests.drivers.bgp.routers import Neighbor, Router
from tests.drivers.bgp.site import (
    VIP,
    VIP6,
    WEB,
    announced,
    established,
    intent,
    ip,
    peer,
    running,
    until,
)

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]

NETWORKS = ("198.51.100.8/29", "2001:db8:1::8/125")
ADDRESSES = ("198.51.100.10", "198.51.100.11", "198.51.100.12")
ADDRESSES6 = ("2001:db8:1::a", "2001:db8:1::b", "2001:db8:1::c")
SECOND_ADDRESS = "198.51.100.253"
WEIGHT = "64513:3"


def add_addresses(*addresses: str) -> None:
    for each in addresses:
        length, options = ("64", ("nodad",)) if ":" in each else ("24", ())
        ip("-n", HOST_NAMESPACE, "addr", "add", f"{each}/{length}", "dev", "e0", *options)


def hops(router: Router, address: str) -> set[str]:
    """Return the next hops of the route in the router's kernel."""
    return set(re.findall(r"via (?:inet6 )?(\S+)", router.kernel(address)))


async def await_hops(router: Router, address: str, *wanted: str) -> None:
    """Wait until the route has these next hops. Without any: one, whatever it is."""

    async def as_wanted() -> bool:
        found = hops(router, address)
        return found == set(wanted) if wanted else len(found) == 1

    try:
        await until(as_wanted)
    except TimeoutError as error:
        length = 128 if ":" in address else 32
        shown = await router.attributes(f"{address}/{length}")
        raise AssertionError(f"{router.kernel(address)}, expected {wanted}: {shown}") from error


@pytest.mark.parametrize("kind", ["bird", "frr"])
async def test_a_host_announces_as_many_next_hops_as_its_weight(
    folder: Path, router_of: Routers, kind: str
) -> None:
    """The second router gets one next hop and the weight, because only the first one takes several.
    Addresses come and go without a reset of a session."""
    first = router_of(kind, Neighbor(add_paths=True))
    second = router_of(kind, address=SECOND_ADDRESS, inside=SECOND)
    await first.start()
    await second.start()
    add_addresses(*ADDRESSES[:2], *ADDRESSES6[:2])
    peers = [peer(next_hops=NETWORKS), peer("tor2", SECOND_ADDRESS)]
    async with running(folder / "b", peers) as driver:
        await established(driver, "tor1", "tor2")
        await announced(driver, {WEB: intent(VIP, VIP6, weight=1, most=3)})
        await await_hops(first, VIP, ADDRESSES[0])
        await await_hops(first, VIP6, ADDRESSES6[0])
        since = [each.session.since for each in driver.watch.sessions.values()]
        await announced(driver, {WEB: intent(VIP, VIP6, weight=3, most=3)})
        await await_hops(first, VIP, *ADDRESSES[:2])
        add_addresses(ADDRESSES[2], ADDRESSES6[2])
        await await_hops(first, VIP, *ADDRESSES)
        await await_hops(first, VIP6, *ADDRESSES6)
        await await_hops(second, VIP)
        await await_hops(second, VIP6)
        assert WEIGHT not in as_pair(await first.attributes(f"{VIP}/32"))
        assert WEIGHT in as_pair(await second.attributes(f"{VIP}/32"))
        await announced(driver, {WEB: intent(VIP, VIP6, weight=6, most=9)})
        await await_hops(first, VIP, *ADDRESSES[:2])  # 2 of 3, as 6 of 9
        ip("-n", HOST_NAMESPACE, "addr", "del", f"{ADDRESSES[0]}/24", "dev", "e0")
        await announced(driver, {WEB: intent(VIP, VIP6, weight=9, most=9)})
        await await_hops(first, VIP, *ADDRESSES[1:])
        await announced(driver, {}, WEB)
        await first.learns()
        await second.learns()
        assert [each.session.since for each in driver.watch.sessions.values()] == since


def as_pair(text: str) -> str:
    """Return the text with communities as FRR writes them."""
    return text.replace("(64513,3)", WEIGHT)


async def test_a_router_without_add_path_gets_one_next_hop(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    add_addresses(*ADDRESSES, *ADDRESSES6)
    async with running(folder / "b", [peer(next_hops=NETWORKS)]) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6, weight=3, most=3)})
        await await_hops(router, VIP, ADDRESSES[0])
        await await_hops(router, VIP6, ADDRESSES6[0])
