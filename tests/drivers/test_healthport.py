"""The health ports over real connections, by kube-proxy's scenarios (H1 to H12)."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import msgspec
import pytest

from fairlead.drivers.healthport import HealthPortDriver
from fairlead.errors import Refused
from fairlead.model import HealthCheck, NodeService, Outcome, ServiceKey

WEB, SHOP = ServiceKey("default", "web"), ServiceKey("shop", "front")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> object:
        return msgspec.json.decode(self.body)


class Switches:
    """What the driver asks about at each request."""

    healthy = True
    eligible = True


@pytest.fixture
def switches() -> Switches:
    return Switches()


@pytest.fixture
async def driver(switches: Switches) -> AsyncIterator[HealthPortDriver]:
    made = HealthPortDriver(
        node_name="node1",
        healthy=lambda: switches.healthy,
        node_eligible=lambda: switches.eligible,
        proxy_port=free_port(),
    )
    await made.open()
    yield made
    await made.close()


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


async def get(port: int, path: str = "/healthz", *, host: str = "127.0.0.1", method: str = "GET") -> Answer:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await receive(reader, bodiless=method == "HEAD")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        return answer


async def test_ready_endpoints(driver: HealthPortDriver) -> None:
    """H2 and H8: any path, any method, both families."""
    port = free_port()
    assert await install(driver, intent(WEB, port, 3)) == {}
    for host, path, method in (("127.0.0.1", "/healthz", "GET"), ("::1", "/", "GET"), ("127.0.0.1", "/a?b=c", "POST")):
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


async def test_no_ready_endpoint(driver: HealthPortDriver) -> None:
    """H1, H3 and H9: the port is open and says 503; and again after there were some."""
    port = free_port()
    for count, status in ((0, 503), (2, 200), (0, 503)):
        await install(driver, intent(WEB, port, count))
        answer = await get(port)
        assert answer.status == status
        assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)
        assert answer.json["localEndpoints"] == count  # type: ignore[index]


async def test_ports_come_and_go(driver: HealthPortDriver) -> None:
    """H5: a removed Service's port is closed, a new number is opened, a port passes from one Service to another."""
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


async def test_a_proxy_that_is_out_of_step(driver: HealthPortDriver, switches: Switches) -> None:
    """H6: 503 although there are endpoints, on open connections too."""
    port = free_port()
    await install(driver, intent(WEB, port, 2))
    switches.healthy = False
    answer = await get(port)
    assert answer.status == 503
    assert answer.json["serviceProxyHealthy"] is False  # type: ignore[index]
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "2"


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
async def test_a_port_in_use(driver: HealthPortDriver, family: int, address: str) -> None:
    """H10: said in kube-proxy's words, for that Service alone; served once the port is free."""
    taken, free = free_port(), free_port()
    with socket.socket(family) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind((address, taken))
        other.listen()
        outcomes = await install(driver, intent(WEB, taken, 1), intent(SHOP, free, 1))
    assert set(outcomes) == {WEB}
    assert (outcomes[WEB].state, outcomes[WEB].reason) == ("unavailable", "FailedToStartServiceHealthcheck")
    assert outcomes[WEB].message == (
        f'node node1 failed to start healthcheck "default/web" on port {taken}: Address already in use'
    )
    assert (await get(free)).status == 200
    assert await driver.read(None) == {SHOP: HealthCheck(free, 1)}
    assert await install(driver, intent(WEB, taken, 1), intent(SHOP, free, 1)) == {}
    assert (await get(taken)).status == 200


async def test_the_proxys_own_health(driver: HealthPortDriver, switches: Switches) -> None:
    """H11 and H12: the node's state counts for /healthz only."""
    port = driver.proxy_port
    assert ((await get(port)).status, (await get(port, "/livez")).status) == (200, 200)
    switches.eligible = False
    answer = await get(port)
    assert (answer.status, answer.json["nodeEligible"]) == (503, False)  # type: ignore[index]
    assert (await get(port, "/livez")).status == 200
    switches.eligible, switches.healthy = True, False
    assert ((await get(port)).status, (await get(port, "/livez")).status) == (503, 503)
    assert (await get(port, "/other")).status == 404


