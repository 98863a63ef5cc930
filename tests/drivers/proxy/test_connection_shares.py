"""The shares of namespaces and Services in HAProxy's connections: the rule, and its effect with a
real HAProxy."""

from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.drivers.proxy.site import (
    ClientConnection,
    balancer,
    nodes,
    opened,
    reconcile,
    until,
)

from fairlead.drivers.proxy import ProxyDriver
from fairlead.drivers.proxy.shares import NO_SHARES, Shares
from fairlead.model import LoadBalancer, Outcome, ProxySettings, ServiceKey
from fairlead.plan.proxying import connections_limited, limit_capped

BUSY, SIBLING, OTHER = (
    ServiceKey("noisy", "busy"),
    ServiceKey("noisy", "sibling"),
    ServiceKey("quiet", "web"),
)
PORTS = {BUSY: (80, 81), SIBLING: (82,), OTHER: (83,)}
SHARES = Shares(files=100, share=0.5)
"""Room for 42 connections, with four listeners."""


@pytest.mark.parametrize(
    ("files", "listeners", "share", "room", "largest"),
    [
        (262_144, 0, 0.5, 114_688, 38_229),
        (20_000, 40, 0.5, 8733, 2911),
        (100, 4, 0.5, 42, 14),
        (100, 4, 0.75, 42, 25),
        (100, 4, 0.01, 42, 0),
        (100, 200, 0.5, 0, 0),
    ],
)
def test_a_single_service_gets_a_third_of_the_connections(
    files: int, listeners: int, share: float, room: int, largest: int
) -> None:
    shares = Shares(files, share)
    assert (shares.room(listeners), shares.largest(listeners)) == (room, largest)


def test_without_shares_the_configuration_has_no_rules() -> None:
    assert NO_SHARES.global_lines(1) == NO_SHARES.table_lines() == NO_SHARES.rule_lines(BUSY) == []


def service(key: ServiceKey, port: int, limit: int = 0) -> LoadBalancer:
    return balancer(
        {"node1": 1}, key=key, port=port, settings=ProxySettings(connection_limit=limit)
    )


def all_services() -> list[LoadBalancer]:
    """Return three Services in two namespaces. The first has two ports."""
    first, second = (service(BUSY, port) for port in PORTS[BUSY])
    both = msgspec.structs.replace(first, listeners=first.listeners + second.listeners)
    return [both, service(SIBLING, *PORTS[SIBLING]), service(OTHER, *PORTS[OTHER])]


async def served(key: ServiceKey, attempts: int) -> list[ClientConnection]:
    """Open this many connections to each port of a Service in turn, and return those that are
    served."""
    found = []
    for at in range(attempts):
        try:
            talk = await ClientConnection.start(port=PORTS[key][at % len(PORTS[key])])
            if await talk.request():
                found.append(talk)
        except ConnectionError:
            continue
    return found


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_a_client_that_fills_one_service_leaves_room_for_others(folder: Path) -> None:
    marked: set[ServiceKey] = set()
    async with nodes("node1"), opened(folder, requeue=marked.update, shares=SHARES) as driver:
        await reconcile(driver, *all_services())
        filled = await served(BUSY, 40)
        assert len(filled) == 14
        # The rule: those of the Service, those of its namespace and all are at most 42.
        held = await served(SIBLING, 10), await served(OTHER, 40)
        assert [len(each) for each in held] == [(42 - 2 * 14) // 3, (42 - 14 - 4) // 3]

        await driver.poll()
        assert marked == {BUSY, SIBLING, OTHER}
        traffic = driver.counters.services()
        assert [(traffic[key].open, traffic[key].over_share) for key in (BUSY, SIBLING, OTHER)] == [
            (14, 26),
            (4, 6),
            (8, 32),
        ]
        assert traffic[BUSY].refused == 0
        assert 'fairlead_proxy_over_share_total{service="noisy/busy"} 26.0' in metrics(driver)
        assert await reconcile(driver, *all_services()) == {
            key: Outcome("done", notes=(connections_limited(key, by_share=True),))
            for key in (BUSY, SIBLING, OTHER)
        }
        await driver.poll()
        assert await reconcile(driver, *all_services()) == {}, "it is reported once"

        # With eight connections of this Service instead of fourteen the rule holds again.
        for talk in filled[:7]:
            talk.end()

        async def has_room() -> bool:
            return len(await served(BUSY, 1)) == 1

        await until(has_room)
        for talk in (*filled, *held[0], *held[1]):
            talk.end()


def metrics(driver: ProxyDriver) -> str:
    registry = CollectorRegistry()
    for collector in driver.collectors():
        registry.register(collector)
    return generate_latest(registry).decode()


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_a_connection_limit_is_reported_where_it_is_reached_or_exceeds_the_share(
    folder: Path,
) -> None:
    async with nodes("node1"), opened(folder, shares=SHARES) as driver:
        outcomes = await reconcile(driver, service(OTHER, 83, limit=1000))
        assert outcomes == {OTHER: Outcome("done", notes=(limit_capped(1000, 14),))}
        held = await served(OTHER, 20)
        assert len(held) == 14

        await driver.poll()
        assert await reconcile(driver, service(OTHER, 83, limit=1000)) == {
            OTHER: Outcome("done", notes=(connections_limited(OTHER, by_share=True),))
        }
        assert await reconcile(driver, service(OTHER, 83, limit=2)) == {}
        held += await served(OTHER, 2)
        await driver.poll()
        assert await reconcile(driver, service(OTHER, 83, limit=2)) == {
            OTHER: Outcome("done", notes=(connections_limited(OTHER, by_share=False),))
        }
        for talk in held:
            talk.end()


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_a_new_process_with_other_shares_puts_them_into_effect_at_its_start(
    folder: Path,
) -> None:
    """Also if the earlier process had none. Open connections continue."""
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, *all_services())
        talk = await ClientConnection.start(port=PORTS[OTHER][0])
        for shares, count in ((SHARES, 14), (Shares(files=100, share=0.25), 6), (NO_SHARES, 40)):
            successor = ProxyDriver(folder, shares=shares)
            for _ in range(2):
                await successor.read(None)
            assert successor.reloads == 1, "the second reading finds what it looks for"
            filled = await served(BUSY, 40)
            assert len(filled) == count
            for each in filled:
                each.end()
        assert await talk.request() == ["node1", "-", "x"]
        talk.end()
