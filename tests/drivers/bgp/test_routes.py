"""The routes that routers install: weights, aggregates, many addresses; and what never leaks."""

import re
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import OTHER, Routers
from tests.drivers.bgp.routers import Neighbor, Router
from tests.drivers.bgp.site import (
    API,
    VIP,
    VIP6,
    WEB,
    announced,
    intent,
    ip,
    peer,
    reconcile,
    running,
    until,
)

from fairlead.lab import namespace
from fairlead.model import ServiceKey
from fairlead.net.bird import Bird

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
EACH = pytest.mark.parametrize("kind", ["bird", "frr", "gobgp"])
WITH_KERNEL = pytest.mark.parametrize("kind", ["bird", "frr"])


def weights(router: Router, prefix: str) -> dict[str, int]:
    """Return the weight of each next hop in the router's kernel."""
    found = re.findall(r"via (\S+) dev \S+ weight (\d+)", router.kernel(prefix))
    return {via: int(weight) for via, weight in found}


@WITH_KERNEL
async def test_routers_share_traffic_by_the_number_of_pods(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind, Neighbor(), Neighbor("198.51.100.2"))
    await router.start()
    async with running(folder / "b", [peer()]) as one:
        with namespace.inside(OTHER):
            async with running(folder / "o", [peer()]) as other:
                await announced(other, {WEB: intent(weight=1)})
        await announced(one, {WEB: intent(weight=3)})

        async def shared(ratio: float) -> bool:
            found = weights(router, f"{VIP}/32")
            return len(found) == 2 and found["198.51.100.1"] == ratio * found["198.51.100.2"]

        await until(lambda: shared(3))
        await announced(one, {WEB: intent(weight=1)})
        await until(lambda: shared(1))
        with namespace.inside(OTHER):
            async with running(folder / "o", [peer()]) as other:
                await other.remove()

        async def alone() -> bool:
            return "via 198.51.100.1 dev e0" in router.kernel(f"{VIP}/32")

        await until(alone)


async def test_a_weight_is_a_link_bandwidth_and_a_plain_community(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("frr")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(weight=8)})
        await router.learns(f"{VIP}/32")
        text = await router.attributes(f"{VIP}/32")
        assert "lb:64513:1000000 (8.000 mbps)" in text
        assert "64513:8" in text


@EACH
async def test_an_aggregate_is_announced_while_any_of_its_addresses_is(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind)
    await router.start()
    lengths = {"aggregation_length": 24, "aggregation_length_v6": 64}
    one, two = intent(VIP, VIP6, **lengths), intent("203.0.113.9", **lengths)
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: one, API: two})
        await router.learns("203.0.113.0/24", "2001:db8:f::/64")
        await announced(driver, {API: two}, WEB)
        await router.learns("203.0.113.0/24")
        await announced(driver, {}, API)
        await router.learns()


async def test_services_on_one_address_are_withdrawn_with_the_last(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        both = {
            WEB: intent(communities=("64512:1",), peers=("tor1",)),
            API: intent(communities=("64512:2",)),
        }
        await announced(driver, both)
        await router.learns(f"{VIP}/32")
        text = await router.attributes(f"{VIP}/32")
        assert "(64512,1) (64512,2)" in text
        await announced(driver, {API: both[API]}, WEB)
        assert await router.prefixes() == {f"{VIP}/32"}

        async def without() -> bool:
            return "(64512,1)" not in await router.attributes(f"{VIP}/32")

        await until(without)
        await announced(driver, {}, API)
        await router.learns()


@EACH
async def test_nothing_but_the_announced_addresses_leaks(
    folder: Path, router_of: Routers, kind: str
) -> None:
    """Routes of the host, addresses that no router may learn, and a Service with an invalid
    community stay here; other Services are announced."""
    ip("route", "add", "192.0.2.0/24", "via", "198.51.100.2")
    ip("addr", "add", "203.0.113.200/32", "dev", "lo")
    router = router_of(kind)
    await router.start()
    bad, worse = ServiceKey("default", "bad"), ServiceKey("default", "worse")
    async with running(folder / "b", [peer()]) as driver:
        intents = {
            WEB: intent(),
            bad: intent("127.0.0.1"),
            worse: intent("203.0.113.77", communities=("no-such-name",)),
        }
        outcomes = await reconcile(driver, intents)
        assert outcomes[bad].state == "refused"
        assert "127.0.0.1" in outcomes[bad].message
        assert "no-such-name" in outcomes[worse].message
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")


@WITH_KERNEL
async def test_a_thousand_addresses_reach_the_kernel_of_the_router(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind)
    await router.start()
    first = int(ip_address("203.0.112.0"))
    intents = {
        ServiceKey("default", f"s{number:04}"): intent(str(ip_address(first + number)))
        for number in range(1000)
    }
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent("192.0.2.200")})
        await router.learns("192.0.2.200/32")
        await announced(driver, intents, WEB)

        async def complete() -> bool:
            return router.kernel().count("via 198.51.100.1") == 1000

        await until(complete)
        (exported,) = {len(await Bird(driver.speaker.bird.client.path).exported("p.tor1"))}
        assert exported == 1000
        assert not driver.diff(driver.render(intents), await driver.read(None))
        await announced(driver, {}, *intents)

        async def gone() -> bool:
            return not router.kernel()

        await until(gone)
