"""The monitor with real health ports on loopback addresses, and a node in a namespace that dies."""

import asyncio
import contextlib
import os
import resource
import selectors
import socket
import subprocess
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest
from tests.drivers.inside import run_inside

from fairlead.drivers.health_targets import Probes, StartProbes, StopProbes, diff, render
from fairlead.drivers.liveness import Target
from fairlead.drivers.monitor import Monitor, Observe
from fairlead.lab import namespace
from fairlead.model import (
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    ServiceKey,
    TrafficPolicy,
    Verdict,
)
from fairlead.state import State

WEB, API = ServiceKey("default", "web"), ServiceKey("default", "api")
DEADLINE_S = 60.0


def balancer(
    service: ServiceKey, port: int, *addresses: str, policy: TrafficPolicy = "Local"
) -> LoadBalancer:
    members = tuple(Member(f"node-{address}", address, 1, "down") for address in addresses)
    listeners = tuple(Listener("IPv4", at, "TCP", policy, 30080, members) for at in (80, 443))
    return LoadBalancer(
        service,
        "uid",
        "fairlead.io/direct",
        ("203.0.113.1",),
        listeners,
        HealthMonitor(port, "/healthz"),
    )


class HealthPort:
    """A health port like that of kube-proxy. `endpoints` None: it accepts connections and does not
    answer."""

    def __init__(self, endpoints: int | None) -> None:
        self.endpoints = endpoints
        self.probes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.probes += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await reader.readuntil(b"\r\n\r\n")
            if self.endpoints is None:
                await reader.read()
            else:
                status = "200 OK" if self.endpoints else "503 Service Unavailable"
                weight = f"X-Load-Balancing-Endpoint-Weight: {self.endpoints}"
                writer.write(
                    f"HTTP/1.1 {status}\r\n{weight}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
                )
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.in_flight -= 1
            writer.close()

    @asynccontextmanager
    async def listen(
        self, address: str = "127.0.0.1", listening: socket.socket | None = None
    ) -> AsyncIterator["HealthPort"]:
        if listening is None:
            server = await asyncio.start_server(self.serve, address, self.port)
        else:
            server = await asyncio.start_server(self.serve, sock=listening)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self


