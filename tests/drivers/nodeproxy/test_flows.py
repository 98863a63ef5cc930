"""Flows of UDP and SCTP: a client that keeps its source port while pods are added and removed
(kube-proxy's pkg/proxy/conntrack, which handles UDP only)."""

import asyncio
import resource
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

import pytest
from tests import sctp
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    CLUSTER6,
    NODE4,
    NODE6,
    POD_CIDRS,
    REFUSED,
    SERVICE_CIDRS,
    SILENT,
    VIP4,
    VIP6,
    Seen,
    Site,
    backends,
    install,
    port,
    request,
    request_by_sctp,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.lab import namespace
from fairlead.model import NodeService, Outcome

pytestmark = pytest.mark.root


def served(
    *pods: str,
    serving: tuple[str, ...] = (),
    external: str = "Cluster",
    family: str = "IPv4",
    protocol: str = "UDP",
) -> NodeService:
    """Return a Service with port 53. New flows go to `pods`; the pods in `serving` are
    terminating."""
    going = backends(*serving, port=5353, family=family)
    chosen = backends(*pods, port=5353, family=family)
    each = port(chosen, number=53, protocol=protocol, node_port=30053, serving=going, family=family)
    return service(each, external=external)


def destination(target: str, family: str) -> tuple[str, int]:
    four, six, number = {
        "cluster": (CLUSTER4, CLUSTER6, 53),
        "balancer": (VIP4, VIP6, 53),
        "node": (NODE4, NODE6, 30053),
    }[target]
    return four if family == "IPv4" else six, number


@contextmanager
def client(site: Site, place: str, family: str = "IPv4") -> Iterator[socket.socket]:
    with namespace.make_socket(site.name(place), _of(family), socket.SOCK_DGRAM) as made:
        yield made


class Caller:
    """A client that sends with UDP or SCTP, always from the same port."""

    def __init__(self, site: Site, place: str, family: str, protocol: str) -> None:
        kind = (socket.SOCK_RAW, sctp.PROTOCOL) if protocol == "SCTP" else (socket.SOCK_DGRAM, 0)
        self._sock = namespace.make_socket(site.name(place), _of(family), *kind)
        self._port = 7000 if protocol == "SCTP" else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def request(self, address: str, number: int, timeout_s: float = 10.0) -> str:
        """Send a message, and return the pod that answers."""
        if self._port:
            return pod_of(
                request_by_sctp(
                    self._sock, address, number, source_port=self._port, timeout_s=timeout_s
                )
            )
        return pod_of(request(self._sock, address, number, timeout_s=timeout_s))


def _of(family: str) -> socket.AddressFamily:
    return socket.AF_INET if family == "IPv4" else socket.AF_INET6


def pod_of(answer: Seen | str) -> str:
    return answer.pod if isinstance(answer, Seen) else answer


async def reconcile(driver: NodeProxyDriver, each: NodeService) -> Outcome | None:
    """Run one pass of the loop for this Service."""
    changes = driver.diff(driver.render({each.service: each}), await driver.read([each.service]))
    return (await driver.apply(changes)).get(each.service)


@contextmanager
def failing_cleanup(driver: NodeProxyDriver) -> Iterator[None]:
    """Set the process's limit of file descriptors so low that open ones work, but no other can be
    opened; the socket for deleting flows is not open yet. The limit is three, for the standard
    streams: with zero, poll(2) rejects even one descriptor."""
    driver._tracked.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
@pytest.mark.parametrize("target", ["cluster", "balancer", "node"])
async def test_a_client_that_keeps_its_port_moves_to_a_serving_endpoint(
    site: Site, driver: NodeProxyDriver, target: str, protocol: str, family: str
) -> None:
    def now(*pods: str) -> NodeService:
        return served(*pods, family=family, protocol=protocol)

    called, place = destination(target, family), "caller" if target == "cluster" else "client"
    await install(driver, now("local1"))
    with Caller(site, place, family, protocol) as caller:
        assert caller.request(*called) == "local1"
        await install(driver, now("local2"))
        assert caller.request(*called) == "local2"
        await install(driver, now("local1", "local2"))
        assert caller.request(*called) == "local2"


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
@pytest.mark.parametrize("target", ["balancer", "node"])
async def test_a_client_that_sent_before_the_service_existed_is_served_once_it_exists(
    site: Site, driver: NodeProxyDriver, target: str, protocol: str, family: str
) -> None:
    """The client's flow bypasses the rules: it leads to the next router, or to a port of the node
    without a listener."""
    called = destination(target, family)
    with Caller(site, "client", family, protocol) as caller:
        assert caller.request(*called, timeout_s=0.2) in (SILENT, REFUSED)
        await install(driver, served("local1", family=family, protocol=protocol))
        assert caller.request(*called) == "local1"


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("external", ["Cluster", "Local"])
async def test_a_flow_to_a_terminating_pod_stays_until_the_pod_stops_serving(
    site: Site, driver: NodeProxyDriver, family: str, external: str
) -> None:
    address = VIP4 if family == "IPv4" else VIP6

    async def now(*pods: str, serving: tuple[str, ...] = ()) -> None:
        await install(driver, served(*pods, serving=serving, external=external, family=family))

    await now("local1")
    with client(site, "client", family) as old, client(site, "client", family) as new:
        assert pod_of(request(old, address, 53)) == "local1"
        await now("local2", serving=("local1",))
        assert pod_of(request(old, address, 53)) == "local1"
        assert pod_of(request(new, address, 53)) == "local2"
        await now("local2")
        assert pod_of(request(old, address, 53)) == "local2"


