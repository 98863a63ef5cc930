"""The health ports over real connections, in the cases of kube-proxy's own tests."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.children import children

from fairlead.drivers.health_answers import VALID_S, Health, Opened, Update
from fairlead.drivers.health_targets import StartProbes
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.drivers.liveness import Target
from fairlead.drivers.monitor import Monitor
from fairlead.errors import Refused
from fairlead.model import HealthCheck, NodeService, Outcome, ServiceKey, Verdict
from fairlead.net.httprequest import Request
from fairlead.roles.health_check_server import command

PROGRAM = "fairlead.roles.health_check_server"
DEADLINE_S = 60.0
WEB, SHOP = ServiceKey("default", "web"), ServiceKey("shop", "front")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> object:
        return msgspec.json.decode(self.body)


class Switches:
    """The state that the driver reads and sends to the health check server."""

    healthy = True
    eligible = True


@pytest.fixture
def switches() -> Switches:
    return Switches()


@asynccontextmanager
async def running(driver: HealthPortDriver) -> AsyncIterator[HealthPortDriver]:
    await driver.open()
    informing = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        informing.cancel()
        await asyncio.gather(informing, return_exceptions=True)
        await driver.close()
        # A process whose start was cancelled ends by itself. The next test must not find it.
        async with asyncio.timeout(DEADLINE_S):
            while children(PROGRAM):
                await asyncio.sleep(0.01)


@pytest.fixture
async def driver(switches: Switches) -> AsyncIterator[HealthPortDriver]:
    made = HealthPortDriver(
        node_name="node1",
        healthy=lambda: switches.healthy,
        command=command(),
        node_eligible=lambda: switches.eligible,
        proxy_port=free_port(),
    )
    async with running(made):
        yield made


async def until_answered(
    port: int, holds: Callable[[Answer], bool], path: str = "/healthz"
) -> Answer:
    """Return the first answer that satisfies the condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds(answer := await get(port, path)):
            pass
        return answer


def free_port() -> int:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return int(probe.getsockname()[1])


def intent(key: ServiceKey, port: int, count: int) -> NodeService:
    return NodeService(key, "uid", "Cluster", "Local", (), health_check=HealthCheck(port, count))


async def install(driver: HealthPortDriver, *intents: NodeService) -> Mapping[ServiceKey, Outcome]:
    desired = driver.render({each.service: each for each in intents})
    return await driver.apply(driver.diff(desired, await driver.read(None)))


async def receive(reader: asyncio.StreamReader, *, bodiless: bool = False) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = b"" if bodiless else await reader.readexactly(int(headers["Content-Length"]))
    return Answer(int(head[0].split()[1]), headers, body)


async def get(
    port: int, path: str = "/healthz", *, host: str = "127.0.0.1", method: str = "GET"
) -> Answer:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await receive(reader, bodiless=method == "HEAD")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        return answer


async def test_a_node_with_ready_endpoints_answers_200_with_their_number(
    driver: HealthPortDriver,
) -> None:
    """For any path, any method, both families."""
    port = free_port()
    assert await install(driver, intent(WEB, port, 3)) == {}
    for host, path, method in (
        ("127.0.0.1", "/healthz", "GET"),
        ("::1", "/", "GET"),
        ("127.0.0.1", "/a?b=c", "POST"),
    ):
        answer = await get(port, path, host=host, method=method)
        assert answer.status == 200
        assert answer.json == {
            "service": {"namespace": "default", "name": "web"},
            "localEndpoints": 3,
            "serviceProxyHealthy": True,
        }
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "3"
    head = await get(port, method="HEAD")
    assert (head.status, head.headers["X-Load-Balancing-Endpoint-Weight"]) == (200, "3")