class VerdictLog:
    """A recorder of verdicts, with which a test can wait for a verdict."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, int], Verdict | None] = {}
        self.history: list[Verdict | None] = []
        self.steps: list[int] = []
        """The step of the event loop in which each verdict was reported."""
        self._step = 0
        self.changed = asyncio.Event()

    def __call__(
        self,
        address: str,
        port: int,
        verdict: Verdict | None,
        services: Collection[ServiceKey],
        routed: bool,
    ) -> None:
        assert bool(services) == (verdict is not None)
        self.now[address, port] = verdict
        self.history.append(verdict)
        self.steps.append(self._step)
        asyncio.get_running_loop().call_soon(self._next_step)
        self.changed.set()

    def _next_step(self) -> None:
        self._step += 1

    async def wait(self, address: str, port: int, verdict: Verdict | None) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.now.get((address, port), "not reported") != verdict:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def running(log: Observe, *, timeout_s: float = 0.2) -> AsyncIterator[Monitor]:
    monitor = Monitor(log, interval_s=0.02, timeout_s=timeout_s)
    task = asyncio.ensure_future(monitor.run())
    try:
        yield monitor
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def set_balancers(monitor: Monitor, *balancers: LoadBalancer) -> None:
    """Set the load balancers to monitor, like a pass of the loop."""
    desired = render({item.service: item for item in balancers})
    changes = diff(desired, monitor.wanted)
    starts = [each for each in changes if isinstance(each, StartProbes)]
    monitor.change(starts, [each for each in changes if isinstance(each, StopProbes)])
    assert monitor.wanted == desired


def test_every_member_is_probed_once_in_any_state() -> None:
    rendered = render(
        {
            WEB: balancer(WEB, 30001, "192.0.2.2", "192.0.2.1"),
            API: balancer(API, 10256, policy="Cluster"),
        }
    )
    targets = tuple(Target(address, 30001, "/healthz") for address in ("192.0.2.1", "192.0.2.2"))
    assert rendered == {WEB: Probes(targets, local=True)}


def test_the_text_of_a_step_describes_it() -> None:
    old = render({WEB: balancer(WEB, 30001, "192.0.2.1")})
    new = render({WEB: balancer(WEB, 30001, "2001:db8::1")})
    assert [str(change) for change in diff(new, old)] == [
        "probe http://[2001:db8::1]:30001/healthz",
        "stop probing http://192.0.2.1:30001/healthz",
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_verdicts_follow_a_health_port(address: str) -> None:
    log = VerdictLog()
    async with HealthPort(2).listen(address) as health, running(log) as monitor:
        set_balancers(monitor, balancer(WEB, health.port, address))
        await log.wait(address, health.port, "up")
        health.endpoints = 0
        await log.wait(address, health.port, "unready")
        health.endpoints = 1
        await log.wait(address, health.port, "up")
        health.endpoints = None
        await log.wait(address, health.port, "down")
        health.endpoints = 1
        await log.wait(address, health.port, "up")


async def test_a_refusing_port_is_unready_until_a_process_listens() -> None:
    log = VerdictLog()
    health = HealthPort(1)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        health.port = reserved.getsockname()[1]
    async with running(log) as monitor:
        set_balancers(monitor, balancer(WEB, health.port, "127.0.0.1"))
        await log.wait("127.0.0.1", health.port, "unready")
        async with health.listen():
            await log.wait("127.0.0.1", health.port, "up")
        await log.wait("127.0.0.1", health.port, "unready")


async def test_a_node_has_one_probe_in_flight_for_any_number_of_services() -> None:
    log = VerdictLog()
    health = HealthPort(1)
    async with AsyncExitStack() as stack:
        ports = []
        for _ in range(20):
            health.port = 0
            await stack.enter_async_context(health.listen())
            ports.append(health.port)
        monitor = await stack.enter_async_context(running(log))
        set_balancers(
            monitor,
            *(
                balancer(ServiceKey("default", f"service-{port}"), port, "127.0.0.1")
                for port in ports
            ),
        )
        for port in ports:
            await log.wait("127.0.0.1", port, "up")
        assert health.most_in_flight == 1


async def test_a_shared_target_is_probed_until_its_last_service_is_removed() -> None:
    log = VerdictLog()
    async with HealthPort(1).listen() as health, running(log) as monitor:
        first = balancer(WEB, health.port, "127.0.0.1", policy="Cluster")
        second = balancer(API, health.port, "127.0.0.1", policy="Cluster")
        set_balancers(monitor, first, second)
        await log.wait("127.0.0.1", health.port, "up")
        set_balancers(monitor, second)
        assert monitor.verdicts == {Target("127.0.0.1", health.port, "/healthz"): "up"}
        set_balancers(monitor)
        assert log.now["127.0.0.1", health.port] is None
        assert monitor.verdicts == {}


async def test_a_new_service_of_a_shared_target_gets_the_known_verdict() -> None:
    """The Service may have been planned before the verdict changed, and was not among the Services
    that the change marked as dirty."""
    log, state = VerdictLog(), State(())

    def observe(
        address: str,
        port: int,
        verdict: Verdict | None,
        services: Collection[ServiceKey],
        routed: bool,
    ) -> None:
        state.observe(address, port, verdict, services, routed)
        log(address, port, verdict, services, routed)

    with state.subscribers.subscription() as dirty:
        async with HealthPort(1).listen() as health, running(observe) as monitor:
            first = balancer(WEB, health.port, "127.0.0.1", policy="Cluster")
            set_balancers(monitor, first)
            await log.wait("127.0.0.1", health.port, "up")
            health.endpoints = 0
            await log.wait("127.0.0.1", health.port, "unready")
            assert await dirty.take(0.0) == {WEB}
            set_balancers(monitor, first, balancer(API, health.port, "127.0.0.1", policy="Cluster"))
            assert API in dirty
            assert WEB not in dirty


class CountingSelector(selectors.DefaultSelector):
    """Counts how often an event loop wakes up."""

    wakeups = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.wakeups += 1
        return super().select(timeout)


def test_a_monitor_of_a_few_nodes_wakes_up_for_probes_and_answers_only() -> None:
    """The server runs in the same loop, and wakes up for each request."""
    selector = CountingSelector()

    async def scenario() -> None:
        monitor = Monitor(VerdictLog())
        task = asyncio.ensure_future(monitor.run())
        async with HealthPort(1).listen("0.0.0.0") as health, asyncio.timeout(DEADLINE_S):
            addresses = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
            set_balancers(monitor, balancer(WEB, health.port, *addresses))
            await monitor.settled()
            before = monitor.sent, selector.wakeups
            await asyncio.sleep(1.0)
            sent, wakeups = monitor.sent - before[0], selector.wakeups - before[1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert 0 < wakeups <= 4 * sent

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(scenario())


async def test_a_removed_target_is_not_probed() -> None:
    log = VerdictLog()
    async with HealthPort(1).listen() as health, running(log) as monitor:
        set_balancers(monitor, balancer(WEB, health.port, "127.0.0.1"))
        await log.wait("127.0.0.1", health.port, "up")
        set_balancers(monitor)
        probes = health.probes
        await asyncio.sleep(0.3)  # fifteen intervals
        # One probe may have been in progress.
        assert health.probes <= probes + 1
        set_balancers(monitor, balancer(WEB, health.port, "127.0.0.1"))
        await log.wait("127.0.0.1", health.port, "up")


async def test_the_monitor_is_settled_once_all_targets_have_answered() -> None:
    log = VerdictLog()
    async with HealthPort(1).listen() as good, HealthPort(0).listen() as bad:
        monitor = Monitor(log, interval_s=0.02)
        await monitor.settled()
        set_balancers(
            monitor, balancer(WEB, good.port, "127.0.0.1"), balancer(API, bad.port, "127.0.0.1")
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await monitor.settled()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(monitor.run())
            async with asyncio.timeout(DEADLINE_S):
                await monitor.settled()
            assert set(monitor.verdicts.values()) == {"up", "unready"}
            task.cancel()


async def test_a_failure_of_the_gateway_itself_gives_the_node_no_verdict() -> None:
    log = VerdictLog()
    async with HealthPort(1).listen() as health, running(log) as monitor:
        set_balancers(monitor, balancer(WEB, health.port, "127.0.0.1"))
        await log.wait("127.0.0.1", health.port, "up")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # No socket can be created now.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await asyncio.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert log.now["127.0.0.1", health.port] == "up"
        probes = health.probes
        async with asyncio.timeout(DEADLINE_S):
            while health.probes == probes:
                await asyncio.sleep(0.02)


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Create namespaces for a gateway and a node, joined by a veth pair. The node has 192.0.2.2 and
    2001:db8::2."""
    gateway, node = (f"flt-{os.getpid()}-monitor-{role}" for role in ("gw", "node"))
    made = []
    try:
        for name in (gateway, node):
            namespace.create(name)
            made.append(name)
        ip = ["ip", "-n", gateway]
        subprocess.run(
            [*ip, "link", "add", "up0", "type", "veth", "peer", "name", "up0", "netns", node],
            check=True,
        )
        for name, number in ((gateway, 1), (node, 2)):
            for address in (f"192.0.2.{number}/24", f"2001:db8::{number}/64"):
                flags = ["nodad"] if ":" in address else []
                subprocess.run(
                    ["ip", "-n", name, "addr", "add", address, "dev", "up0", *flags], check=True
                )
            subprocess.run(["ip", "-n", name, "link", "set", "up0", "up"], check=True)
        yield gateway, node
    finally:
        for name in made:
            namespace.delete(name)