async def test_the_proxys_own_health_in_kube_proxys_words(driver: HealthPortDriver, switches: Switches) -> None:
    """While it is well its rules are of now; then of when it was last known to be well."""

    async def told(path: str) -> tuple[dict[str, object], str, str]:
        answer = (await get(driver.proxy_port, path)).json
        assert isinstance(answer, dict)
        return answer, answer["lastUpdated"], answer["currentTime"]

    good, updated, now = await told("/healthz")
    of_each = {"lastUpdated": now, "healthy": True}
    assert good == {**of_each, "currentTime": now, "nodeEligible": True, "status": {"IPv4": of_each, "IPv6": of_each}}
    switches.healthy = False
    bad, _, now = await told("/livez")
    assert now > updated
    of_each = {"lastUpdated": updated, "healthy": False}
    assert bad == {**of_each, "currentTime": now, "status": {"IPv4": of_each, "IPv6": of_each}}


async def test_two_proxies_on_one_node(driver: HealthPortDriver) -> None:
    second = HealthPortDriver(node_name="node1", healthy=lambda: True, proxy_port=driver.proxy_port)
    with pytest.raises(Refused, match="stop the other service proxy"):
        await second.open()


async def test_nothing_to_do_is_no_change(driver: HealthPortDriver) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    desired = driver.render({WEB: intent(WEB, port, 1), SHOP: NodeService(SHOP, "uid", "Cluster", "Cluster", ())})
    assert driver.diff(desired, await driver.read([WEB, SHOP])) == ()
    changes = driver.diff({WEB: HealthCheck(port, 2), SHOP: HealthCheck(1, 1)}, {WEB: HealthCheck(port, 1)})
    assert [str(change) for change in changes] == [
        f"answer on :{port} with 2 # default/web",
        "listen on :1, answer with 1 # shop/front",
    ]
    assert str(driver.diff({}, desired)[0]) == f"close :{port} # default/web"


async def test_a_connection_carries_many_requests(driver: HealthPortDriver) -> None:
    """Keep-alive, pipelined, with bodies, split anywhere; the answer is always that of the moment."""
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


async def test_hundreds_of_probers_at_once(driver: HealthPortDriver) -> None:
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
async def test_what_cannot_be_read_ends_the_connection(driver: HealthPortDriver, sent: bytes, status: int) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await receive(reader)).status == status
        assert await reader.read() == b""
        writer.close()


async def test_closing_ends_open_connections(driver: HealthPortDriver) -> None:
    port = free_port()
    await install(driver, intent(WEB, port, 1))
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await receive(reader)
        await install(driver)
        assert await reader.read() == b""
        writer.close()


async def test_ports_at_some_addresses_which_change() -> None:
    """H7. The proxy's own port is everywhere."""
    driver = HealthPortDriver(node_name="node1", healthy=lambda: True, proxy_port=free_port(), addresses=("127.0.0.2",))
    await driver.open()
    try:
        port = free_port()
        assert await install(driver, intent(WEB, port, 1)) == {}
        assert (await get(port, host="127.0.0.2")).status == 200
        with pytest.raises(ConnectionRefusedError):
            await get(port, host="127.0.0.1")
        await driver.move(("127.0.0.1", "127.0.0.3"))
        assert (await get(port, host="127.0.0.1")).status == (await get(port, host="127.0.0.3")).status == 200
        with pytest.raises(ConnectionRefusedError):
            await get(port, host="127.0.0.2")
        assert (await get(driver.proxy_port, host="127.0.0.2")).status == 200
        # One that this host has not: the port is a difference to the plan until it has.
        await driver.move(("192.0.2.77",))
        assert await driver.read(None) == {}
        assert "Cannot assign requested address" in (await install(driver, intent(WEB, port, 1)))[WEB].message
    finally:
        await driver.close()


async def test_a_port_takes_one_descriptor_and_answers_both_families(driver: HealthPortDriver) -> None:
    """A node may have thousands of them."""
    wanted = [intent(ServiceKey("default", f"web-{nth}"), free_port(), nth + 1) for nth in range(5)]
    before = len(os.listdir("/proc/self/fd"))
    assert not await install(driver, *wanted)
    assert len(os.listdir("/proc/self/fd")) == before + len(wanted)
    for each in wanted:
        assert each.health_check is not None
        for host in ("127.0.0.1", "::1"):
            assert (await get(each.health_check.port, host=host)).status == 200
