"""Two Services that request one frontend: the Service that packets reach there, and at the other
frontends of both."""

import asyncio
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    EXTERNAL4,
    NODE4,
    NODE6,
    POD_CIDRS,
    SERVICE_CIDRS,
    VIP4,
    Seen,
    Site,
    backends,
    port,
    request,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.lab import namespace
from fairlead.model import NodeService, Outcome, ServiceKey
from fairlead.plan.conflicts import Basis, Precedence

pytestmark = pytest.mark.root

OLD, YOUNG = ServiceKey("default", "old"), ServiceKey("default", "a-young-one")
CREATED = {OLD: "2026-01-01T00:00:00Z", YOUNG: "2026-01-02T00:00:00Z"}
CLUSTER_IPS = {OLD: CLUSTER4, YOUNG: "172.30.0.42"}


@pytest.fixture
async def driver(at_node: None) -> AsyncIterator[NodeProxyDriver]:
    made = make_driver()
    await made.open()
    yield made
    await made.close(remove=True)


def make_driver() -> NodeProxyDriver:
    return NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6),
        pod_cidrs=POD_CIDRS,
        service_cidrs=SERVICE_CIDRS,
        precedence_of=lambda key, *_: (
            Precedence(Basis.SHOWN, CREATED[key], key) if key in CREATED else None
        ),
    )


def at(
    key: ServiceKey,
    *externals: str,
    pods: tuple[str, ...],
    balancers: tuple[str, ...] = (),
    **fields: object,
) -> NodeService:
    """Return a Service with a TCP and a UDP port, at its ClusterIP and these external addresses."""
    ports = [
        port(
            backends(*pods, port=to),
            number=number,
            protocol=protocol,
            cluster_ip=CLUSTER_IPS[key],
            node_port=0,
            balancers=balancers,
        )
        for number, protocol, to in ((80, "TCP", 8080), (53, "UDP", 5353))
    ]
    made = service(
        *(msgspec.structs.replace(each, external_ips=externals) for each in ports), name=key.name
    )
    return msgspec.structs.replace(made, **fields)


async def reconcile(
    driver: NodeProxyDriver, *services: NodeService
) -> Mapping[ServiceKey, Outcome]:
    """Apply only these Services, like a pass of the loop for changed Services."""
    intents = {each.service: each for each in services}
    return await driver.apply(driver.diff(driver.render(intents), await driver.read(list(intents))))


def flush() -> None:
    subprocess.run(["nft", "flush ruleset"], check=True)


def pod_at(site: Site, address: str, *, protocol: str = "TCP", place: str = "caller") -> str:
    seen = site.call(place, address, 53 if protocol == "UDP" else 80, protocol=protocol)
    return seen.pod if isinstance(seen, Seen) else seen


async def test_a_service_without_one_frontend_follows_its_endpoints_at_the_others(
    site: Site, driver: NodeProxyDriver
) -> None:
    await reconcile(driver, at(OLD, EXTERNAL4, pods=("local1",)), at(YOUNG, pods=("local1",)))
    assert pod_at(site, CLUSTER_IPS[YOUNG]) == "local1"
    outcomes = await reconcile(driver, at(YOUNG, EXTERNAL4, pods=("local2",)))
    assert set(outcomes) == {YOUNG}
    assert outcomes[YOUNG].state == "unavailable"
    assert (
        f"{YOUNG} on {EXTERNAL4} port 53 (IP protocol 17): Service {OLD} has this frontend"
        in outcomes[YOUNG].message
    )
    for protocol in ("TCP", "UDP"):
        assert pod_at(site, CLUSTER_IPS[YOUNG], protocol=protocol) == "local2"
        assert pod_at(site, EXTERNAL4, protocol=protocol) == "local1"
    await reconcile(driver, at(YOUNG, EXTERNAL4, pods=("remote1",)))
    assert pod_at(site, CLUSTER_IPS[YOUNG]) == "remote1"
    # No other Service has another port of the same address.
    more = at(YOUNG, EXTERNAL4, pods=("remote1",))
    ports = (*more.ports, msgspec.structs.replace(more.ports[0], port=81, name="more"))
    await reconcile(driver, msgspec.structs.replace(more, ports=tuple(sorted(ports))))
    assert site.call("caller", EXTERNAL4, 81) == Seen("remote1", NODE4)


async def test_the_older_service_gets_the_frontend_and_the_other_one_gets_it_back(
    site: Site, driver: NodeProxyDriver
) -> None:
    young, old = (
        at(YOUNG, EXTERNAL4, pods=("local2",)),
        at(OLD, EXTERNAL4, pods=("local1",)),
    )
    assert not await reconcile(driver, young)
    outcomes = await reconcile(driver, old)
    assert {key: outcome.state for key, outcome in outcomes.items()} == {YOUNG: "done"}
    assert outcomes[YOUNG].again_s > 0
    assert [pod_at(site, where) for where in (EXTERNAL4, CLUSTER4, CLUSTER_IPS[YOUNG])] == [
        "local1",
        "local1",
        "local2",
    ]
    again = await reconcile(driver, young)
    assert (again[YOUNG].state, again[YOUNG].in_part) == ("unavailable", True)
    assert not await reconcile(driver, at(OLD, pods=("local1",)))
    assert not await reconcile(driver, young)
    assert [pod_at(site, where) for where in (EXTERNAL4, CLUSTER4, CLUSTER_IPS[YOUNG])] == [
        "local2",
        "local1",
        "local2",
    ]


