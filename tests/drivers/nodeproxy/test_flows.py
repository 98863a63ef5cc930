"""UDP flows: what becomes of a client that keeps its port when pods come and go (kube-proxy's pkg/proxy/conntrack)."""

import asyncio
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    NODE4,
    NODE6,
    POD_CIDRS,
    SERVICE_CIDRS,
    VIP4,
    VIP6,
    Seen,
    Site,
    ask,
    backends,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.lab import namespace
from fairlead.model import NodeService, Outcome

pytestmark = pytest.mark.root


def served(*pods: str, serving: tuple[str, ...] = (), external: str = "Cluster", family: str = "IPv4") -> NodeService:
    """UDP port 53; new flows go to `pods`, `serving` ones are on their way out."""
    going = backends(*serving, port=5353, family=family)
    chosen = backends(*pods, port=5353, family=family)
    each = port(chosen, number=53, protocol="UDP", node_port=30053, serving=going, family=family)
    return service(each, external=external)


@contextmanager
def client(site: Site, place: str, family: socket.AddressFamily = socket.AF_INET) -> Iterator[socket.socket]:
    with namespace.make_socket(site.name(place), family, socket.SOCK_DGRAM) as made:
        yield made


def pod_of(answer: Seen | str) -> str:
    return answer.pod if isinstance(answer, Seen) else answer


async def bring(driver: NodeProxyDriver, each: NodeService) -> Outcome | None:
    """One pass of the loop for this Service."""
    changes = driver.diff(driver.render({each.service: each}), await driver.read([each.service]))
    return (await driver.apply(changes)).get(each.service)


@contextmanager
def no_clean_up(driver: NodeProxyDriver) -> Iterator[None]:
    """The process is at its limit: what is open works, nothing else can be opened; and the socket for clean-ups is not open.
    (Three: the standard streams; with none, poll(2) refuses to look at even one descriptor.)"""
    driver._tracked.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("target", ["cluster", "balancer", "node"])
async def test_a_client_that_keeps_its_port_moves_to_a_living_endpoint(
    site: Site, driver: NodeProxyDriver, target: str
) -> None:
    address, number = {"cluster": (CLUSTER4, 53), "balancer": (VIP4, 53), "node": (NODE4, 30053)}[target]
    await install(driver, served("local1"))
    place = "caller" if target == "cluster" else "client"
    with client(site, place) as moved, client(site, place) as stayed:
        assert pod_of(ask(moved, address, number)) == "local1"
        await install(driver, served("local2"))
        assert pod_of(ask(moved, address, number)) == "local2"
        assert pod_of(ask(stayed, address, number)) == "local2"
        await install(driver, served("local1", "local2"))
        assert pod_of(ask(stayed, address, number)) == "local2"


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("external", ["Cluster", "Local"])
async def test_a_flow_to_a_pod_on_its_way_out_lives_on_until_that_stops_serving(
    site: Site, driver: NodeProxyDriver, family: str, external: str
) -> None:
    address = VIP4 if family == "IPv4" else VIP6
    kind = socket.AF_INET if family == "IPv4" else socket.AF_INET6

    async def now(*pods: str, serving: tuple[str, ...] = ()) -> None:
        await install(driver, served(*pods, serving=serving, external=external, family=family))

    await now("local1")
    with client(site, "client", kind) as old, client(site, "client", kind) as new:
        assert pod_of(ask(old, address, 53)) == "local1"
        await now("local2", serving=("local1",))
        assert pod_of(ask(old, address, 53)) == "local1"
        assert pod_of(ask(new, address, 53)) == "local2"
        await now("local2")
        assert pod_of(ask(old, address, 53)) == "local2"


async def test_a_client_with_affinity_that_never_pauses_moves_too(site: Site, driver: NodeProxyDriver) -> None:
    """Between the end of its flow and that of its remembered endpoint no packet of it must find a way back."""

    async def now(pod: str) -> None:
        each = served(pod)
        await install(driver, service(*each.ports, affinity_timeout_s=600))

    def send(caller: socket.socket, done: threading.Event) -> None:
        while not done.is_set():
            with suppress(ConnectionRefusedError):
                caller.send(b"again\n")

    await now("local1")
    with client(site, "client") as caller:
        assert pod_of(ask(caller, VIP4, 53)) == "local1"
        for pod in ("local2", "local1") * 8:
            done = threading.Event()
            sending = asyncio.create_task(asyncio.to_thread(send, caller, done))
            await now(pod)
            done.set()
            await sending
            while select.select([caller], [], [], 0.05)[0]:  # what is still under way
                caller.recv(65536)
            assert pod_of(ask(caller, VIP4, 53)) == pod


async def test_where_nobody_serves_flows_are_left_alone_until_somebody_does(site: Site, driver: NodeProxyDriver) -> None:
    await install(driver, served("local1"))
    with client(site, "client") as old, client(site, "client") as new:
        assert pod_of(ask(old, VIP4, 53)) == "local1"
        await install(driver, served())
        assert pod_of(ask(old, VIP4, 53)) == "local1"
        assert pod_of(ask(new, VIP4, 53)) == "refused"
        await install(driver, served("local2"))
        assert pod_of(ask(old, VIP4, 53)) == "local2"


async def test_a_service_that_takes_over_an_address_gets_its_flows(site: Site, driver: NodeProxyDriver) -> None:
    first = service(port(backends("local1", port=5353), number=53, protocol="UDP", node_port=0), name="first")
    both = port(backends("local1", "local2", port=5353), number=53, protocol="UDP", node_port=0)
    await install(driver, first)
    with client(site, "client") as one:
        assert pod_of(ask(one, VIP4, 53)) == "local1"
        await install(driver, service(both, name="second"))
        assert await driver.read(None) == driver.render({each.service: each for each in [service(both, name="second")]})
        assert pod_of(ask(one, VIP4, 53)) == "local1"
        await install(
            driver, service(port(backends("local2", port=5353), number=53, protocol="UDP", node_port=0), name="third")
        )
        assert pod_of(ask(one, VIP4, 53)) == "local2"


async def test_a_clean_up_that_failed_is_done_by_the_next_pass(site: Site, driver: NodeProxyDriver) -> None:
    await install(driver, served("local1"))
    with client(site, "client") as old, client(site, "client") as new:
        assert pod_of(ask(old, VIP4, 53)) == "local1"
        with no_clean_up(driver):
            outcome = await bring(driver, served("local2"))
        assert outcome is not None
        assert outcome.state == "unavailable"
        assert "stale tracked flows" in outcome.message
        assert pod_of(ask(new, VIP4, 53)) == "local2"
        assert pod_of(ask(old, VIP4, 53)) == "local1"
        assert await bring(driver, served("local2")) is None
        assert pod_of(ask(old, VIP4, 53)) == "local2"
        assert await driver.read(None) == driver.render({served("local2").service: served("local2")})


async def test_a_first_clean_up_that_failed_is_done_by_a_successor(site: Site, driver: NodeProxyDriver) -> None:
    await install(driver, served("local1"))
    with client(site, "client") as old:
        assert pod_of(ask(old, VIP4, 53)) == "local1"
        await install(driver, served())
        with no_clean_up(driver):
            assert await bring(driver, served("local2")) is not None
        assert pod_of(ask(old, VIP4, 53)) == "local1"
        heir = NodeProxyDriver(node_addresses=lambda: (NODE4, NODE6), pod_cidrs=POD_CIDRS, service_cidrs=SERVICE_CIDRS)
        await heir.open()
        assert await bring(heir, served("local2")) is None
        await heir.close(remove=False)
        assert pod_of(ask(old, VIP4, 53)) == "local2"
