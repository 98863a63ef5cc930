"""The HTTP server of a role: access to each page, and metrics that follow the conventions of
Prometheus."""

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_network
from itertools import product

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fairlead.drivers import Component
from fairlead.drivers.direct.metrics import TrafficCollector
from fairlead.kube.freshness import Freshness
from fairlead.lab import namespace
from fairlead.lab.ports import free_port
from fairlead.model import Finding, Outcome, ServiceKey
from fairlead.web import View, serve
from fairlead.web.connections import ACCEPTS, MAX_CONNECTIONS, MAX_FROM_ONE, Connections
from fairlead.web.server import is_among, is_local

WRONG_UNITS = re.compile(
    r"_(milliseconds|ms|minutes|hours|kilobytes|kb|kib|megabytes|mib|percent)(_|$)"
)


class Counted:
    packets, bytes, flows = 3, 180, 1
    drops: Mapping[str, int] = {"forbidden": 2}
    returned = 5


class Filled:
    used, capacity = 1, 100


class Traffic:
    """A data plane that has forwarded three packets."""

    def services(self) -> Mapping[ServiceKey, Counted]:
        return {ServiceKey("default", "web"): Counted()}

    def nodes(self) -> Mapping[str, Counted]:
        return {"node1": Counted()}

    def messages(self) -> Mapping[str, int]:
        return {"echo_reply": 4}

    def drops(self) -> Mapping[str, int]:
        return {"fragment": 2}

    def untracked(self) -> int:
        return 0

    def unsent(self) -> int:
        return 0

    def entries(self) -> Mapping[str, Filled]:
        return {"connections": Filled()}

    def resources(self) -> Mapping[str, Filled]:
        return {"listeners": Filled()}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port at which a gateway's view is served, on all addresses of this machine."""
    view = View("gateway", "gw1")
    view.registry.register(TrafficCollector(Traffic))
    view.record({}, {ServiceKey("default", "web"): Outcome("refused", "No", "no")})
    port = free_port()
    async with serve(view, f"*:{port}"):
        yield port


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, asyncio.timeout(5), session.get(url) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_the_server_listens_on_all_addresses_of_both_families(port: int, host: str) -> None:
    assert await get(f"http://{host}:{port}/healthz") == (200, "ok\n")
    assert (await get(f"http://{host}:{port}/readyz"))[0] == 503
    assert (await get(f"http://{host}:{port}/state"))[0] == 200


class Watch:
    """A watch whose last contact was some seconds ago."""

    def __init__(self, last_contact_s: float, *, watching: bool = True) -> None:
        self.last_contact_s = last_contact_s
        self.watching = watching


async def test_staleness_is_a_check_of_its_own_and_does_not_affect_readiness(port: int) -> None:
    """A gateway without contact to the API server forwards as before, so it stays ready."""
    now_s = 1000.0
    answered_s = now_s - 3
    view = View("gateway", "gw1")
    view.standing_by = lambda: True
    freshness = Freshness(lambda: answered_s, clock=lambda: now_s)
    freshness.add("services", Watch(now_s - 100))
    freshness.add("nodes", Watch(now_s - 43, watching=False))
    view.watch(freshness)
    other = free_port()
    async with serve(view, f"127.0.0.1:{other}"):
        assert await get(f"http://127.0.0.1:{other}/readyz") == (200, "ok\n")
        assert await get(f"http://127.0.0.1:{other}/readyz/synced") == (200, "ok\n")
        assert await get(f"http://127.0.0.1:{other}/readyz/current") == (503, "stale: nodes 43 s\n")
        assert (await get(f"http://127.0.0.1:{other}/readyz/nonsense"))[0] == 404
        status, text = await get(f"http://127.0.0.1:{other}/readyz?verbose")
        assert (status, text.splitlines()[:3]) == (
            200,
            ["[+]synced ok", "[+]host ok", "[-]current failed: stale: nodes 43 s"],
        )
        state = json.loads((await get(f"http://127.0.0.1:{other}/state"))[1])
        assert state["watches"] == {
            "services": {"age_s": 3.0, "stale": False},
            "nodes": {"age_s": 43.0, "stale": True},
        }
        assert (state["current"], state["api_server"]) == (False, {"answered_s_ago": 3.0})
        _, metrics = await get(f"http://127.0.0.1:{other}/metrics")
        assert 'fairlead_watch_age_seconds{watch="nodes"} 43.0' in metrics
        assert "fairlead_api_reachable 1.0" in metrics
        answered_s = now_s - 21
        _, metrics = await get(f"http://127.0.0.1:{other}/metrics")
        assert "fairlead_api_reachable 0.0" in metrics
        assert "services 21 s" in (await get(f"http://127.0.0.1:{other}/readyz/current"))[1]


