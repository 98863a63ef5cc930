"""Real routers that have, refuse and lose routes: probes show which addresses they have a route
for."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import HOST as HOST_NAMESPACE
from tests.drivers.bgp.conftest import OTHER, ROUTER, SECOND, Routers
from tests.drivers.bgp.routers import BirdRouter, FrrRouter, Neighbor, Router
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
    reconcile,
    running,
    until,
)

from fairlead.drivers.bgp import BirdDriver, route_checks
from fairlead.lab import namespace

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
EACH = pytest.mark.parametrize("kind", ["bird", "frr"])
REFUSED = ("203.0.113.8", "2001:db8:f::8")


def forwards(*names: str) -> None:
    """Have the router, or these hosts, forward packets."""
    for each in names or (ROUTER,):
        _forward(each)


def _forward(name: str) -> None:
    with namespace.inside(name):
        for name in ("ipv4.ip_forward", "ipv6.conf.all.forwarding"):
            subprocess.run(["sysctl", "-qw", f"net.{name}=1"], check=True)


async def filters(router: Router, *addresses: str) -> None:
    """Replace the import filter of the running router: it refuses these addresses."""
    lengths = {address: 128 if ":" in address else 32 for address in addresses}
    refused = [f"{address}/{length}" for address, length in lengths.items()]
    if isinstance(router, BirdRouter):
        router.neighbors = (Neighbor(refused=tuple(refused)),)
        (router.folder / "router.conf").write_text(router._text())
        router._query("configure")
    else:
        assert isinstance(router, FrrRouter)
        lines = [
            "configure terminal",
            *(f"no {family} prefix-list refuse" for family in ("ip", "ipv6")),
            *(
                f"{'ipv6' if ':' in each else 'ip'} prefix-list refuse deny {each}"
                for each in refused
            ),
            "ip prefix-list refuse permit any",
            "ipv6 prefix-list refuse permit any",
            f"router bgp {router.asn}",
        ]
        for family in ("ipv4", "ipv6"):
            lines += [
                f"address-family {family} unicast",
                "neighbor 198.51.100.1 prefix-list refuse in",
                "exit-address-family",
            ]
        words = [word for line in [*lines, "end", "clear bgp * soft in"] for word in ("-c", line)]
        router._call("vtysh", "--vty_socket", str(router.folder), *words)


def judged(driver: BirdDriver) -> Mapping[tuple[str, str], int]:
    return {key: number for key, number in driver.prober.checks.counts().items() if number}


@EACH
async def test_a_router_that_refuses_addresses_is_named_until_it_has_the_routes(
    folder: Path, router_of: Routers, kind: str
) -> None:
    forwards()
    router = router_of(kind)
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        intents = {WEB: intent(VIP, VIP6), API: intent(*REFUSED)}
        await announced(driver, intents)

        async def all_installed() -> bool:
            return judged(driver) == {("tor1", "installed"): 4}

        async def two_refused() -> bool:
            return judged(driver) == {("tor1", "installed"): 2, ("tor1", "refused"): 2}

        await until(all_installed)
        assert driver.status().routes == ()
        await filters(router, *REFUSED)
        await until(two_refused)
        outcome = (await reconcile(driver, intents))[API]
        assert (outcome.state, outcome.reason) == ("unavailable", "RouteNotInstalled")
        for text in (*REFUSED, "tor1 (198.51.100.254)", "prefix list"):
            assert text in outcome.message
        state = driver.status()
        assert {each.address for each in state.routes} == set(REFUSED)
        assert {each.address for each in state.addresses if each.peers} == {VIP, VIP6}
        assert [each.code for each in state.findings] == ["RouteNotInstalled"]
        await filters(router)
        await until(all_installed)
        state = driver.status()
        assert not state.routes
        assert not state.findings
        await announced(driver, intents)


@contextmanager
def process_in(name: str, folder: Path, *addresses: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a driver in a process of its own in this namespace."""
    argv = [sys.executable, "-m", "tests.drivers.bgp.process", str(folder), *addresses]
    with namespace.inside(name):
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_packet_that_another_announcer_gets_shows_that_the_router_has_a_route(
    folder: Path, router_of: Routers
) -> None:
    forwards()
    refused = (f"{VIP}/32", f"{VIP6}/128")
    router = router_of("bird", Neighbor(refused=refused), Neighbor("198.51.100.2"))
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6)})
        await until(lambda: has(driver, ("tor1", "refused"), 2))
        with process_in(OTHER, folder / "o", VIP, VIP6):
            await until(lambda: has(driver, ("tor1", "installed"), 2))
        assert not driver.status().routes