@pytest.mark.parametrize("first", [OLD, YOUNG], ids=["the older first", "the younger first"])
async def test_neither_a_flush_nor_a_restart_changes_the_service_of_a_frontend(
    site: Site, driver: NodeProxyDriver, first: ServiceKey
) -> None:
    services = {
        OLD: at(OLD, EXTERNAL4, pods=("local1",)),
        YOUNG: at(YOUNG, EXTERNAL4, pods=("local2",)),
    }
    order = [services.pop(first), *services.values()]

    def check() -> None:
        assert [pod_at(site, where) for where in (EXTERNAL4, CLUSTER4, CLUSTER_IPS[YOUNG])] == [
            "local1",
            "local1",
            "local2",
        ]

    for each in order:
        await reconcile(driver, each)
    check()
    flush()
    assert not await driver.read(None)
    for each in order:
        await reconcile(driver, each)
    check()
    there = await driver.read(None)
    successor = make_driver()
    await successor.open()
    assert await successor.read(None) == there
    for each in reversed(order):
        await reconcile(successor, each)
    assert await successor.read(None) == there
    check()
    await successor.close(remove=False)


async def test_a_cluster_ip_has_precedence_over_an_external_ip_of_an_older_service(
    site: Site, driver: NodeProxyDriver
) -> None:
    claimed = at(OLD, CLUSTER_IPS[YOUNG], EXTERNAL4, pods=("local1",))
    await reconcile(driver, claimed)
    assert pod_at(site, CLUSTER_IPS[YOUNG]) == "local1"
    assert set(await reconcile(driver, at(YOUNG, pods=("local2",)))) == {OLD}
    assert (await reconcile(driver, claimed))[OLD].state == "unavailable"
    there = [pod_at(site, where) for where in (CLUSTER_IPS[YOUNG], CLUSTER4, EXTERNAL4)]
    assert there == ["local2", "local1", "local1"]


async def test_flows_and_recorded_clients_follow_the_frontend(
    site: Site, driver: NodeProxyDriver
) -> None:
    """Both Services have source ranges, whose sets have intervals, and session affinity."""
    fields = {"affinity_timeout_s": 600, "source_ranges": ("203.0.113.0/24",)}
    young, old = (
        at(key, pods=(pod,), balancers=(VIP4,), **fields)
        for key, pod in ((YOUNG, "local2"), (OLD, "local1"))
    )
    await reconcile(driver, young)
    with namespace.make_socket(site.name("client"), socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("203.0.113.2", 0))
        flow = [request(sock, VIP4, 53)]
        assert pod_at(site, VIP4, place="client") == "local2"
        await reconcile(driver, old)
        flow.append(request(sock, VIP4, 53))
    assert [seen.pod if isinstance(seen, Seen) else seen for seen in flow] == ["local2", "local1"]
    assert pod_at(site, VIP4, place="client") == "local1"
    successor = make_driver()
    await successor.open()
    assert await successor.read(None) == await driver.read(None)
    await successor.close(remove=False)


async def test_no_call_fails_while_a_frontend_passes_to_another_service(
    site: Site, driver: NodeProxyDriver
) -> None:
    """The frontend passes to a Service with precedence, or to a Service that waits for it."""
    young, old, without = (
        at(YOUNG, EXTERNAL4, pods=("local2",)),
        at(OLD, EXTERNAL4, pods=("local1",)),
        at(OLD, pods=("local1",)),
    )
    await reconcile(driver, young, without)
    answers: list[tuple[str, Seen | str]] = []
    over = threading.Event()

    def call_on() -> None:
        while not over.is_set():
            answers.extend(
                (where, site.call("caller", where, 80, timeout_s=60))
                for where in (EXTERNAL4, *CLUSTER_IPS.values())
            )

    calling = threading.Thread(target=call_on)
    calling.start()
    try:
        for _ in range(20):
            for step in ([old], [without, young]):
                await reconcile(driver, *step)
                before = len(answers)
                async with asyncio.timeout(60):
                    while len(answers) < before + 6:
                        await asyncio.sleep(0.01)
    finally:
        over.set()
        calling.join()
    met = Counter((where, seen.pod if isinstance(seen, Seen) else seen) for where, seen in answers)
    expected = {
        (CLUSTER_IPS[OLD], "local1"),
        (CLUSTER_IPS[YOUNG], "local2"),
        (EXTERNAL4, "local1"),
        (EXTERNAL4, "local2"),
    }
    assert set(met) == expected, met