async def test_a_node_without_ready_endpoints_answers_503(driver: HealthPortDriver) -> None:
    """The port is open and answers 503, before and after the node has ready endpoints."""
    port = free_port()
    for count, status in ((0, 503), (2, 200), (0, 503)):
        await install(driver, intent(WEB, port, count))
        answer = await get(port)
        assert answer.status == status
        assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)
        assert answer.json["localEndpoints"] == count  # type: ignore[index]


async def test_ports_are_opened_moved_and_closed_with_services(driver: HealthPortDriver) -> None:
    """The port of a removed Service is closed, a new port is opened, and a port passes from one
    Service to another."""
    first, second, third = free_port(), free_port(), free_port()
    await install(driver, intent(WEB, first, 1), intent(SHOP, second, 1))
    assert (await get(first)).json["service"]["name"] == "web"  # type: ignore[index]
    assert (await get(second)).json["service"]["name"] == "front"  # type: ignore[index]
    await install(driver, intent(WEB, second, 1), intent(SHOP, third, 1))
    assert (await get(second)).json["service"]["name"] == "web"  # type: ignore[index]
    assert (await get(third)).json["service"]["name"] == "front"  # type: ignore[index]
    with pytest.raises(ConnectionRefusedError):
        await get(first)
    await install(driver, intent(WEB, second, 1))
    with pytest.raises(ConnectionRefusedError):
        await get(third)
    assert await driver.read(None) == {WEB: HealthCheck(second, 1)}


async def test_a_node_with_outdated_rules_answers_503(
    driver: HealthPortDriver, switches: Switches
) -> None:
    """The answer is 503 although there are ready endpoints, also on open connections."""
    port = free_port()
    await install(driver, intent(WEB, port, 2))
    switches.healthy = False
    answer = await until_answered(port, lambda answer: answer.status == 503)
    assert answer.json["serviceProxyHealthy"] is False  # type: ignore[index]
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "2"


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
)
async def test_a_port_in_use_is_reported_like_kube_proxy_and_opened_once_it_is_free(
    driver: HealthPortDriver, family: int, address: str
) -> None:
    """The message is that of kube-proxy, and concerns only this Service. The Service is served once
    the port is free."""
    taken, free = free_port(), free_port()
    with socket.socket(family) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind((address, taken))
        other.listen()
        outcomes = await install(driver, intent(WEB, taken, 1), intent(SHOP, free, 1))
    assert set(outcomes) == {WEB}
    assert (outcomes[WEB].state, outcomes[WEB].reason) == (
        "unavailable",
        "FailedToStartServiceHealthcheck",
    )
    assert outcomes[WEB].message == (
        f'node node1 failed to start healthcheck "default/web" on port {taken}: Address already '
        "in use"
    )
    assert (await get(free)).status == 200
    assert await driver.read(None) == {SHOP: HealthCheck(free, 1)}
    assert await install(driver, intent(WEB, taken, 1), intent(SHOP, free, 1)) == {}
    assert (await get(taken)).status == 200


async def test_the_state_of_the_node_affects_only_healthz(
    driver: HealthPortDriver, switches: Switches
) -> None:
    """The eligibility of the node affects /healthz, but not /livez."""
    port = driver.proxy_port
    assert ((await get(port)).status, (await get(port, "/livez")).status) == (200, 200)
    switches.eligible = False
    answer = await until_answered(port, lambda answer: answer.status == 503)
    assert answer.json["nodeEligible"] is False  # type: ignore[index]
    assert (await get(port, "/livez")).status == 200
    switches.eligible, switches.healthy = True, False
    await until_answered(port, lambda answer: answer.status == 503, "/livez")
    assert (await get(port)).status == 503
    assert (await get(port, "/other")).status == 404


