"""The announcements of a node beside a service proxy: they follow a real health port, the clock,
and the pods."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import pytest
from aiohttp import web
from tests.makers import make_service, make_slice

from fairlead.announce_sections import AnnounceConfig
from fairlead.config import Config
from fairlead.kube.objects import (
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeAddress,
    NodeStatus,
    ObjectKey,
    ObjectMeta,
    ServiceStatus,
)
from fairlead.model import NodeService, ServiceKey
from fairlead.roles.node_announcing import AnnouncingPlan, probing
from fairlead.state import State

VIP, LOCALHOST = "203.0.113.10", "127.0.0.1"
WEB = ServiceKey("default", "web")
DEADLINE_S = 30


class HealthPort:
    """The health port of a service proxy: it answers with `status`."""

    def __init__(self) -> None:
        self.status = 503
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOCALHOST, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.json_response({"localEndpoints": int(self.status == 200)}, status=self.status)


class Host:
    """node1 with its health port, in a cluster with node2."""

    def __init__(self, health: HealthPort) -> None:
        self.health = health
        self.state = State(())
        self.state.mark_synced("")
        self.config = Config(announce=AnnounceConfig(method="bgp"))
        for name, address in (("node1", LOCALHOST), ("node2", "192.0.2.22")):
            node = Node(
                ObjectMeta(name=name), status=NodeStatus((NodeAddress("InternalIP", address),))
            )
            self.state.update_nodes({ObjectKey("", name): node})
        service = make_service(
            load_balancer_class="fairlead.io/announce", health_check_node_port=health.port
        )
        shown = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress(VIP),)))
        self.state.update_services(
            {ObjectKey(*WEB): msgspec.structs.replace(service, status=shown)}
        )
        self.plan = AnnouncingPlan(self.state, self.config, "node1", lambda: (LOCALHOST,))

    def put(self, *nodes: str) -> None:
        rows = [(f"10.0.0.{place}", node, "ready") for place, node in enumerate(nodes, 1)]
        slice_ = make_slice(rows)
        self.state.update_slices({ObjectKey("default", "web-1"): slice_})

    def weight(self) -> int | None:
        """Return the weight with which the node announces the address now; None: it does not."""
        planned = self.plan([WEB])[WEB]
        assert isinstance(planned, NodeService)
        return planned.announcements[0].weight if planned.announcements else None

    def set_policy(self, policy: Literal["Cluster", "Local"]) -> None:
        """Set the policy of the Service. Only with policy Local it has a health port."""
        service = self.state.services[WEB]
        port = self.health.port if policy == "Local" else 0
        spec = msgspec.structs.replace(
            service.spec, external_traffic_policy=policy, health_check_node_port=port
        )
        self.state.update_services({ObjectKey(*WEB): msgspec.structs.replace(service, spec=spec)})

    @asynccontextmanager
    async def probed(self) -> AsyncIterator[None]:
        """Probe the health port as the role does, from the end of its start."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for component in probing(self.config, self.state, self.plan):
                await component.open()
                tasks.append(group.create_task(component.run()))
            yield
            for task in tasks:
                task.cancel()

    async def marked(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, and evaluate it only when the Service is marked."""
        with self.state.subscribers.subscription() as dirty:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await dirty.take(0.0)


@pytest.fixture
async def health() -> AsyncIterator[HealthPort]:
    port = HealthPort()
    await port.start()
    yield port
    await port.stop()


async def test_a_node_announces_once_its_service_proxy_confirms_the_pods(
    health: HealthPort,
) -> None:
    host = Host(health)
    host.put("node1", "node1", "node2")
    async with host.probed():
        assert host.weight() is None
        health.status = 200
        await host.marked(lambda: host.weight() == 2)


async def test_a_start_waits_for_the_first_verdict(health: HealthPort) -> None:
    """After a restart of the role nothing is withdrawn that can be confirmed."""
    health.status = 200
    host = Host(health)
    host.put("node1")
    async with host.probed():
        assert host.weight() == 1


async def test_a_service_proxy_that_restarts_costs_no_withdrawal(health: HealthPort) -> None:
    health.status = 200
    host = Host(health)
    host.put("node1", "node2")
    async with host.probed():
        assert host.weight() == 1
        await health.stop()
        await host.marked(lambda: host.state.verdict_of(LOCALHOST, health.port) != "up")
        assert host.weight() == 1
        await health.start()
        await host.marked(lambda: host.state.verdict_of(LOCALHOST, health.port) == "up")
        assert host.weight() == 1
        host.put("node2")
        assert host.weight() is None, "without pods it is withdrawn at once"


async def test_the_service_is_marked_when_a_join_is_due(
    health: HealthPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead.plan.settling.COLLECT_S", 0.2)
    health.status = 200
    host = Host(health)
    host.put("node2")
    async with host.probed():
        assert host.weight() is None
        host.put("node1", "node2")
        assert host.weight() is None
        await host.marked(lambda: host.weight() == 1)


async def test_a_node_that_is_the_service_proxy_probes_nothing(health: HealthPort) -> None:
    host = Host(health)
    host.plan = AnnouncingPlan(host.state, host.config, "node1", None)
    host.put("node1")
    assert host.weight() == 1
    assert host.plan.probes([WEB]) == {}


async def test_after_a_change_to_policy_local_a_node_without_pods_still_serves(
    health: HealthPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node withdraws the address, and serves for some time those who have not noticed yet."""
    monkeypatch.setattr("fairlead.plan.lingering.LINGER_S", 0.2)
    host = Host(health)
    host.plan = AnnouncingPlan(host.state, host.config, "node1", None)

    def policy() -> str:
        planned = host.plan([WEB])[WEB]
        assert isinstance(planned, NodeService)
        return planned.external_policy

    host.put("node2")
    assert (policy(), host.weight()) == ("Local", None), "it has never announced the address"
    host.set_policy("Cluster")
    host.plan = AnnouncingPlan(host.state, host.config, "node1", None)
    assert (policy(), host.weight()) == ("Cluster", 0)
    host.set_policy("Local")
    assert (policy(), host.weight()) == ("Cluster", None)
    await host.marked(lambda: policy() == "Local")
    host.set_policy("Cluster")
    host.put("node1", "node2")
    assert policy() == "Cluster"
    host.set_policy("Local")
    assert policy() == "Local", "a node with pods uses these at once"