async def test_a_client_with_affinity_that_sends_continuously_moves_too(
    site: Site, driver: NodeProxyDriver
) -> None:
    """No packet may lead to the old endpoint between the deletion of the client's flow and the
    deletion of its recorded endpoint."""

    async def now(pod: str) -> None:
        each = served(pod)
        await install(driver, service(*each.ports, affinity_timeout_s=600))

    def send(caller: socket.socket, done: threading.Event) -> None:
        while not done.is_set():
            with suppress(ConnectionRefusedError):
                caller.send(b"again\n")

    await now("local1")
    with client(site, "client") as caller:
        assert pod_of(request(caller, VIP4, 53)) == "local1"
        for pod in ("local2", "local1") * 8:
            done = threading.Event()
            sending = asyncio.create_task(asyncio.to_thread(send, caller, done))
            await now(pod)
            done.set()
            await sending
            # Read the answers that are still in flight.
            while select.select([caller], [], [], 0.05)[0]:
                caller.recv(65536)
            assert pod_of(request(caller, VIP4, 53)) == pod


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
async def test_flows_stay_unchanged_until_an_endpoint_serves(
    site: Site, driver: NodeProxyDriver, protocol: str, family: str
) -> None:
    def now(*pods: str) -> NodeService:
        return served(*pods, family=family, protocol=protocol)

    called = destination("balancer", family)
    await install(driver, now("local1"))
    with Caller(site, "client", family, protocol) as old:
        assert old.request(*called) == "local1"
        await install(driver, now())
        assert old.request(*called) == "local1"
        assert site.call("caller", *called, protocol=protocol) == REFUSED
        await install(driver, now("local2"))
        assert old.request(*called) == "local2"


async def test_a_service_that_takes_over_an_address_gets_its_flows(
    site: Site, driver: NodeProxyDriver
) -> None:
    first = service(
        port(backends("local1", port=5353), number=53, protocol="UDP", node_port=0), name="first"
    )
    both = port(backends("local1", "local2", port=5353), number=53, protocol="UDP", node_port=0)
    await install(driver, first)
    with client(site, "client") as one:
        assert pod_of(request(one, VIP4, 53)) == "local1"
        await install(driver, service(both, name="second"))
        assert await driver.read(None) == driver.render(
            {each.service: each for each in [service(both, name="second")]}
        )
        assert pod_of(request(one, VIP4, 53)) == "local1"
        await install(
            driver,
            service(
                port(backends("local2", port=5353), number=53, protocol="UDP", node_port=0),
                name="third",
            ),
        )
        assert pod_of(request(one, VIP4, 53)) == "local2"


async def test_a_failed_deletion_of_flows_is_repeated_by_the_next_pass(
    site: Site, driver: NodeProxyDriver
) -> None:
    await install(driver, served("local1"))
    with client(site, "client") as old, client(site, "client") as new:
        assert pod_of(request(old, VIP4, 53)) == "local1"
        with failing_cleanup(driver):
            outcome = await reconcile(driver, served("local2"))
        assert outcome is not None
        assert outcome.state == "unavailable"
        assert "stale tracked flows" in outcome.message
        assert pod_of(request(new, VIP4, 53)) == "local2"
        assert pod_of(request(old, VIP4, 53)) == "local1"
        assert await reconcile(driver, served("local2")) is None
        assert pod_of(request(old, VIP4, 53)) == "local2"
        assert await driver.read(None) == driver.render(
            {served("local2").service: served("local2")}
        )


async def test_a_failed_deletion_of_flows_is_repeated_by_the_next_process(
    site: Site, driver: NodeProxyDriver
) -> None:
    await install(driver, served("local1"))
    with client(site, "client") as old:
        assert pod_of(request(old, VIP4, 53)) == "local1"
        await install(driver, served())
        with failing_cleanup(driver):
            assert await reconcile(driver, served("local2")) is not None
        assert pod_of(request(old, VIP4, 53)) == "local1"
        successor = NodeProxyDriver(
            node_addresses=lambda: (NODE4, NODE6), pod_cidrs=POD_CIDRS, service_cidrs=SERVICE_CIDRS
        )
        await successor.open()
        assert await reconcile(successor, served("local2")) is None
        await successor.close(remove=False)
        assert pod_of(request(old, VIP4, 53)) == "local2"


def flush_rules() -> None:
    subprocess.run(["nft", "flush table inet fairlead"], check=True, timeout=10)


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("target", ["balancer", "node"])
async def test_a_client_that_sent_while_rules_were_flushed_is_served_once_they_are_restored(
    site: Site, driver: NodeProxyDriver, target: str, family: str
) -> None:
    """Another program flushed the rules. The client never pauses, and its flow bypasses the
    rules."""
    await install(driver, served("local1", family=family))
    with Caller(site, "client", family, "UDP") as caller:
        flush_rules()
        assert caller.request(*destination(target, family), timeout_s=0.2) in (SILENT, REFUSED)
        assert await driver.disturbed()
        await install(driver, served("local1", family=family))
        assert caller.request(*destination(target, family), timeout_s=5) == "local1"
