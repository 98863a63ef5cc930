"""The shares of connections by HAProxy's own counters: numbers of pods, terminating pods, balancing
methods."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.drivers.proxy.site import (
    VIP,
    ClientConnection,
    address_of,
    balancer,
    connections,
    new_answers,
    nodes,
    opened,
    reconcile,
    until,
)
from tests.makers import make_service, make_slice

from fairlead.kube.objects import Node, NodeAddress, NodeStatus, ObjectMeta
from fairlead.model import LoadBalancer, ProxyMethod, ProxySettings
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import PROXY

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]

NODES = {
    name: Node(
        ObjectMeta(name=name), status=NodeStatus((NodeAddress("InternalIP", address_of(name)),))
    )
    for name in ("node1", "node2")
}


def planned(pods: Mapping[str, tuple[int, str]]) -> LoadBalancer:
    """Return the plan of a Service with this number and state of pods on each node."""
    rows = [
        (f"10.244.{node.removeprefix('node')}.{at}", node, state)
        for node, (count, state) in pods.items()
        for at in range(1, count + 1)
    ]
    return plan_load_balancer(make_service(), [make_slice(rows)], NODES, (VIP,), PROXY)


async def test_nodes_get_connections_by_pods_and_none_while_their_pods_terminate(
    folder: Path,
) -> None:
    async with nodes("node1", "node2"), opened(folder) as driver:

        async def only_held() -> bool:
            return await connections(driver, "scur") == {"node1": 30, "node2": 10}

        await reconcile(driver, planned({"node1": (3, "ready"), "node2": (1, "ready")}))
        talks = [await ClientConnection.start() for _ in range(40)]
        answers = [await talk.request() for talk in talks]
        assert await connections(driver) == {"node1": 30, "node2": 10}

        await reconcile(driver, planned({"node1": (3, "draining"), "node2": (1, "ready")}))
        assert [answer[0] for answer in await new_answers(20)] == ["node2"] * 20
        assert await connections(driver) == {"node1": 30, "node2": 30}
        await until(only_held)
        assert [await talk.request() for talk in talks] == answers

        await reconcile(driver, planned({"node1": (1, "ready"), "node2": (1, "draining")}))
        assert [answer[0] for answer in await new_answers(10)] == ["node1"] * 10
        # If all pods are terminating, they serve while they can.
        await reconcile(driver, planned({"node1": (1, "draining"), "node2": (1, "draining")}))
        assert {answer[0] for answer in await new_answers(10)} == {"node1", "node2"}
        assert [await talk.request() for talk in talks] == answers
        for talk in talks:
            talk.end()


class OpenConnections:
    """Connections that stay open, by node."""

    def __init__(self) -> None:
        self.talks: list[tuple[str, ClientConnection]] = []

    async def more(self, count: int, source: str = "127.0.0.1") -> None:
        for _ in range(count):
            talk = await ClientConnection.start(source=source)
            self.talks.append(((await talk.request())[0], talk))

    def end(self, node: str) -> None:
        for one, talk in self.talks:
            if one == node:
                talk.end()
        self.talks = [(one, talk) for one, talk in self.talks if one != node]


async def test_a_changed_balancing_method_applies_to_a_live_service(
    folder: Path,
) -> None:
    held = [OpenConnections(), OpenConnections(), OpenConnections()]
    in_turn, fewest, by_client = held
    async with nodes("node1", "node2"), opened(folder) as driver:

        async def change(method: ProxyMethod, node1: int, node2: int) -> None:
            await reconcile(
                driver,
                balancer({"node1": node1, "node2": node2}, settings=ProxySettings(method=method)),
            )

        async def have(node1: int, node2: int) -> bool:
            return await connections(driver, "scur") == {"node1": node1, "node2": node2}

        await change("roundrobin", 1, 1)
        await in_turn.more(6)
        assert await have(3, 3)
        in_turn.end("node1")
        await until(lambda: have(0, 3))
        await in_turn.more(4)
        assert await have(2, 5)

        await change("leastconn", 1, 1)
        await fewest.more(6)
        assert await have(3, 3)
        fewest.end("node1")
        await until(lambda: have(0, 3))
        await fewest.more(3)
        assert await have(3, 3)
        await change("leastconn", 3, 1)
        await fewest.more(6)
        assert await have(9, 3)  # the same number for each pod

        await change("source", 1, 1)
        clients = [f"127.0.2.{at}" for at in range(1, 21)]
        for client in clients:
            await by_client.more(2, source=client)
        chosen = [node for node, _ in by_client.talks]
        assert chosen[::2] == chosen[1::2]
        assert await have(chosen.count("node1"), chosen.count("node2"))
        assert set(chosen) == {"node1", "node2"}

        for node, talk in (one for each in held for one in each.talks):
            assert await talk.request() == [node, "-", "x"]
            talk.end()