async def test_the_answer_about_the_proxy_has_the_format_of_kube_proxy(
    driver: HealthPortDriver, switches: Switches
) -> None:
    """While the proxy is healthy, `lastUpdated` is the current time; then it is the last time at
    which the proxy was healthy."""

    async def get_health(path: str) -> tuple[dict[str, object], str, str]:
        answer = (await get(driver.proxy_port, path)).json
        assert isinstance(answer, dict)
        return answer, answer["lastUpdated"], answer["currentTime"]

    good, updated, now = await get_health("/healthz")
    of_each = {"lastUpdated": now, "healthy": True}
    assert good == {
        **of_each,
        "currentTime": now,
        "nodeEligible": True,
        "status": {"IPv4": of_each, "IPv6": of_each},
    }
    switches.healthy = False
    await until_answered(driver.proxy_port, lambda answer: answer.status == 503)
    bad, _, now = await get_health("/livez")
    (bad_updated,) = {bad["lastUpdated"]}
    assert updated <= bad_updated < now  # type: ignore[operator]
    of_each = {"lastUpdated": bad_updated, "healthy": False}
    assert bad == {**of_each, "currentTime": now, "status": {"IPv4": of_each, "IPv6": of_each}}


async def test_a_second_service_proxy_on_the_node_is_refused(driver: HealthPortDriver) -> None:
    second = HealthPortDriver(
        node_name="node1", healthy=lambda: True, command=command(), proxy_port=driver.proxy_port
    )
    with pytest.raises(Refused, match="stop the other service proxy"):
        await second.open()


async def test_equal_states_give_no_change(driver: HealthPortDriver) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    desired = driver.render(
        {WEB: intent(WEB, port, 1), SHOP: NodeService(SHOP, "uid", "Cluster", "Cluster", ())}
    )
    assert driver.diff(desired, await driver.read([WEB, SHOP])) == ()
    changes = driver.diff(
        {WEB: HealthCheck(port, 2), SHOP: HealthCheck(1, 1)}, {WEB: HealthCheck(port, 1)}
    )
    assert [str(change) for change in changes] == [
        f"answer on :{port} with 2 # default/web",
        "listen on :1, answer with 1 # shop/front",
    ]
    assert str(driver.diff({}, desired)[0]) == f"close :{port} # default/web"


async def test_one_connection_serves_many_requests(driver: HealthPortDriver) -> None:
    """Requests are sent with keep-alive, pipelined, with bodies, and split at any place. Each
    answer shows the present state."""
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for count in range(1, 200):
            await install(driver, intent(WEB, port, count))
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await receive(reader)
            assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)
            assert answer.headers["Connection"] == "keep-alive"
        request = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
        writer.write(request * 3 + request[:20])
        for _ in range(3):
            assert (await receive(reader)).status == 200
        writer.write(request[20:] + b"GET / HTTP/1.0\r\n\r\n")
        assert (await receive(reader)).status == 200
        last = await receive(reader)
        assert last.headers["Connection"] == "close"
        assert await reader.read() == b""
        writer.close()


async def test_hundreds_of_concurrent_probes_are_answered(driver: HealthPortDriver) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    async with asyncio.TaskGroup() as group:
        probes = [group.create_task(get(port)) for _ in range(400)]
    assert {probe.result().status for probe in probes} == {200}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 200),
        (b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n", 200),
    ],
)
async def test_an_unreadable_request_closes_the_connection(
    driver: HealthPortDriver, sent: bytes, status: int
) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await receive(reader)).status == status
        assert await reader.read() == b""
        writer.close()


async def test_closing_the_driver_closes_open_connections(driver: HealthPortDriver) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await receive(reader)
        await install(driver)
        assert await reader.read() == b""
        writer.close()