class Interfaces(Component):
    """A part of a gateway whose interface is down, or not."""

    down = False

    def findings(self) -> tuple[Finding, ...]:
        hint = Finding("ProgramRemoved", "a program was removed")
        down = Finding("GatewayNotForwarding", "interface eth0 is down", "error", blocks="Ready")
        return (hint, down) if self.down else (hint,)


async def test_a_role_that_cannot_work_on_its_host_is_not_ready(port: int) -> None:
    view, interfaces, other = View("gateway", "gw1"), Interfaces(), free_port()
    view.standing_by = lambda: True
    address = f"http://127.0.0.1:{other}"
    async with serve(view, f"127.0.0.1:{other}"):
        with view.showing(interfaces):
            assert await get(f"{address}/readyz") == (200, "ok\n")
            interfaces.down = True
            for path in ("/readyz", "/readyz/host"):
                assert await get(address + path) == (503, "interface eth0 is down\n")
            assert await get(f"{address}/readyz/synced") == (200, "ok\n")
            status, text = await get(f"{address}/readyz?verbose")
            assert (status, text.splitlines()[:2]) == (
                503,
                ["[+]synced ok", "[-]host failed: interface eth0 is down"],
            )
            assert "fairlead_ready 0.0" in (await get(f"{address}/metrics"))[1]
            state = json.loads((await get(f"{address}/state"))[1])
            assert state["ready"] is False
            assert [each["code"] for each in state["host"]] == [
                "ProgramRemoved",
                "GatewayNotForwarding",
            ]
            interfaces.down = False
            assert await get(f"{address}/readyz") == (200, "ok\n")


class Balancer(Interfaces):
    problem_class = "fairlead.io/proxy"


def test_the_class_that_a_problem_concerns_is_known() -> None:
    view, interfaces, balancer = View("gateway", "gw1"), Interfaces(), Balancer()
    with view.showing(interfaces), view.showing(balancer):
        seen = []
        for interfaces.down, balancer.down in product((False, True), repeat=2):
            seen.append((bool(view.problem), view.problem_class))
    assert seen == [(False, ""), (True, "fairlead.io/proxy"), (True, ""), (True, "")]


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("fe80::1%eth0", False),
        (None, False),
    ],
)
def test_callers_on_this_host_are_recognized(peer: str | None, local: bool) -> None:
    assert is_local(peer) == local


