"""Sessions with real routers: BIRD, FRR and GoBGP learn what is announced, and nothing else."""

from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import Routers
from tests.drivers.bgp.routers import Neighbor
from tests.drivers.bgp.site import (
    API,
    HOST6,
    ROUTER6,
    VIP,
    VIP6,
    WEB,
    announced,
    intent,
    peer,
    running,
)

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
EACH = pytest.mark.parametrize("kind", ["bird", "frr", "gobgp"])


@EACH
async def test_a_router_learns_addresses_of_both_families(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind)
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6), API: intent("203.0.113.9")})
        await router.learns(f"{VIP}/32", f"{VIP6}/128", "203.0.113.9/32")
        await announced(driver, {WEB: intent(VIP)}, API)
        await router.learns(f"{VIP}/32")
        assert await driver.remove()
        await router.learns()
        assert not (folder / "b").exists()


@EACH
async def test_a_session_over_ipv6_carries_both_families(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind, Neighbor(HOST6, extended_next_hop=True), address=ROUTER6)
    await router.start()
    async with running(folder / "b", [peer(address=ROUTER6)]) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6)})
        await router.learns(f"{VIP}/32", f"{VIP6}/128")