async def test_ports_follow_the_configured_node_addresses() -> None:
    """The ports of Services are open at these addresses, the proxy's own port at all addresses."""
    made = HealthPortDriver(
        node_name="node1",
        healthy=lambda: True,
        command=command(),
        proxy_port=free_port(),
        addresses=("127.0.0.2",),
    )
    async with running(made) as driver:
        port = free_port()
        assert await install(driver, intent(WEB, port, 1)) == {}
        assert (await get(port, host="127.0.0.2")).status == 200
        with pytest.raises(ConnectionRefusedError):
            await get(port, host="127.0.0.1")
        await driver.move(("127.0.0.1", "127.0.0.3"))
        assert (
            (await get(port, host="127.0.0.1")).status
            == (await get(port, host="127.0.0.3")).status
            == 200
        )
        with pytest.raises(ConnectionRefusedError):
            await get(port, host="127.0.0.2")
        assert (await get(driver.proxy_port, host="127.0.0.2")).status == 200
        # This host does not have the address yet: until it does, the port differs from the plan.
        await driver.move(("192.0.2.77",))
        assert await driver.read(None) == {}
        assert (
            "Cannot assign requested address"
            in (await install(driver, intent(WEB, port, 1)))[WEB].message
        )


async def test_a_port_takes_one_file_descriptor_and_answers_both_families(
    driver: HealthPortDriver,
) -> None:
    """A node may have thousands of health ports."""
    wanted = [intent(ServiceKey("default", f"web-{nth}"), free_port(), nth + 1) for nth in range(5)]
    (answering,) = children(PROGRAM)
    before = len(os.listdir(f"/proc/{answering}/fd"))
    assert not await install(driver, *wanted)
    assert len(os.listdir(f"/proc/{answering}/fd")) == before + len(wanted)
    for each in wanted:
        assert each.health_check is not None
        for host in ("127.0.0.1", "::1"):
            assert (await get(each.health_check.port, host=host)).status == 200


async def test_a_killed_answering_process_is_replaced_for_all_ports(
    driver: HealthPortDriver,
) -> None:
    first, second = free_port(), free_port()
    await install(driver, intent(WEB, first, 3), intent(SHOP, second, 0))
    (killed,) = children(PROGRAM)
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while children(PROGRAM) in ([], [killed]) or not await takes_connections(
            driver.proxy_port, first, second
        ):
            await asyncio.sleep(0.01)
    assert [(await get(port)).status for port in (driver.proxy_port, first, second)] == [
        200,
        200,
        503,
    ]
    await install(driver, intent(WEB, first, 3))
    with pytest.raises(ConnectionRefusedError):
        await get(second)


async def test_a_role_survives_while_no_process_can_be_started(tmp_path: Path) -> None:
    """The program of the process is missing for a while. For the role this is equivalent to too
    many processes."""
    program, away = tmp_path / "python", tmp_path / "away"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    made = HealthPortDriver(
        node_name="node1",
        healthy=lambda: True,
        command=(str(program), *command()[1:]),
        proxy_port=free_port(),
    )
    async with running(made):
        program.rename(away)
        with capture_logs() as logs:
            (pid,) = children(PROGRAM)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                while not any("No such file" in entry.get("problem", "") for entry in logs):
                    await asyncio.sleep(0.01)
        away.rename(program)
        async with asyncio.timeout(DEADLINE_S):
            while not children(PROGRAM):
                await asyncio.sleep(0.01)


async def test_a_port_taken_by_another_process_meanwhile_is_reported(switches: Switches) -> None:
    """The Service is reconciled again, and its port is opened once it is free."""
    lost: list[ServiceKey] = []
    made = HealthPortDriver(
        node_name="node1",
        healthy=lambda: True,
        command=command(),
        proxy_port=0,
        requeue=lost.extend,
    )
    async with running(made) as driver:
        port = free_port()
        await install(driver, intent(WEB, port, 1))
        (killed,) = children(PROGRAM)
        # The process must not notice anything before the port is taken.
        os.kill(killed, signal.SIGSTOP)
        with socket.socket(socket.AF_INET6) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            os.kill(killed, signal.SIGKILL)
            bound = False
            while not bound:
                with contextlib.suppress(OSError):
                    other.bind(("::", port))
                    bound = True
            other.listen()
            async with asyncio.timeout(DEADLINE_S):
                while not lost:
                    await asyncio.sleep(0.01)
            assert lost == [WEB]
            assert await driver.read(None) == {}
            assert (await install(driver, intent(WEB, port, 1)))[
                WEB
            ].reason == "FailedToStartServiceHealthcheck"
        assert await install(driver, intent(WEB, port, 1)) == {}
        assert (await get(port)).status == 200


