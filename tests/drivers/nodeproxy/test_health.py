"""The health that the driver reports: a change is pending from its request until the kernel has
accepted it."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator

import pytest
from tests.drivers.nodeproxy.conftest import (
    CLUSTER4,
    NODE4,
    NODE6,
    POD_CIDRS,
    backends,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.nodeproxy.driver import ABANDONED_AFTER_S, UNHEALTHY_AFTER_S
from fairlead.errors import Unavailable
from fairlead.model import NodeService
from fairlead.net.nfnetlink import Nfnetlink

pytestmark = pytest.mark.root


def web(number: int = 41) -> NodeService:
    return service(
        port(
            backends("local1"),
            cluster_ip=f"172.30.{number // 250}.{number % 250}",
            node_port=0,
            balancers=(),
        ),
        name=f"web-{number}",
        external="Local",
    )


WEB, OTHER = web(), web(42)
THEIRS = f"""
add table inet fairlead
add map inet fairlead outside4 {{ type ipv4_addr : verdict; }}
add chain inet fairlead layout_of_another_time
add element inet fairlead outside4 {{ {NODE4} : drop }}
"""
"""A table that no version of Fairlead created. It cannot be replaced, so nothing can be read or
written."""
IN_THE_WAY = f"element inet fairlead endpoints4_1 {{ {CLUSTER4} . 6 . 80 . 0 : 10.9.9.9 . 9 }}"
"""While this element exists, the kernel rejects other endpoints for WEB. All elements can be read.
"""


class Clock:
    """A clock for the driver that tests can advance."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def driver(at_node: None, clock: Clock) -> AsyncIterator[NodeProxyDriver]:
    """Return a driver that is not open yet."""
    made = NodeProxyDriver(node_addresses=lambda: (NODE4, NODE6), pod_cidrs=POD_CIDRS, clock=clock)
    yield made
    await made.close(remove=True)


def nft(words: str) -> None:
    subprocess.run(["nft", words], check=True)


async def reconcile(driver: NodeProxyDriver, *services: NodeService) -> None:
    """Reconcile like a pass of the loop: write only what was read and differs."""
    intents = {each.service: each for each in services}
    if changes := driver.diff(driver.render(intents), await driver.read(list(intents))):
        await driver.apply(changes)


async def test_a_driver_is_healthy_once_the_table_is_read_after_a_failed_start(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    """The driver is healthy again although it has nothing more to write."""
    nft(THEIRS)
    await driver.open()
    with pytest.raises(Unavailable):
        await reconcile(driver, WEB)
    assert driver.healthy()
    nft("delete table inet fairlead")
    assert await driver.read(None) == {}
    clock.ahead_s = UNHEALTHY_AFTER_S + 1
    assert driver.healthy()


async def test_a_driver_is_unhealthy_a_minute_after_the_table_became_unreadable(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    nft(THEIRS)
    await driver.open()
    clock.ahead_s = UNHEALTHY_AFTER_S - 10
    with pytest.raises(Unavailable):
        await reconcile(driver, WEB)
    assert driver.healthy()
    clock.ahead_s = UNHEALTHY_AFTER_S + 1
    assert not driver.healthy()
    nft("delete table inet fairlead")
    await reconcile(driver, WEB)
    assert driver.healthy()


async def test_a_change_that_the_kernel_rejects_makes_the_driver_unhealthy(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    """The change is pending from its first request, although other Services are read and written in
    between."""
    await driver.open()
    await reconcile(driver, WEB)
    await driver.apply(driver.diff({}, await driver.read(None)))
    nft(f"add {IN_THE_WAY}")
    for clock.ahead_s in (0, UNHEALTHY_AFTER_S / 2, UNHEALTHY_AFTER_S - 10):
        with pytest.raises(Unavailable, match="another program has changed"):
            await reconcile(driver, WEB)
        await reconcile(driver, OTHER)
        await driver.apply(driver.diff({}, await driver.read([OTHER.service])))
        await driver.read(None)
        assert driver.healthy()
    clock.ahead_s = UNHEALTHY_AFTER_S + 1
    assert not driver.healthy()
    nft(f"delete {IN_THE_WAY}")
    await reconcile(driver, WEB)
    assert driver.healthy()


async def test_a_change_that_is_no_longer_requested_is_not_pending(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    await driver.open()
    await reconcile(driver, WEB)
    await driver.apply(driver.diff({}, await driver.read(None)))
    nft(f"add {IN_THE_WAY}")
    with pytest.raises(Unavailable):
        await reconcile(driver, WEB)
    clock.ahead_s = ABANDONED_AFTER_S + 1
    assert driver.healthy()
    # A new request starts a new time.
    await driver.read(None)
    with pytest.raises(Unavailable):
        await reconcile(driver, WEB)
    assert driver.healthy()
    clock.ahead_s += UNHEALTHY_AFTER_S
    assert not driver.healthy()


async def test_a_change_that_is_no_longer_desired_is_not_pending_after_a_read(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    await driver.open()
    await reconcile(driver, WEB)
    await driver.apply(driver.diff({}, await driver.read(None)))
    nft(f"add {IN_THE_WAY}")
    with pytest.raises(Unavailable):
        await reconcile(driver, WEB)
    assert await driver.read([WEB.service]) == {}, "the Service is deleted, as desired"
    clock.ahead_s = UNHEALTHY_AFTER_S + 1
    assert driver.healthy()


async def test_a_long_transaction_is_pending_while_it_lasts(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    await driver.open()
    bringing = asyncio.create_task(reconcile(driver, *map(web, range(1, 3000))))
    await asyncio.sleep(0.01)
    assert driver.healthy()
    clock.ahead_s = UNHEALTHY_AFTER_S + 1
    assert not driver.healthy()
    assert not bringing.done()
    await bringing
    assert driver.healthy()


async def test_a_large_change_is_no_failure_while_the_kernel_accepts_its_parts(
    driver: NodeProxyDriver, clock: Clock
) -> None:
    """The change may take any time: a node must not be removed from load balancers because one
    Service is large."""
    await driver.open()
    netlink = Nfnetlink()
    bringing = asyncio.create_task(reconcile(driver, *map(web, range(1, 3000))))
    for _ in range(3):
        before = netlink.generation()
        while netlink.generation() == before:
            await asyncio.sleep(0)
        assert driver.healthy(), clock.ahead_s
        assert not bringing.done()
        clock.ahead_s += UNHEALTHY_AFTER_S - 20
    await bringing
    netlink.close()
    assert driver.healthy()


async def test_a_contested_frontend_is_no_failure(driver: NodeProxyDriver, clock: Clock) -> None:
    await driver.open()
    again = service(*(WEB.ports), name="another")
    await reconcile(driver, WEB, again)
    clock.ahead_s = UNHEALTHY_AFTER_S + 1
    assert driver.healthy()
