"""Other routing daemons on the same host: conflicts name them, and nothing changes them."""

from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.drivers.bgp.conftest import HOST as HOST_NAMESPACE
from tests.drivers.bgp.conftest import OTHER, Routers
from tests.drivers.bgp.routers import FrrRouter, Neighbor, Router
from tests.drivers.bgp.site import (
    API,
    HOST,
    VIP,
    VIP6,
    WEB,
    announced,
    bird,
    intent,
    ip,
    peer,
    reconcile,
    running,
    until,
)

from fairlead.announce_sections import BgpConfig
from fairlead.drivers.bgp import NoBgp, RoutesDriver, routes
from fairlead.lab import namespace
from fairlead.model import Announcement, Outcome, ServiceKey
from fairlead.net.port_holder import holder_of
from fairlead.net.tableroutes import TableRoute, TableRoutes

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
ROUTER_ADDRESS = "198.51.100.254"


def daemon_of_host(
    router_of: Routers,
    kind: str,
    *lines: str,
    inside: str = HOST_NAMESPACE,
    address: str = HOST,
) -> Router:
    """Return the operator's own daemon, which has a session with the router from this host."""
    router = router_of(
        kind, Neighbor(ROUTER_ADDRESS, asn=64512), inside=inside, asn=64513, address=address
    )
    if isinstance(router, FrrRouter):
        text = router._text()
        for family in ("ipv4", "ipv6"):
            start = f" address-family {family} unicast\n"
            text = text.replace(start, start + "".join(f"  {line}\n" for line in lines))
        router._text = lambda: text  # type: ignore[method-assign]
    return router