async def test_metrics_follow_the_conventions_of_prometheus(port: int) -> None:
    """The rules of `promtool check metrics`: counters, and only counters, end in _total; all
    metrics have a help text and a type; units are base units; names are prefixed."""
    status, text = await get(f"http://127.0.0.1:{port}/metrics")
    assert status == 200
    families = list(text_string_to_metric_families(text))
    assert len(families) > 12
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge"), family.name
        assert re.fullmatch("(fairlead|process)_[a-z0-9_]+", family.name)
        assert not WRONG_UNITS.search(family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert not set(sample.labels) & {"job", "instance", "pod", "namespace"}, (
                "Prometheus sets these labels for each target"
            )
    names = {family.name for family in families}
    assert {
        "fairlead_ready",
        "fairlead_working",
        "fairlead_build_info",
        "fairlead_services",
    } <= names
    assert {"process_cpu_seconds", "process_resident_memory_bytes"} <= names


async def test_metrics_show_the_outcomes_of_services(port: int) -> None:
    _, text = await get(f"http://127.0.0.1:{port}/metrics")
    assert 'fairlead_services{outcome="refused"} 1.0' in text
    assert 'fairlead_bytes_total{service="default/web"} 180.0' in text
    assert 'fairlead_drops_total{reason="fragment"} 2.0' in text
    assert 'fairlead_service_drops_total{reason="forbidden",service="default/web"} 2.0' in text
    assert 'fairlead_node_packets_total{node="node1"} 3.0' in text
    assert 'fairlead_messages_total{kind="echo_reply"} 4.0' in text
    assert 'fairlead_node_returned_packets_total{node="node1"} 5.0' in text
    assert 'role="gateway"' in text


@pytest.mark.parametrize(
    ("peer", "among"),
    [
        ("192.0.2.1", True),
        ("::ffff:192.0.2.1", True),
        ("2001:db8::1%eth0", True),
        ("198.51.100.1", False),
        ("127.0.0.1", False),
        (None, False),
    ],
)
def test_addresses_are_matched_with_the_networks_that_may_read_metrics(
    peer: str | None, among: bool
) -> None:
    assert is_among(peer, [ip_network("192.0.2.0/24"), ip_network("2001:db8::/32")]) == among


@pytest.fixture
def own_namespace() -> Iterator[None]:
    """Move this process into a network namespace of its own."""
    name = f"flt-{os.getpid()}-web"
    namespace.create(name)
    try:
        with namespace.inside(name):
            yield
    finally:
        namespace.delete(name)


@pytest.mark.root
@pytest.mark.parametrize(
    ("metrics_from", "status"), [([], 403), (["192.0.2.0/24"], 200), (["198.51.100.0/24"], 403)]
)
async def test_metrics_are_readable_from_the_host_and_from_configured_networks(
    own_namespace: None, metrics_from: list[str], status: int
) -> None:
    """Every client can read the health, because the kubelet may be outside of the networks."""
    await add_address("192.0.2.1/24")
    port = free_port()
    async with serve(View("controller", "c"), f"*:{port}", metrics_from):
        assert (await get(f"http://192.0.2.1:{port}/metrics"))[0] == status
        assert (await get(f"http://192.0.2.1:{port}/healthz"))[0] == 200
        assert (await get(f"http://192.0.2.1:{port}/state"))[0] == 403
        assert (await get(f"http://127.0.0.1:{port}/metrics"))[0] == 200


async def add_address(address: str) -> None:
    for command in (("address", "add", address, "dev", "lo"), ("link", "set", "lo", "up")):
        process = await asyncio.create_subprocess_exec("ip", *command)
        assert await process.wait() == 0


class SilentProtocol(asyncio.Protocol):
    """A server protocol that never responds, and records the size of each read."""

    sizes: list[int]

    def __init__(self) -> None:
        self.sizes = []

    def data_received(self, data: bytes) -> None:
        self.sizes.append(len(data))


async def test_the_number_of_connections_is_limited_and_a_new_one_is_always_accepted() -> None:
    made: list[SilentProtocol] = []

    def make() -> SilentProtocol:
        made.append(SilentProtocol())
        return made[-1]

    connections = Connections(make)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.setblocking(False)
        clients = [connect(listener, f"127.0.1.{number % 50}") for number in range(200)]
        clients_of_one_address = [connect(listener, "127.0.2.1") for _ in range(100)]
        for count in range(ACCEPTS, len(clients) + len(clients_of_one_address) + ACCEPTS, ACCEPTS):
            connections.accept(listener)
            assert len(made) <= count
            while connections.count < min(MAX_FROM_ONE, len(made)):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert connections.count <= MAX_CONNECTIONS
        newest = connect(listener, "127.0.3.1")
        newest.send(b"x" * 100_000)
        connections.accept(listener)
        async with asyncio.timeout(30):
            while sum(made[-1].sizes) < 100_000:
                await asyncio.sleep(0)
        assert max(made[-1].sizes) <= 4096
        for each in (*clients, *clients_of_one_address, newest):
            each.close()


def connect(listener: socket.socket, source: str) -> socket.socket:
    made = socket.socket()
    made.bind((source, 0))
    made.connect(listener.getsockname())
    return made


async def test_each_connection_gets_only_one_response(port: int) -> None:
    """A client that sends many requests does not delay other clients."""
    loop, answers = asyncio.get_running_loop(), b""
    with socket.create_connection(("127.0.0.1", port)) as flood:
        flood.setblocking(False)
        sending = asyncio.create_task(
            loop.sock_sendall(flood, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 30_000)
        )
        assert await get(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n")
        # The rest of the data was not read, so the connection is reset.
        with suppress(ConnectionError):
            while received := await loop.sock_recv(flood, 1 << 16):
                answers += received
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1 ") == 1
    assert b"Connection: close" in answers


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/healthz", 405)])
async def test_the_connection_is_closed_after_an_error_response(
    port: int, path: str, status: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    method = b"GET" if status == 404 else b"PUT"
    writer.write(b"%s %s HTTP/1.1\r\nHost: x\r\n\r\n" % (method, path.encode()))
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 %d " % status)
    writer.close()