async def takes_connections(*ports: int) -> bool:
    for port in ports:
        try:
            await get(port)
        except (ConnectionError, asyncio.IncompleteReadError):
            return False
    return True


async def test_the_answering_process_exits_when_its_role_is_killed() -> None:
    script = (
        "import asyncio, os\nfrom fairlead.drivers.healthport import HealthPortDriver\n"
        "from fairlead.roles.health_check_server import command\n"
        "async def main():\n"
        "    driver = HealthPortDriver(node_name='n', healthy=lambda: True, command=command(), "
        "proxy_port=0)\n"
        "    await driver.open()\n"
        "    print(open('/proc/self/task/%d/children' % os.getpid()).read(), flush=True)\n"
        "    await driver.run()\n"
        "asyncio.run(main())\n"
    )
    role = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert role.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        answering = os.pidfd_open(int(await role.stdout.readline()))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(answering, ended.set)
        try:
            role.kill()
            await role.wait()
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(answering)
            os.close(answering)


async def test_a_blocked_role_does_not_delay_answers(
    driver: HealthPortDriver,
) -> None:
    """The event loop of the role is blocked while a thread sends more probes than may fail in a
    row."""
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(
            lambda: [HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S) for _ in range(3)]
        )
        statuses = thread.submit(lambda: [status_of(each) for each in asked.result()])
        assert statuses.result() == [200, 200, 200]  # waits here, in the event loop's thread


def status_of(connection: HTTPConnection) -> int:
    connection.request("GET", "/")
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_health_that_a_role_reported_expires() -> None:
    """The health port of a role that hangs, or is stopped, does not report the rules as current for
    ever."""
    now_s = 0.0
    health = Health(lambda: now_s)
    health.opened(Opened(30000, (), WEB, 2))
    health.opened(Opened(10256, (), None))

    def statuses() -> list[int]:
        return [health.answer(port, Request("GET", "/healthz")).status for port in (30000, 10256)]

    assert statuses() == [503, 503]
    health.store(Update(healthy=True, eligible=True))
    now_s = VALID_S
    assert statuses() == [200, 200]
    now_s = VALID_S + 1
    assert statuses() == [503, 503]
    health.store(Update(healthy=True, eligible=True, endpoints={30000: 0}))
    assert statuses() == [503, 200]


FLOODING = Path(__file__).parents[2] / "bench" / "flooding.py"
FLOODER = "127.0.0.2"
PROBES = 60


async def test_a_gateway_does_not_lose_a_node_whose_ports_are_flooded(
    driver: HealthPortDriver,
) -> None:
    """A flood of requests, of silent connections and of connections that send a byte now and then.
    A gateway would remove the node after two failed probes in a row, but its probes are answered.
    """
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    seen: list[Verdict | None] = []
    monitor = Monitor(lambda address, port, verdict, services, through: seen.append(verdict))
    targets = Target("127.0.0.1", port, "/"), Target("127.0.0.1", driver.proxy_port, "/healthz")
    monitor.change([StartProbes(WEB, targets, local=True)], [])
    flood = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            str(FLOODING),
            "all",
            FLOODER,
            "127.0.0.1",
            str(port),
            str(driver.proxy_port),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    assert flood.stdout is not None
    probing = asyncio.create_task(monitor.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await monitor.settled()
            assert await flood.stdout.readline() == b"flooding\n"
            before = monitor.sent
            while monitor.sent < before + PROBES:
                await asyncio.sleep(0.01)
        assert seen == ["up", "up"]
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        flood.kill()
        await flood.wait()
