"""The options of a peer, each with real routers: BIRD, FRR and GoBGP."""

from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import ROUTER as ROUTER_NAMESPACE
from tests.drivers.bgp.conftest import Routers
from tests.drivers.bgp.routers import Neighbor
from tests.drivers.bgp.site import (
    VIP,
    VIP6,
    WEB,
    announced,
    established,
    intent,
    ip,
    peer,
    reconcile,
    running,
    until,
)

from fairlead.announce_sections import BfdConfig

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
EACH = pytest.mark.parametrize("kind", ["bird", "frr", "gobgp"])
WITH_KERNEL = pytest.mark.parametrize("kind", ["bird", "frr"])


@EACH
async def test_a_session_needs_the_same_password_on_both_sides(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind, Neighbor(password="right"))
    await router.start()
    peers = [peer(password="wrong")]
    async with running(folder / "b", lambda: peers) as driver:
        await reconcile(driver, {WEB: intent()})
        driver.watch.sessions["tor1"].young_until_s = 0  # without the patience for a new session

        async def reported() -> bool:
            await driver.poll()
            outcomes = await reconcile(driver, {WEB: intent()})
            return WEB in outcomes and outcomes[WEB].state == "unavailable"

        await until(reported)
        outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert outcome.reason == "BgpSessionDown"
        assert "tor1 (198.51.100.254, AS 64512)" in outcome.message
        assert "same password" in outcome.message
        (session,) = driver.status().sessions
        assert session.state == "down"
        assert "same password" in session.last_error
        assert await router.prefixes() == set()
        peers[:] = [peer(password="right\n")]
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")


@EACH
async def test_ttl_security_of_both_sides(folder: Path, router_of: Routers, kind: str) -> None:
    router = router_of(kind, Neighbor(gtsm=True))
    await router.start()
    async with running(folder / "b", [peer(ttl_security=True)]) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")


@EACH
async def test_a_neighbor_behind_a_hop_needs_multihop(
    folder: Path, router_of: Routers, kind: str
) -> None:
    """The router has its session at an address of its loopback interface."""
    loopback = "192.0.2.254"
    ip("-n", ROUTER_NAMESPACE, "addr", "add", f"{loopback}/32", "dev", "lo")
    ip("route", "add", loopback, "via", "198.51.100.254")
    router = router_of(kind, Neighbor(multihop=4, source=loopback))
    await router.start()
    peers = [peer(address=loopback)]
    async with running(folder / "b", lambda: peers) as driver:
        await reconcile(driver, {WEB: intent()})
        assert not await router.prefixes()
        peers[:] = [peer(address=loopback, multihop=4)]
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")


@EACH
async def test_a_local_as_number_replaces_that_of_the_section(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind, Neighbor(asn=65001))
    await router.start()
    async with running(folder / "b", [peer(local_asn=65001)]) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        assert "65001" in await router.attributes(f"{VIP}/32")


@EACH
async def test_a_wrong_as_number_is_named(folder: Path, router_of: Routers, kind: str) -> None:
    router = router_of(kind)
    await router.start()
    async with running(folder / "b", [peer(asn=64999)]) as driver:
        await reconcile(driver, {WEB: intent()})

        async def named() -> bool:
            await driver.poll()
            return "AS" in driver.status().sessions[0].last_error

        await until(named)
        driver.watch.sessions["tor1"].young_until_s = 0
        outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert "compare asn and announce.bgp.asn" in outcome.message


@EACH
async def test_communities_reach_the_router(folder: Path, router_of: Routers, kind: str) -> None:
    router = router_of(kind)
    await router.start()
    wanted = ("64512:100", "64512:1:2", "no-export")
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(communities=wanted)})
        await router.learns(f"{VIP}/32")
        text = (await router.attributes(f"{VIP}/32")).replace(" ", "").replace(",", ":")
        assert "64512:100" in text
        assert "64512:1:2" in text
        assert "65535:65281" in text or "no-export" in text
        await announced(driver, {WEB: intent(communities=("64512:200",))})

        async def replaced() -> bool:
            text = (await router.attributes(f"{VIP}/32")).replace(" ", "").replace(",", ":")
            return "64512:200" in text and "64512:100" not in text

        await until(replaced)