async def test_a_daemon_that_has_the_port_is_named(folder: Path, router_of: Routers) -> None:
    """FRR has port 179 of the host; its session is with another router."""
    router = router_of("bird")
    await router.start()
    operator = router_of(
        "frr", Neighbor("198.51.100.253"), inside=HOST_NAMESPACE, asn=64513, address=HOST
    )
    await operator.start()
    assert holder_of(179).startswith("bgpd (process ")
    assert holder_of(180) == ""
    async with running(folder / "b", [peer()]) as driver:
        await reconcile(driver, {WEB: intent()})

        async def down() -> bool:
            await driver.poll()
            return driver.status().sessions[0].state == "down"

        await until(down)
        driver.watch.sessions["tor1"].young_until_s = 0
        outcome: Outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert "bgpd (process " in outcome.message
        assert "localPort" in outcome.message
        operator.stop()
        await announced(driver, {WEB: intent()})
        await driver.remove()
    await operator.start()
    async with running(folder / "c", [peer()], local_port=1179) as driver:
        await reconcile(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")


async def test_a_daemon_with_a_session_to_the_same_router_is_named(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("frr")
    await router.start()
    operator = daemon_of_host(router_of, "bird")
    await operator.start()
    await until(operator.established)
    async with running(folder / "b", [peer()], local_port=1179) as driver:
        await reconcile(driver, {WEB: intent()})

        async def named() -> bool:
            await driver.poll()
            return "collision" in driver.status().sessions[0].last_error.lower()

        await until(named)
        driver.watch.sessions["tor1"].young_until_s = 0
        outcome = (await reconcile(driver, {WEB: intent()}))[WEB]
        assert "announce.bgp.speaker" in outcome.message
        assert await operator.established()


async def test_frr_of_the_operator_announces_routes_of_the_main_table(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    operator = daemon_of_host(router_of, "frr", "redistribute kernel")
    await operator.start()
    await until(operator.established)
    section = BgpConfig(speaker="routes", route_table=254, directory=str(folder / "b"))
    driver = RoutesDriver(section)
    await driver.open()
    assert await reconcile(driver, {WEB: intent(VIP, VIP6), API: intent("203.0.113.9")}) == {}
    await router.learns(f"{VIP}/32", f"{VIP6}/128", "203.0.113.9/32")
    await reconcile(driver, {WEB: intent(VIP, VIP6)}, API)
    await router.learns(f"{VIP}/32", f"{VIP6}/128")
    await driver.close()
    assert await router.prefixes() == {f"{VIP}/32", f"{VIP6}/128"}
    assert await RoutesDriver(section).remove()
    await router.learns()
    assert await operator.established()


async def test_hosts_with_different_numbers_of_pods_get_equal_shares_behind_frr(
    folder: Path, router_of: Routers
) -> None:
    """FRR copies the metric of a kernel route into the MED, and the lowest MED wins."""
    router = router_of("frr", Neighbor(), Neighbor("198.51.100.2"))
    await router.start()
    for weight, (inside, address) in enumerate(
        {HOST_NAMESPACE: HOST, OTHER: "198.51.100.2"}.items()
    ):
        operator = daemon_of_host(
            router_of, "frr", "redistribute kernel", inside=inside, address=address
        )
        await operator.start()
        with namespace.inside(inside):
            driver = RoutesDriver(
                BgpConfig(speaker="routes", route_table=254, directory=str(folder / address))
            )
            await driver.open()
            assert await reconcile(driver, {WEB: intent(VIP, VIP6, weight=1 + 2 * weight)}) == {}
            await driver.close()

    async def shared() -> bool:
        return all(
            router.kernel(prefix).count("via ") == 2 for prefix in (f"{VIP}/32", f"{VIP6}/128")
        )

    await until(shared)


async def test_bird_of_the_operator_announces_routes_of_an_own_table(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("frr")
    await router.start()
    configuration = folder / "operator.conf"
    configuration.write_text(
        f"""log stderr all; router id {HOST}; protocol device {{ }}
        protocol kernel {{ kernel table 7471; learn; scan time 2; netlink rx buffer 8388608;
            ipv4 {{ import all; export none; }}; }}
        protocol bgp up {{ local as 64513; neighbor {ROUTER_ADDRESS} as 64512;
            connect delay time 1; ipv4 {{ import none; export all; next hop self; }}; }}"""
    )
    with bird(configuration):
        driver = RoutesDriver(BgpConfig(speaker="routes", directory=str(folder / "b")))
        await driver.open()
        await reconcile(driver, {WEB: intent(weight=3)})
        await router.learns(f"{VIP}/32")
        await driver.remove()
        await router.learns()
        await driver.close()


async def test_a_route_stays_until_another_method_announces_its_address(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = RoutesDriver(BgpConfig(speaker="routes", directory=str(folder / "b")))
    elsewhere: set[str] = set()
    driver.announced_elsewhere = elsewhere.__contains__
    await driver.open()
    with closing(TableRoutes(174)) as kernel:
        await reconcile(driver, {WEB: intent(VIP)})
        assert not driver.announces(VIP), "the daemon reads the table at intervals"
        monkeypatch.setattr(routes, "SCAN_S", 0.0)
        assert driver.announces(VIP)
        assert not driver.announces("203.0.113.99")
        by_l2 = msgspec.structs.replace(intent(), announcements=(Announcement((VIP,), "l2"),))
        outcome = (await reconcile(driver, {WEB: by_l2}))[WEB]
        assert (outcome.state, outcome.in_part, outcome.coarse) == ("waiting", True, True)
        assert f"{VIP}: announced by BGP until a host" in outcome.message
        assert kernel.routes() == {TableRoute(f"{VIP}/32", 7471)}
        elsewhere.add(VIP)
        assert await reconcile(driver, {WEB: by_l2}) == {}
        assert kernel.routes() == set()
        assert not driver.announces(VIP)
    await driver.remove()
    await driver.close()


async def test_only_own_routes_are_changed_and_the_audit_repairs_them(folder: Path) -> None:
    ip("route", "add", "203.0.113.66/32", "dev", "lo", "table", "7471")
    section = BgpConfig(speaker="routes", directory=str(folder / "b"))
    intents = {WEB: intent(VIP, VIP6, weight=3), API: intent("203.0.113.9", aggregation_length=24)}
    wanted = {
        TableRoute(f"{VIP}/32", 7471),
        TableRoute(f"{VIP6}/128", 7471),
        TableRoute("203.0.113.0/24", 7471),
    }
    driver = RoutesDriver(section)
    await driver.open()
    with closing(TableRoutes(174)) as kernel:
        assert await driver.read(None) == {}
        kernel.add([TableRoute(f"{VIP}/32", 7471, 3)])  # an earlier version set a metric
        await reconcile(driver, intents)
        assert kernel.routes() == wanted
        await driver.withdraw()
        assert kernel.routes() == set()
        await driver.stay()
        assert kernel.routes() == wanted
        kernel.delete([TableRoute(f"{VIP}/32", 7471)])
        kernel.add([TableRoute("203.0.113.99/32", 7471)])
        await driver.read(None)
        assert kernel.routes() == wanted
        # The next process keeps the routes of Services about which nothing is decided, however
        # often a failed audit is repeated.
        await driver.close()
        undecided: list[Collection[str] | None] = [None]
        later = RoutesDriver(section, undecided=lambda: undecided[0])
        await later.open()
        for _ in range(3):
            await later.read(None)
            assert kernel.routes() == wanted
        # The plan refuses the Service of the aggregate.
        undecided[0] = ["203.0.113.9"]
        await reconcile(later, {WEB: intent(VIP, weight=4)})
        await later.read(None)
        kept = {TableRoute("203.0.113.0/24", 7471), TableRoute(f"{VIP}/32", 7471)}
        assert kernel.routes() == kept
        undecided[0] = ()
        await later.read(None)
        assert kernel.routes() == {TableRoute(f"{VIP}/32", 7471)}
        await later.close()
        # Another role has routes of its own.
        assert not await NoBgp(section, role="node").remove()
        assert await NoBgp(section).remove()
        assert kernel.routes() == set()
    assert ip("route", "show", "table", "7471").split()[0] == "203.0.113.66"


async def test_a_change_to_the_other_speaker_removes_what_the_first_one_left(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await reconcile(driver, {WEB: intent()})
        await router.learns(f"{VIP}/32")
    section = BgpConfig(speaker="routes", directory=str(folder / "b"))
    # A role of another name that shares the host does not touch this BIRD.
    await NoBgp(section, role="node").open()
    assert driver.speaker.bird.pid() is not None
    routes = RoutesDriver(section)
    await routes.open()
    await router.learns()
    assert not (folder / "b").exists()
    await reconcile(routes, {WEB: intent()})
    await routes.close()
    async with running(folder / "b", [peer()]) as driver:
        with closing(TableRoutes(174)) as kernel:
            assert kernel.routes() == set()
        assert driver.status().speaker == "bird"


async def test_a_route_that_the_kernel_rejects_affects_only_its_service(folder: Path) -> None:
    """Here the host has no IPv6."""
    disabled = {f"net/ipv6/conf/{each}/disable_ipv6": 1 for each in ("all", "default", "lo")}
    namespace.set_sysctls(HOST_NAMESPACE, disabled)
    driver = RoutesDriver(BgpConfig(speaker="routes", directory=str(folder / "b")))
    await driver.open()
    with closing(TableRoutes(174)) as kernel:
        # Sorted as texts, one of the others comes before the rejected route and one after it.
        others = {ServiceKey("default", "one"): intent("192.0.2.9"), WEB: intent(VIP)}
        outcomes = await reconcile(driver, {**others, API: intent(VIP6)})
        assert {key for key, each in outcomes.items() if each.state != "done"} == {API}
        assert VIP6 in outcomes[API].message
        assert {each.prefix for each in kernel.routes()} == {"192.0.2.9/32", f"{VIP}/32"}
        # It is reported until it is solved, and other Services can be withdrawn meanwhile.
        outcomes = await reconcile(driver, {API: intent(VIP6)}, *others)
        assert set(outcomes) == {API}
        assert VIP6 in driver.status().problem
        assert kernel.routes() == set()
        await driver.remove()
    await driver.close()
