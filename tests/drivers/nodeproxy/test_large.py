"""A Service that is too large for one transaction: other Services are served in the meantime, and a
restart completes an interrupted change."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.drivers.nodeproxy.conftest import (
    NODE4,
    NODE6,
    POD_CIDRS,
    SERVICE_CIDRS,
    install,
    port,
    service,
)

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.drivers.nodeproxy.transactions import ELEMENTS_PER_TRANSACTION
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.model import Backend, NodeService, Outcome, ServiceKey
from fairlead.net.nfnetlink import Nfnetlink
from fairlead.reconcile import Loop, Pace
from fairlead.state import State

pytestmark = pytest.mark.root

HUGE, OTHER = ServiceKey("default", "huge"), ServiceKey("default", "other")
PORTS = ENDPOINTS = 300
FEW = 8
"""The maximum number of transactions until the change of another Service is in the kernel: the
present transaction, some before the pass of the Service begins, and its own."""


def served(name: str, address: str, ports: int, pods: tuple[Backend, ...]) -> NodeService:
    each = [
        port(pods, number=number, cluster_ip=address, node_port=0, balancers=())
        for number in range(1, ports + 1)
    ]
    return service(*(msgspec.structs.replace(one, external_ips=()) for one in each), name=name)


def huge(network: int = 1) -> NodeService:
    pods = tuple(Backend(f"10.{network}.{at // 200}.{at % 200}", 8080) for at in range(ENDPOINTS))
    return served("huge", "172.30.0.50", PORTS, pods)


def other(pod: int) -> NodeService:
    return served("other", "172.30.0.51", 1, (Backend(f"10.9.0.{pod}", 8080),))


class Cluster:
    """A loop over a state with two Services."""

    def __init__(self, driver: NodeProxyDriver) -> None:
        self.state = State(("services",))
        self.intents: dict[ServiceKey, NodeService] = {}
        self.done: dict[ServiceKey, NodeService] = {}
        self.loop = Loop(
            "proxy",
            self.state,
            self.plan,
            [driver],
            self.report,
            large=HUGE.__eq__,
            pace=Pace(plan_slice=20),
        )

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, NodeService]:
        return {key: self.intents[key] for key in keys if key in self.intents}

    def report(
        self, intents: Mapping[ServiceKey, NodeService], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        self.done |= {
            key: intents[key]
            for key, outcome in outcomes.items()
            if outcome.state == "done" and key in intents
        }

    def show(self, each: NodeService) -> None:
        self.intents[each.service] = each
        shown = Service(ServiceMeta(each.service.name, each.service.namespace), ServiceSpec())
        self.state.update_services({ObjectKey(*each.service): shown})
        self.state.subscribers.mark([each.service])

    async def until_done(self, each: NodeService) -> None:
        async with asyncio.timeout(120):
            while self.done.get(each.service) != each:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(driver: NodeProxyDriver, *services: NodeService) -> AsyncIterator[Cluster]:
    cluster = Cluster(driver)
    for each in services:
        cluster.show(each)
    cluster.state.mark_synced("services")
    task = asyncio.create_task(cluster.loop.run())
    try:
        async with asyncio.timeout(60):
            await cluster.loop.settled.wait()
        yield cluster
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Kernel:
    """The content of the table, and the number of transactions."""

    def __init__(self) -> None:
        self.netlink = Nfnetlink()

    def count(self, name: str) -> int:
        return len(self.netlink.elements("fairlead", name))

    def transactions(self) -> int:
        return self.netlink.generation()

    async def until(self, name: str, wanted: bytes) -> None:
        """Wait until a value is in the map."""
        async with asyncio.timeout(60):
            while wanted not in {
                each.value[: len(wanted)] for each in self.netlink.elements("fairlead", name)
            }:
                await asyncio.sleep(0)

    async def until_some(self, name: str) -> None:
        async with asyncio.timeout(60):
            while not self.count(name):
                await asyncio.sleep(0)


async def test_a_change_of_another_service_does_not_wait_for_a_large_one(
    driver: NodeProxyDriver,
) -> None:
    kernel = Kernel()
    async with running(driver, other(1)) as cluster:
        began = kernel.transactions()
        cluster.show(huge())
        for pod in (2, 3):
            await kernel.until_some(f"endpoints4_{ENDPOINTS}")
            before = kernel.transactions()
            cluster.show(other(pod))
            await kernel.until("endpoints4_1", bytes((10, 9, 0, pod)))
            assert kernel.transactions() - before <= FEW
            assert not kernel.count("cluster_ips4") > 1, "the huge Service was there already"
        await cluster.until_done(huge())
        assert kernel.transactions() - began > PORTS * ENDPOINTS // ELEMENTS_PER_TRANSACTION
        intents = {each.service: each for each in (huge(), other(3))}
        assert await driver.read(None) == driver.render(intents)
        # All elements of the large Service are deleted in the same way.
        del cluster.intents[HUGE]
        cluster.state.update_services({ObjectKey(*HUGE): None})
        before = kernel.transactions()
        async with asyncio.timeout(60):
            while kernel.transactions() == before:
                await asyncio.sleep(0)
        before = kernel.transactions()
        cluster.show(other(4))
        await kernel.until("endpoints4_1", bytes((10, 9, 0, 4)))
        assert kernel.transactions() - before <= FEW
        async with asyncio.timeout(60):
            while HUGE in await driver.read([HUGE]):
                await asyncio.sleep(0.01)
        assert await driver.read(None) == driver.render({OTHER: other(4)})


async def test_a_restart_completes_an_interrupted_change(driver: NodeProxyDriver) -> None:
    kernel = Kernel()
    async with running(driver, other(1)) as cluster:
        cluster.show(huge())
        await kernel.until_some(f"endpoints4_{ENDPOINTS}")
    assert kernel.count("cluster_ips4") == 1
    successor = NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6), pod_cidrs=POD_CIDRS, service_cidrs=SERVICE_CIDRS
    )
    await successor.open()
    try:
        await install(successor, huge(2), other(1))
        assert await successor.read(None) == successor.render(
            {each.service: each for each in (huge(2), other(1))}
        )
    finally:
        await successor.close(remove=False)