async def test_packets_that_the_router_sends_elsewhere_are_unknown_and_the_place_is_named(
    folder: Path, router_of: Routers
) -> None:
    forwards(ROUTER, SECOND)
    router = router_of("bird", Neighbor(refused=(f"{VIP}/32", f"{VIP6}/128")))
    for default in ("198.51.100.253", "2001:db8:1::253"):
        router._call("ip", "route", "add", "default", "via", default)
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        intents = {WEB: intent(VIP, VIP6)}
        await announced(driver, intents)
        await until(lambda: has(driver, ("tor1", "unknown"), 2))
        sixth, fourth = driver.status().routes
        assert "come to 2001:db8:1::253 (no route)" in sixth.reason
        assert "come to 198.51.100.253 (network unreachable)" in fourth.reason
        await announced(driver, intents)


async def test_a_refused_address_within_a_blackhole_route_is_reported_as_probably_missing(
    folder: Path, router_of: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `announce plan` configures routers: they discard packets to addresses without a route."""
    monkeypatch.setattr(route_checks, "MISSING_S", 5.0)
    forwards()
    router = router_of("frr", Neighbor(refused=("203.0.113.8/32",)))
    router._call("ip", "route", "add", "blackhole", "203.0.113.0/24")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        intents = {WEB: intent(VIP), API: intent("203.0.113.8")}
        await announced(driver, intents)

        async def missing() -> bool:
            counts = driver.prober.checks.counts()
            return counts == {("tor1", "installed"): 1, ("tor1", "missing"): 1}

        await until(missing)
        outcome = (await reconcile(driver, intents))[API]
        assert outcome.state == "done"
        assert [each.code for each in outcome.notes] == ["RouteNotInstalled"]
        assert [each.code for each in driver.status().findings] == ["RouteNotInstalled"]
        assert [each.peers for each in driver.status().addresses] == [("tor1",)] * 2


async def test_a_router_without_any_answer_is_unknown(folder: Path, router_of: Routers) -> None:
    router = router_of("bird")  # it does not forward packets
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP)})
        await until(lambda: has(driver, ("tor1", "unknown"), 1))
        state = driver.status()
        assert [each.state for each in state.routes] == ["unknown"]
        assert state.routes[0].reason.startswith("no answer")
        assert not state.findings
        assert state.addresses[0].peers == ("tor1",)


async def test_a_session_over_ipv6_is_checked_in_both_families(
    folder: Path, router_of: Routers
) -> None:
    forwards()
    router = router_of("bird", Neighbor(HOST6, extended_next_hop=True), address=ROUTER6)
    await router.start()
    async with running(folder / "b", [peer(address=ROUTER6)]) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6)})
        await until(lambda: has(driver, ("tor1", "installed"), 2))


async def test_an_unnumbered_session_is_checked_in_both_families(
    folder: Path, router_of: Routers
) -> None:
    forwards()
    router = router_of("frr", Neighbor(interface="e0", extended_next_hop=True))
    await router.start()
    async with running(folder / "b", [peer(interface="e0")]) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6)})
        await until(lambda: has(driver, ("tor1", "installed"), 2))


async def test_a_neighbor_several_hops_away_is_said_to_be_unchecked(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird", Neighbor(multihop=2))
    await router.start()
    async with running(folder / "b", [peer(multihop=2)]) as driver:
        await announced(driver, {WEB: intent(VIP)})

        async def unchecked() -> bool:
            return [each.state for each in driver.status().routes] == ["unchecked"]

        await until(unchecked)
        assert "multihop" in driver.status().routes[0].reason
        assert not driver.prober.checks.counts()


async def test_without_check_routes_no_packet_is_sent(folder: Path, router_of: Routers) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()], check_routes=False) as driver:
        await announced(driver, {WEB: intent(VIP)})
        assert packet_sockets() == 0
        assert not driver.status().routes


async def test_nothing_of_the_checks_stays_when_the_process_ends_or_is_killed(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()

    async def none() -> bool:
        return packet_sockets() == 0

    async def one() -> bool:
        return packet_sockets() == 1

    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP)})
        await until(one)
    assert packet_sockets() == 0
    with process_in(HOST_NAMESPACE, folder / "b", VIP) as process:
        await until(one)
        process.kill()
        await asyncio.to_thread(process.wait)
    await until(none)


async def has(driver: BirdDriver, key: tuple[str, str], number: int) -> bool:
    return driver.prober.checks.counts() == {key: number}


def packet_sockets() -> int:
    """Return the number of packet sockets of the host that get frames of all protocols. BIRD has
    none."""
    rows = Path("/proc/thread-self/net/packet").read_text().splitlines()[1:]
    return sum(row.split()[3] == "0003" for row in rows)
