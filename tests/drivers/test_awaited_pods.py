"""A health port does not count ready endpoints to which the host has no route, as after a boot."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests.drivers.inside import run_inside
from tests.net.uplink import Host, host_with_uplink

from fairlead.drivers.awaited_pods import AwaitedPods
from fairlead.drivers.healthport import HealthPortDriver
from fairlead.model import HealthCheck, NodeService, ServiceKey
from fairlead.roles.health_check_server import command

pytestmark = pytest.mark.root

NAME = f"flt-{os.getpid()}-awaited"
WEB, SHOP = ServiceKey("default", "web"), ServiceKey("default", "shop")
FIRST, SECOND, SIX = "10.244.1.2", "10.244.1.3", "2001:db8:244::2"


@pytest.fixture
def host() -> Iterator[Host]:
    with host_with_uplink(NAME) as made:
        yield made


async def count(port: int) -> tuple[int, int]:
    """Return the status of a health port, and its number of endpoints."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    head = (await reader.read()).decode().partition("\r\n\r\n")[0].splitlines()
    writer.close()
    (weight,) = (line for line in head if line.startswith("X-Load-Balancing-Endpoint-Weight:"))
    return int(head[0].split()[1]), int(weight.split()[1])


async def until(port: int, wanted: tuple[int, int]) -> None:
    async with asyncio.timeout(60):
        while await count(port) != wanted:
            await asyncio.sleep(0.02)


def service(key: ServiceKey, port: int, number: int, *addresses: str) -> NodeService:
    check = HealthCheck(port, number, addresses)
    return NodeService(key, f"uid-{key.name}", "Cluster", "Local", (), health_check=check)


async def install(driver: HealthPortDriver, *services: NodeService) -> None:
    desired = driver.render({each.service: each for each in services})
    assert await driver.apply(driver.diff(desired, await driver.read(None))) == {}


def run_driver(
    awaited: AwaitedPods | None, scenario: Callable[[HealthPortDriver], Awaitable[None]]
) -> None:
    async def with_driver() -> None:
        driver = HealthPortDriver(
            node_name="node1",
            healthy=lambda: True,
            command=command(),
            proxy_port=0,
            awaited=awaited,
        )
        await driver.open()
        running = asyncio.create_task(driver.run())
        try:
            await scenario(driver)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await driver.close()

    run_inside(NAME, with_driver, deadline_s=60)


def test_endpoints_count_once_the_host_has_a_route_to_them(host: Host) -> None:
    async def scenario(driver: HealthPortDriver) -> None:
        web = service(WEB, 32000, 2, FIRST, SECOND, SIX)
        shop = service(SHOP, 32001, 1, FIRST)
        await install(driver, web, shop)
        assert await count(32000) == await count(32001) == (503, 0)
        host.ip("route", "add", FIRST, "dev", "eth0")
        await until(32001, (200, 1))
        await until(32000, (200, 1))
        host.ip("route", "add", SECOND, "dev", "eth0")
        await until(32000, (200, 2))
        # The kubelet has reported a pod as unready, and a new one has another address.
        await install(driver, service(WEB, 32000, 1, "10.244.1.4"), shop)
        assert await count(32000) == (503, 0)
        await install(driver, service(WEB, 32000, 0), shop)
        assert await count(32000) == (503, 0)
        assert await count(32001) == (200, 1)

    run_driver(None, scenario)


def test_a_route_to_all_pods_of_the_node_tells_nothing_so_they_count(host: Host) -> None:
    async def scenario(driver: HealthPortDriver) -> None:
        host.ip("route", "add", "10.244.1.0/24", "dev", "eth0")
        await install(driver, service(WEB, 32000, 2, FIRST, SECOND))
        assert await count(32000) == (200, 2)

    run_driver(None, scenario)


def test_endpoints_outside_of_the_networks_of_pods_count(host: Host) -> None:
    async def scenario(driver: HealthPortDriver) -> None:
        await install(
            driver, service(WEB, 32000, 1, FIRST), service(SHOP, 32001, 1, "198.51.100.9")
        )
        assert await count(32000) == (503, 0)
        assert await count(32001) == (200, 1)

    run_driver(AwaitedPods(["10.244.0.0/16", "2001:db8:244::/56"]), scenario)


def test_endpoints_count_after_a_while_if_the_plugin_gives_pods_no_routes(host: Host) -> None:
    now_s = 0.0

    async def scenario(driver: HealthPortDriver) -> None:
        nonlocal now_s
        await install(driver, service(WEB, 32000, 1, FIRST))
        assert await count(32000) == (503, 0)
        now_s = 61.0
        await until(32000, (200, 1))
        await install(driver, service(WEB, 32000, 2, FIRST, SECOND))
        assert await count(32000) == (200, 2), "no address is awaited any more"

    run_driver(AwaitedPods(clock=lambda: now_s), scenario)