@pytest.mark.root
@pytest.mark.parametrize("address", ["192.0.2.2", "2001:db8::2"])
def test_all_targets_of_a_dead_node_are_down_until_it_returns(address: str) -> None:
    async def scenario(node: str, listening: list[socket.socket]) -> None:
        log = VerdictLog()
        ports = [HealthPort(1) for _ in listening]
        async with (
            ports[0].listen(listening=listening[0]),
            ports[1].listen(listening=listening[1]),
            running(log) as monitor,
        ):
            set_balancers(
                monitor,
                balancer(WEB, ports[0].port, address),
                balancer(API, ports[1].port, address),
            )
            for health in ports:
                await log.wait(address, health.port, "up")
            # The link is down: there is neither an answer nor a refusal, as when the machine dies.
            await asyncio.to_thread(
                subprocess.run, ["ip", "-n", node, "link", "set", "up0", "down"], check=True
            )
            for health in ports:
                await log.wait(address, health.port, "down")
            again = [["link", "set", "up0", "up"]]
            # A link that goes down loses its IPv6 addresses.
            if ":" in address:
                again.append(["addr", "add", f"{address}/64", "dev", "up0", "nodad"])
            for command in again:
                await asyncio.to_thread(subprocess.run, ["ip", "-n", node, *command], check=True)
            for health in ports:
                await log.wait(address, health.port, "up")

    with two_namespaces() as (gateway, node):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = []
        for port in (30001, 30002):
            made = namespace.make_socket(node, family)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("::" if family == socket.AF_INET6 else "", port))
            made.listen()
            listening.append(made)
        run_inside(gateway, lambda: scenario(node, listening))
        for made in listening:
            made.close()


