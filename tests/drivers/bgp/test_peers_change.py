"""Peers that are added, removed, changed and refused, and which peers get a route."""

from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import SECOND, Routers
from tests.drivers.bgp.routers import Neighbor
from tests.drivers.bgp.site import (
    API,
    VIP,
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

from fairlead.drivers.bgp import BirdDriver, Peer
from fairlead.drivers.bgp.peers import symbol
from fairlead.model import ServiceKey

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
SECOND_ADDRESS = "198.51.100.253"


async def since(driver: BirdDriver, name: str) -> str:
    """Return since when BIRD has had the session."""
    protocols = await driver.speaker.bird.client.protocols()
    (found,) = [each for each in protocols if each.name == symbol(peer(name))]
    assert found.established
    return found.since


def metric(driver: BirdDriver, name: str) -> dict[str, float]:
    """Return the values of a metric by peer."""
    (collector,) = driver.collectors()
    (family,) = [each for each in collector.collect() if each.name == name]
    return {each.labels["peer"]: each.value for each in family.samples}


async def test_peers_are_added_and_removed_without_resetting_others(
    folder: Path, router_of: Routers
) -> None:
    first, second = router_of("bird"), router_of("frr", inside=SECOND, address=SECOND_ADDRESS)
    await first.start()
    await second.start()
    one, other = peer("tor1"), peer("tor2", SECOND_ADDRESS)
    peers = [one]
    async with running(folder / "b", lambda: peers) as driver:
        await announced(driver, {WEB: intent()})
        begun = await since(driver, "tor1")
        peers[:] = [other, one]
        await established(driver, "tor1", "tor2")
        await second.learns(f"{VIP}/32")
        assert await since(driver, "tor1") == begun
        # Another password resets one session.
        peers[:] = [one, peer("tor2", SECOND_ADDRESS, password="new")]
        await driver.poll()
        await second.learns()
        peers[:] = [one]
        await driver.poll()
        assert [each.peer for each in driver.status().sessions] == ["tor1"]
        assert await first.prefixes() == {f"{VIP}/32"}
        assert await since(driver, "tor1") == begun


async def test_an_address_that_is_absent_for_a_moment_resets_no_session(
    folder: Path, router_of: Routers
) -> None:
    """Neither when the role starts meanwhile. BIRD reports the session if the address stays
    absent."""
    source = "198.51.100.77"
    ip("address", "add", f"{source}/24", "dev", "e0")
    router = router_of("bird", Neighbor(source))
    await router.start()
    peers = [peer("tor1", source_address=source)]
    async with running(folder / "b", peers) as driver:
        await announced(driver, {WEB: intent()})
        begun = await since(driver, "tor1")
    ip("address", "del", f"{source}/24", "dev", "e0")
    async with running(folder / "b", peers) as driver:
        await driver.poll()
        assert driver.status().findings == ()
        ip("address", "add", f"{source}/24", "dev", "e0")
        await driver.poll()
        await established(driver, "tor1")
        assert await since(driver, "tor1") == begun
        # A peer that is new, or has changed, needs the address.
        ip("address", "del", f"{source}/24", "dev", "e0")
        peers[:] = [peer("tor1", source_address=source, password="new")]
        await driver.poll()
        (finding,) = driver.status().findings
        assert f"no interface of this host has sourceAddress {source}" in finding.message


async def test_a_service_chooses_its_peers(folder: Path, router_of: Routers) -> None:
    first, second = router_of("bird"), router_of("frr", inside=SECOND, address=SECOND_ADDRESS)
    await first.start()
    await second.start()
    peers = [peer("tor1"), peer("tor2", SECOND_ADDRESS)]
    async with running(folder / "b", peers) as driver:
        await announced(
            driver, {WEB: intent(VIP, peers=("tor1",)), API: intent("203.0.113.9", peers=("tor2",))}
        )
        await first.learns(f"{VIP}/32")
        await second.learns("203.0.113.9/32")
        await announced(driver, {WEB: intent(VIP), API: intent("203.0.113.9", peers=("tor1",))})
        await first.learns(f"{VIP}/32", "203.0.113.9/32")
        await second.learns(f"{VIP}/32")
        outcomes = await reconcile(driver, {WEB: intent(VIP, peers=("tor9",))})
        assert outcomes[WEB].state == "refused"
        assert "tor9" in outcomes[WEB].message
        await first.learns("203.0.113.9/32")
        await second.learns()


async def test_a_bad_peer_is_refused_alone(folder: Path, router_of: Routers) -> None:
    router = router_of("bird")
    await router.start()
    peers = [
        peer("tor1"),
        peer("zero", address="not-an-address"),
        peer("gone", interface="eth77"),
        peer("hops", address="192.0.2.9", multihop=3, ttl_security=True),
        peer("slow", address="192.0.2.10", graceful_restart=True),
        peer("same", address="198.51.100.254"),
        peer("self", address="198.51.100.1"),
        peer("source", address="192.0.2.11", source_address="192.0.2.99"),
    ]
    async with running(folder / "b", peers) as driver:
        await announced(driver, {WEB: intent(peers=("tor1", "zero", "same"))})
        await router.learns(f"{VIP}/32")
        findings = {each.subject: each for each in driver.status().findings}
        assert {each.code for each in findings.values()} == {"PeerRefused"}
        assert set(findings) == {
            f"BGPPeer {name}" for name in ("zero", "gone", "hops", "slow", "self", "source", "same")
        }
        assert "no interface eth77" in findings["BGPPeer gone"].message
        assert metric(driver, "fairlead_bgp_session_up") == {
            "tor1": 1.0,
            **dict.fromkeys(("zero", "gone", "hops", "slow", "self", "source", "same"), 0.0),
        }
        outcomes = await reconcile(driver, {WEB: intent(peers=("gone",))})
        assert outcomes[WEB].reason == "PeerRefused"


async def test_without_peers_nothing_is_written_and_the_first_peer_gets_the_routes(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    peers: list[Peer] = []
    async with running(folder / "b", lambda: peers) as driver:
        outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert outcome.state == "refused"
        assert "create a BGPPeer" in outcome.message
        await driver.read(None)
        assert not (folder / "b").exists()
        assert not await driver.remove()
        peers.append(peer("tor1"))
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")


async def test_a_peer_that_only_bird_refuses_is_refused_alone(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    peers = [peer("tor1")]
    async with running(folder / "b", lambda: peers) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        begun = await since(driver, "tor1")
        # BIRD has its own limits for timers.
        peers.append(peer("tor2", "192.0.2.10", connect_time_s=65535, multihop=255, port=65535))
        peers.append(peer("tor3", "fe80::1%e0", source_address="198.51.100.1"))
        await driver.poll()
        assert [each.subject for each in driver.status().findings] == ["BGPPeer tor3"]
        assert await since(driver, "tor1") == begun
        assert await router.prefixes() == {f"{VIP}/32"}


async def test_an_unnumbered_session_with_frr(folder: Path, router_of: Routers) -> None:
    router = router_of("frr", Neighbor(interface="e0", extended_next_hop=True))
    await router.start()
    async with running(folder / "b", [peer(interface="e0")]) as driver:
        await announced(driver, {WEB: intent(VIP, "2001:db8:f::7")})
        await router.learns(f"{VIP}/32", "2001:db8:f::7/128")

        async def in_kernel() -> bool:
            return "inet6 fe80::" in router.kernel(f"{VIP}/32")

        await until(in_kernel)
        await driver.poll()
        (session,) = driver.status().sessions
        assert (session.address, session.state, session.announced) == ("e0", "established", 2)


async def test_a_session_that_is_lost_is_reported_and_its_recovery_too(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    requeued: list[object] = []
    peers = [peer("tor1"), peer("tor2", SECOND_ADDRESS)]
    async with running(folder / "b", peers, requeue=requeued.extend) as driver:
        await announced(driver, {WEB: intent()})
        assert WEB in requeued
        driver.watch.sessions["tor2"].young_until_s = 0
        outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert outcome.state == "done"
        (note,) = outcome.notes
        assert note.code == "BgpSessionDown"
        assert "tor2 (198.51.100.253, AS 64512)" in note.message
        assert await reconcile(driver, {WEB: intent()}) == {}  # the note is reported once
        requeued.clear()
        router.kill()

        async def reported() -> bool:
            return WEB in requeued

        await until(reported)
        outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert (outcome.state, outcome.reason) == ("unavailable", "BgpSessionDown")
        await router.start()
        await established(driver, "tor1")
        assert (await reconcile(driver, {WEB: intent()}))[WEB].state == "done"
        (up, down) = driver.status().sessions
        assert (up.state, down.state) == ("established", "down")
        assert up.last_error


async def test_what_bird_receives_from_a_router_is_not_used(
    folder: Path, router_of: Routers
) -> None:
    """A router that announces a default route to the host changes nothing there."""
    router = router_of("frr")
    text = router._text()  # type: ignore[attr-defined]
    router._text = lambda: text.replace(  # type: ignore[attr-defined]
        "  neighbor 198.51.100.1 activate",
        "  neighbor 198.51.100.1 activate\n  neighbor 198.51.100.1 default-originate",
    )
    await router.start()
    routes = ip("route")
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
        (table,) = {len(await driver.speaker.bird.client.routes(symbol(peer())))}
        assert table == 0
        assert ip("route") == routes


async def test_an_interface_of_a_pod_requeues_no_service(folder: Path, router_of: Routers) -> None:
    router = router_of("bird")
    await router.start()
    requeued: list[ServiceKey] = []
    async with running(folder / "b", [peer("tor1")], requeue=requeued.extend) as driver:
        await announced(driver, {WEB: intent()})
        await established(driver, "tor1")
        requeued.clear()
        ip("link", "add", "pod0", "type", "veth", "peer", "name", "pod1")
        ip("address", "add", "192.0.2.77/32", "dev", "pod0")
        await driver.poll()
        assert requeued == []
        assert not driver.status().findings


async def test_a_service_that_names_thousands_of_peers_affects_no_other(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    names = ("tor1", *(f"tor-{number}" for number in range(10_000)))
    async with running(folder / "b", [peer("tor1")]) as driver:
        many = intent("203.0.113.9", peers=tuple(sorted(names)))
        await announced(driver, {API: many, WEB: intent()})
        await router.learns(f"{VIP}/32", "203.0.113.9/32")