@EACH
async def test_an_internal_peer_gets_the_local_preference(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind, asn=64513)
    await router.start()
    async with running(folder / "b", [peer(asn="internal")]) as driver:
        await announced(driver, {WEB: intent(local_preference=321)})
        await router.learns(f"{VIP}/32")
        assert "321" in await router.attributes(f"{VIP}/32")


@EACH
async def test_a_leaving_address_has_the_community_before_it_is_withdrawn(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind)
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        outcomes = await reconcile(driver, {WEB: intent(leaving=True)})
        assert outcomes[WEB].again_s > 0

        async def shut_down() -> bool:
            text = (await router.attributes(f"{VIP}/32")).replace(" ", "").replace(",", ":")
            return any(each in text for each in ("65535:0", "graceful", "planned-shut"))

        await until(shut_down)

        async def withdrawn() -> bool:
            await reconcile(driver, {WEB: intent(leaving=True)})
            return await router.prefixes() == set()

        await until(withdrawn)
        # It is not announced again while it leaves.
        assert await reconcile(driver, {WEB: intent(leaving=True)}) == {}


@EACH
async def test_too_many_prefixes_are_named(folder: Path, router_of: Routers, kind: str) -> None:
    router = router_of(kind, Neighbor(max_prefixes=2))
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        many = intent("203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4")
        await reconcile(driver, {WEB: many})

        async def named() -> bool:
            await driver.poll()
            return "Maximum number of prefixes" in driver.status().sessions[0].last_error

        await until(named)
        driver.watch.sessions["tor1"].young_until_s = 0
        outcome = (await reconcile(driver, {WEB: many})).get(WEB)
        if outcome is not None and outcome.state == "unavailable":
            assert "raise the limit of prefixes" in outcome.message


@EACH
async def test_a_prefix_that_the_router_refuses_does_not_affect_others(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind, Neighbor(refused=("203.0.113.8/32",)))
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent("203.0.113.8", "203.0.113.9")})
        await router.learns("203.0.113.9/32")


@WITH_KERNEL
async def test_bfd_finds_a_dead_host(folder: Path, router_of: Routers, kind: str) -> None:
    """Without BFD, the hold time of 60 s would be longer than this test waits."""
    router = router_of(kind, Neighbor(bfd=True))
    await router.start()
    peers = [peer(bfd=BfdConfig(interval_ms=100), hold_time_s=60, keepalive_time_s=20)]
    async with running(folder / "b", peers) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")

        async def bfd_is_up() -> bool:
            await driver.poll()
            return driver.status().sessions[0].bfd == "up"

        await until(bfd_is_up)
        ip("link", "set", "e0", "down")
        await router.learns()
        ip("link", "set", "e0", "up")
        await router.learns(f"{VIP}/32")


@EACH
async def test_only_the_wanted_families_are_announced(
    folder: Path, router_of: Routers, kind: str
) -> None:
    router = router_of(kind)
    await router.start()
    async with running(folder / "b", [peer(families=("IPv6",))]) as driver:
        await established(driver, "tor1")
        outcomes = await reconcile(driver, {WEB: intent(VIP, VIP6)})
        await router.learns(f"{VIP6}/128")
        assert outcomes[WEB].state == "unavailable"
        assert outcomes[WEB].in_part
        assert "IPv4" in outcomes[WEB].message


@EACH
async def test_the_source_address_and_the_port_of_a_peer(
    folder: Path, router_of: Routers, kind: str
) -> None:
    ip("addr", "add", "198.51.100.77/24", "dev", "e0")
    router = router_of(kind, Neighbor("198.51.100.77"), port=1790)
    await router.start()
    peers = [peer(source_address="198.51.100.77", port=1790)]
    async with running(folder / "b", peers, local_port=1179) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        assert "198.51.100.77" in await router.attributes(f"{VIP}/32")
