"""One namespace cannot take the room of others: table memory, listeners, retained nodes and source ranges; and what is served
can always be changed."""

from array import array

import pytest
from tests.drivers.direct.conftest import NODE1, Run, driver

from fairlead.drivers.direct import DirectDriver
from fairlead.model import Listener, LoadBalancer, Member, Outcome, ServiceKey

pytestmark = pytest.mark.root

NODE2, NODE3 = Member("node2", "192.0.2.22", 1), Member("node3", "192.0.2.23", 1)
BYSTANDER = ServiceKey("calm", "bystander")


def service(
    key: ServiceKey, address: str, *members: Member, ports: int = 1, ranges: tuple[str, ...] = ()
) -> dict[ServiceKey, LoadBalancer]:
    listeners = tuple(Listener("IPv4", 1000 + i, "TCP", "Local", 30000 + i, members) for i in range(ports))
    return {key: LoadBalancer(key, f"uid-{key.name}", "fairlead.io/direct", (address,), listeners, source_ranges=ranges)}


def hogs(*members: Member) -> dict[ServiceKey, LoadBalancer]:
    """Six Services of 100 ports and one of 40, all of one namespace."""
    intents: dict[ServiceKey, LoadBalancer] = {}
    for i in range(7):
        intents |= service(ServiceKey("greedy", f"hog{i}"), f"203.0.113.{100 + i}", *members, ports=100 if i < 6 else 40)
    return intents


def big(weight: int) -> tuple[Member, ...]:
    """Two nodes with 400 pods between them."""
    return Member("node1", "192.0.2.21", weight), Member("node2", "192.0.2.22", 400 - weight)


async def outcomes(made: DirectDriver, intents: dict[ServiceKey, LoadBalancer]) -> dict[ServiceKey, Outcome]:
    """What a pass over these Services comes to."""
    changes = made.diff(made.render(intents), await made.read(intents.keys()))
    return dict(await made.apply(changes))


async def shares(made: DirectDriver, key: ServiceKey) -> list[set[str]]:
    """Of each listener the nodes that get new connections."""
    actual = (await made.read([key])).get(key)
    return [{each.slots.nodes[i] for i in set(array("H", each.slots.current))} for each in actual.listeners] if actual else []


def test_a_namespace_that_asks_for_all_table_memory_leaves_room_for_others(run: Run) -> None:
    async def scenario() -> None:
        made = driver(arena_bytes=64 << 20, share=0.5)
        await made.open()
        assert await outcomes(made, service(BYSTANDER, "203.0.113.1", NODE1, NODE2)) == {}
        large = ServiceKey("calm", "large")
        assert await outcomes(made, service(large, "203.0.113.2", *big(200))) == {}
        told = await outcomes(made, hogs(*big(200)))
        assert told
        assert {key.namespace for key in told} == {"greedy"}
        # What others have can change, and what is new has its listeners.
        assert await outcomes(made, service(BYSTANDER, "203.0.113.1", NODE2, NODE3)) == {}
        assert await outcomes(made, service(large, "203.0.113.2", *big(100))) == {}
        new = ServiceKey("calm", "new")
        assert await outcomes(made, service(new, "203.0.113.3", *big(200), ports=20)) == {}
        assert await shares(made, BYSTANDER) == [{"node2", "node3"}]
        assert await shares(made, new) == 20 * [{"node1", "node2"}]
        # A dead node leaves every table.
        dead = NODE2, Member("node1", "192.0.2.21", 200, "down")
        await outcomes(made, hogs(*dead))
        for key in (await made.read(None)).keys() & hogs().keys():
            assert {node for nodes in await shares(made, key) for node in nodes} == {"node2"}
        await made.close(remove=True)

    run(scenario)