class KeepAlivePort:
    """A health port that keeps connections open, like that of kube-proxy. It counts connections and
    probes."""

    def __init__(self) -> None:
        self.connections = self.probes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.probes += 1
                writer.write(
                    b"HTTP/1.1 200 OK\r\nX-Load-Balancing-Endpoint-Weight: 1\r\nContent-Length: "
                    b"2\r\n\r\n{}"
                )
                await writer.drain()
        writer.close()

    @asynccontextmanager
    async def listen(self, address: str) -> AsyncIterator[int]:
        async with await asyncio.start_server(self.serve, address, 0) as server:
            yield server.sockets[0].getsockname()[1]


async def test_the_number_of_probes_does_not_depend_on_services_and_connections_are_reused() -> (
    None
):
    """One node has one Service, another has 40 Services with policy Local, each of which has its
    own health port."""
    log, one, many = VerdictLog(), KeepAlivePort(), [KeepAlivePort() for _ in range(40)]
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(one.listen("127.0.77.1"))
        ports = [await stack.enter_async_context(each.listen("127.0.77.2")) for each in many]
        monitor = await stack.enter_async_context(running(log))
        services = [ServiceKey("default", f"service-{each}") for each in ports]
        balancers = [
            balancer(service, each, "127.0.77.2")
            for service, each in zip(services, ports, strict=True)
        ]
        set_balancers(monitor, balancer(WEB, port, "127.0.77.1"), *balancers)
        for each in ports:
            await log.wait("127.0.77.2", each, "up")
        probes, connections = (
            (one.probes, sum(each.probes for each in many)),
            sum(each.connections for each in many),
        )
        async with asyncio.timeout(DEADLINE_S):
            while one.probes < probes[0] + 100:
                await asyncio.sleep(0.02)
        of_many = sum(each.probes for each in many) - probes[1]
        assert 80 < of_many < 120
        # There are a few hundred probes.
        assert one.connections <= 3
        assert sum(each.connections for each in many) - connections <= of_many / 10 + 2


async def test_a_connection_that_the_server_closes_between_two_probes_gives_no_verdict() -> None:
    """HealthPort closes the connection after each answer without announcing it."""
    log = VerdictLog()
    async with HealthPort(1).listen() as health, running(log) as monitor:
        set_balancers(monitor, balancer(WEB, health.port, "127.0.0.1"))
        await log.wait("127.0.0.1", health.port, "up")
        probes = health.probes
        async with asyncio.timeout(DEADLINE_S):
            while health.probes < probes + 20:
                await asyncio.sleep(0.02)
        assert log.history == ["up"]


async def test_the_first_verdicts_for_a_service_are_reported_together() -> None:
    log = VerdictLog()
    async with HealthPort(1).listen("127.0.77.1") as soon, AsyncExitStack() as stack:
        late = HealthPort(None)
        late.port = soon.port
        await stack.enter_async_context(late.listen("127.0.77.2"))
        monitor = await stack.enter_async_context(running(log, timeout_s=0.1))
        set_balancers(monitor, balancer(WEB, soon.port, "127.0.77.1", "127.0.77.2"))
        await log.wait("127.0.77.2", soon.port, "down")
        assert sorted(str(each) for each in log.history) == ["down", "up"]
        assert log.steps == [0, 0]


async def test_verdicts_held_back_for_a_new_service_are_reported_to_a_later_service() -> None:
    log = VerdictLog()
    soon, late, known = HealthPort(1), HealthPort(None), HealthPort(1)
    async with soon.listen("127.0.77.1"), AsyncExitStack() as stack:
        late.port = known.port = soon.port
        await stack.enter_async_context(late.listen("127.0.77.2"))
        await stack.enter_async_context(known.listen("127.0.77.3"))
        monitor = await stack.enter_async_context(running(log, timeout_s=0.1))
        set_balancers(monitor, balancer(API, soon.port, "127.0.77.3"))
        await log.wait("127.0.77.3", soon.port, "up")
        set_balancers(
            monitor,
            balancer(API, soon.port, "127.0.77.3"),
            balancer(WEB, soon.port, "127.0.77.1", "127.0.77.2"),
        )
        async with asyncio.timeout(DEADLINE_S):
            while monitor.verdicts[Target("127.0.77.1", soon.port, "/healthz")] is None:
                await asyncio.sleep(0.002)
        both = balancer(API, soon.port, "127.0.77.1", "127.0.77.3")
        set_balancers(monitor, both, balancer(WEB, soon.port, "127.0.77.1", "127.0.77.2"))
        # The Service is removed before its verdicts are reported.
        set_balancers(monitor, both)
        assert log.now["127.0.77.1", soon.port] == "up"
