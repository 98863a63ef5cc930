"""One namespace cannot use up the resources of others: table memory, listeners, retained nodes and
source ranges. A Service that is served can always be changed."""

from array import array
from collections import Counter
from collections.abc import Collection, Iterator

import pytest
from msgspec.structs import replace
from tests.drivers.direct.applying import apply_changes
from tests.drivers.direct.conftest import NODE1, SERVICE, VIP4, Forwarder, Run, driver, tcp, udp

from fairlead.drivers.direct import DirectDriver, spec
from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.quota import OutOfMemory
from fairlead.drivers.direct.spec import DirectSpec, ListenerKey, ListenerProtocol, ListenerSpec
from fairlead.model import Listener, LoadBalancer, Member, Outcome, ServiceKey
from fairlead.net.bpf import Map
from fairlead.net.maglev import quotas, table
from fairlead.net.transition import Slots

pytestmark = pytest.mark.root

NODE2, NODE3 = Member("node2", "192.0.2.22", 1), Member("node3", "192.0.2.23", 1)
BYSTANDER, GREEDY = ServiceKey("calm", "bystander"), ServiceKey("greedy", "hog")
KEY = ListenerKey(VIP4, 80, "TCP")


def service(
    key: ServiceKey, address: str, *members: Member, ports: int = 1, ranges: tuple[str, ...] = ()
) -> dict[ServiceKey, LoadBalancer]:
    listeners = tuple(
        Listener("IPv4", 1000 + i, "TCP", "Local", 30000 + i, members) for i in range(ports)
    )
    return {
        key: LoadBalancer(
            key,
            f"uid-{key.name}",
            "fairlead.io/direct",
            (address,),
            listeners,
            source_ranges=ranges,
        )
    }


def greedy_services(*members: Member) -> dict[ServiceKey, LoadBalancer]:
    """Return six Services with 100 ports and one with 40, all in one namespace."""
    intents: dict[ServiceKey, LoadBalancer] = {}
    for i in range(7):
        intents |= service(
            ServiceKey("greedy", f"hog{i}"),
            f"203.0.113.{100 + i}",
            *members,
            ports=100 if i < 6 else 40,
        )
    return intents


def big(weight: int) -> tuple[Member, ...]:
    """Return two nodes that have 400 pods together. `weight`: the pods of the first node."""
    return Member("node1", "192.0.2.21", weight), Member("node2", "192.0.2.22", 400 - weight)


async def outcomes(
    made: DirectDriver, intents: dict[ServiceKey, LoadBalancer]
) -> dict[ServiceKey, Outcome]:
    """Reconcile these Services once, and return the outcomes."""
    changes = made.diff(made.render(intents), await made.read(intents.keys()))
    return dict(await made.apply(changes))


async def current(made: DirectDriver, key: ServiceKey) -> list[Counter[str]]:
    """Return, for each listener, the nodes that get new connections and the number of their
    slots."""
    actual = (await made.read([key])).get(key)
    return [slots_by_node(each.slots) for each in actual.listeners] if actual else []


def slots_by_node(slots: Slots) -> Counter[str]:
    return Counter(slots.nodes[i] for i in array("H", slots.current))


def test_a_namespace_that_asks_for_all_table_memory_leaves_room_for_others(run: Run) -> None:
    async def scenario() -> None:
        made = driver(arena_bytes=64 << 20, namespace_share=0.5)
        await made.open()
        assert await outcomes(made, service(BYSTANDER, "203.0.113.1", NODE1, NODE2)) == {}
        large = ServiceKey("calm", "large")
        assert await outcomes(made, service(large, "203.0.113.2", *big(200))) == {}
        outcome_of = await outcomes(made, greedy_services(*big(200)))
        assert {key.namespace for key in outcome_of} == {"greedy"}
        lacking = {key: each for key, each in outcome_of.items() if each.missing}
        unserved = list(lacking.values())
        assert unserved
        assert all(each.state == "unavailable" and not each.coarse for each in unserved)
        for key, each in lacking.items():
            assert each.in_part == bool(await current(made, key)), "some of its ports are served"
        assert "listeners are not served" in unserved[0].message
        assert (
            "namespace greedy has reached its share of this gateway's table memory"
            in unserved[0].message
        )
        assert (
            "raise gateway.namespaceShare, or raise gateway.tableMemoryMiB" in unserved[0].message
        )
        there = [len(await current(made, key)) for key in greedy_services()]
        assert sum(there) + sum(len(each.missing) for each in outcome_of.values()) == 640

        # Services of other namespaces can change, and a new one gets all its listeners.
        assert await outcomes(made, service(BYSTANDER, "203.0.113.1", NODE2, NODE3)) == {}
        assert await outcomes(made, service(large, "203.0.113.2", *big(100))) == {}
        new = ServiceKey("calm", "new")
        assert await outcomes(made, service(new, "203.0.113.3", *big(200), ports=20)) == {}
        (shares,) = await current(made, BYSTANDER)
        assert shares.keys() == {"node2", "node3"}
        assert [each.total() for each in await current(made, new)] == 20 * [65344]

        # A dead node is removed from every table, also in the greedy namespace.
        dead = Member("node1", "192.0.2.21", 200, "down"), Member("node2", "192.0.2.22", 400)
        await outcomes(made, greedy_services(*dead))
        left = [nodes for key in greedy_services() for nodes in await current(made, key)]
        assert len(left) >= sum(there)
        assert all(nodes.keys() == {"node2"} for nodes in left)
        await made.close(remove=True)

    run(scenario)


def test_a_service_that_waits_for_memory_is_retried_when_some_is_released(run: Run) -> None:
    """The Service has listeners that are not served, and the others have fewer slots than it asks
    for."""
    touched: list[set[ServiceKey]] = []

    async def scenario() -> None:
        made = driver(namespace_share=0.5, touched=lambda keys: touched.append(set(keys)))
        await made.open()
        first, second = ServiceKey("greedy", "first"), ServiceKey("greedy", "second")
        many = service(first, "203.0.113.1", NODE1, ports=100)
        assert await outcomes(made, many) == {}
        coarse = service(second, "203.0.113.2", *big(300), ports=20)
        outcome_of = await outcomes(made, coarse)
        assert len(outcome_of[second].missing) == 8, (
            "1 MiB has room for 112 listeners of one namespace"
        )
        assert not touched
        assert set(map(Counter.total, await current(made, second))) == {1021}
        assert all(
            each == dict(zip(("node1", "node2"), quotas([300, 100], 1021), strict=True))
            for each in await current(made, second)
        )

        await made.apply(made.diff({}, await made.read([first])))
        assert touched == [{second}]
        outcome_of = await outcomes(made, coarse)
        assert outcome_of[second].in_part
        assert not outcome_of[second].missing
        assert "have tables with fewer slots" in outcome_of[second].message
        sizes = Counter(map(Counter.total, await current(made, second)))
        assert sizes.total() == 20
        assert max(sizes) > 1021
        assert await outcomes(made, coarse) == outcome_of, "without free memory nothing changes"
        await made.close(remove=True)

    run(scenario)


class Full:
    """A forwarder whose table memory `fill` uses up to the last chunk, with tables of another
    gateway."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.forwarder, self.now_s = forwarder, 1000.0
        forwarder.tables.close()
        forwarder.tables = self.tables = ListenerMaps(forwarder.maps, clock=lambda: self.now_s)
        forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))
        for name in ("node1", "node2", "node3"):
            forwarder.add_node(name, f"192.0.2.{name[-1]}")
        self.fillers: list[ListenerKey] = []

    def fill(self) -> None:
        for weight in (400, 100, 10, 1):
            dealt = table((("node3", weight),))
            try:
                while True:
                    key = ListenerKey("203.0.113.99", len(self.fillers) + 1, "TCP")
                    self.tables.set_peer_slots(
                        key,
                        GREEDY,
                        "uid",
                        Slots(dealt.nodes, dealt.slots),
                        (),
                        restricted=False,
                        used=True,
                    )
                    self.fillers.append(key)
            except OutOfMemory:
                pass

    def reconcile(
        self, weights: dict[str, int], retained_nodes: Collection[str] | None = None
    ) -> dict[ServiceKey, Outcome]:
        shares = tuple(sorted(weights.items()))
        listener = ListenerSpec(
            KEY, False, shares, tuple(sorted(weights if retained_nodes is None else retained_nodes))
        )
        return apply_changes(
            self.tables, spec.diff({SERVICE: DirectSpec("uid", (listener,), ())}, self.actual()), {}
        )

    def actual(self) -> dict[ServiceKey, spec.DirectActual]:
        return self.tables.actual([SERVICE])

    def send(self, ports: range, flags: str) -> dict[int, str]:
        return {port: self.forwarder.run(tcp(flags, port)).node for port in ports}


@pytest.fixture
def full(forwarder: Forwarder) -> Full:
    return Full(forwarder)


OLD, NEW = range(20000, 20100), range(40000, 40100)


def test_without_memory_a_dead_node_is_still_removed_from_a_table(full: Full) -> None:
    """Connections to other nodes stay. As soon as there is memory, the shares are exact again."""
    full.reconcile({"node1": 1, "node2": 1, "node3": 1})
    before = full.send(OLD, "S")
    full.fill()
    outcome_of = full.reconcile({"node1": 1, "node3": 1})
    assert outcome_of[SERVICE].in_part
    assert "changed in place" in outcome_of[SERVICE].message
    after = full.send(OLD, "A")
    assert {port for port in OLD if after[port] != before[port]} == {
        port for port in OLD if before[port] == "node2"
    }
    assert set(after.values()) == set(full.send(NEW, "S").values()) == {"node1", "node3"}
    (listener,) = full.actual()[SERVICE].listeners
    assert slots_by_node(listener.slots).total() == 1021
    assert full.reconcile({"node1": 1, "node3": 1}) == outcome_of

    for key in full.fillers:
        full.tables.remove_listener(key, GREEDY)
    assert full.tables.quotas.take_retriable() == {SERVICE}
    full.now_s += GRACE_S
    assert full.reconcile({"node1": 1, "node3": 1}) == {}
    (listener,) = full.actual()[SERVICE].listeners
    assert listener.slots.current == table((("node1", 1), ("node3", 1))).slots
    assert full.send(OLD, "A") == after


def test_without_memory_a_draining_node_keeps_its_connections_if_there_is_a_previous_table(
    full: Full,
) -> None:
    """The previous table is overwritten in place too. For each slot it names the node of
    connections without an entry."""
    full.reconcile({"node1": 1, "node2": 1})
    first = full.send(OLD, "S")
    full.reconcile({"node1": 1, "node2": 1, "node3": 4})
    assert full.send(OLD, "A") == first
    second = full.send(NEW, "S")
    assert full.send(NEW, "A") == second
    full.fill()
    outcome_of = full.reconcile({"node1": 1, "node2": 1}, ("node1", "node2", "node3"))
    assert outcome_of[SERVICE].in_part
    assert full.send(OLD, "A") == first
    assert full.send(NEW, "A") == second
    assert set(full.send(range(50000, 50100), "S").values()) == {"node1", "node2"}
    outcome_of = full.reconcile({}, ("node1", "node2", "node3"))
    assert full.send(OLD, "A") == first
    assert full.forwarder.run(tcp("S", 60000)).node == ""


def test_tables_changed_in_place_are_read_back_after_a_crash(full: Full) -> None:
    full.reconcile({"node1": 1, "node2": 1, "node3": 1})
    full.fill()
    full.reconcile({"node1": 1, "node3": 1})
    (before,) = full.actual()[SERVICE].listeners
    full.tables.adopt(full.tables.survey(full.tables.baseline()))
    (same,) = full.actual()[SERVICE].listeners
    assert same == before
    full.tables.close()
    full.forwarder.tables = full.tables = ListenerMaps(
        full.forwarder.maps, clock=lambda: full.now_s
    )
    full.tables.adopt(full.tables.survey(full.tables.baseline(), with_entries=True))
    (found,) = full.actual()[SERVICE].listeners
    assert found.slots == before.slots
    assert full.reconcile({"node3": 1}) == {}, "this needs no memory"
    assert set(full.send(NEW, "S").values()) == {"node3"}


class Small:
    """`ListenerMaps` with one small map, of which a namespace gets at most half of the entries
    outside the reserve."""

    def __init__(self, forwarder: Forwarder, name: str, entries: int) -> None:
        self.map = Map.create(forwarder.maps[name].spec._replace(max_entries=entries))
        forwarder.tables.close()
        forwarder.tables = self.tables = ListenerMaps(forwarder.maps | {name: self.map}, share=0.5)
        self.tables.adopt(self.tables.survey(self.tables.baseline()))
        for i in range(1, 21):
            forwarder.add_node(f"node{i}", f"192.0.2.{i}")

    def reconcile(
        self,
        service: ServiceKey,
        ports: range,
        nodes: int = 1,
        protocol: ListenerProtocol = "TCP",
        ranges: tuple[str, ...] = (),
    ) -> Outcome:
        names = tuple(f"node{i}" for i in range(1, nodes + 1))
        listener = ListenerSpec(
            KEY, False, tuple((name, 1) for name in names), names, restricted=bool(ranges)
        )
        listeners = tuple(
            replace(listener, key=ListenerKey(VIP4, port, protocol)) for port in ports
        )
        wanted = {service: DirectSpec("uid", listeners, (), ranges)} if ports else {}
        outcome_of = apply_changes(
            self.tables, spec.diff(wanted, self.tables.actual([service])), {}
        )
        return outcome_of.get(service, Outcome("done"))


@pytest.fixture
def small(request: pytest.FixtureRequest, forwarder: Forwarder) -> Iterator[Small]:
    made = Small(forwarder, *request.param)
    yield made
    made.map.close()


@pytest.mark.parametrize("forwarder", [False], indirect=True, ids=["tc"])
@pytest.mark.parametrize("small", [("listeners", 80)], indirect=True, ids=["listeners"])
def test_one_namespace_cannot_use_up_the_listeners(small: Small) -> None:
    outcome = small.reconcile(GREEDY, range(100, 200))
    assert len(outcome.missing) == 100 - 35
    assert (
        "65 of 100 listeners are not served; namespace greedy has reached its share of this "
        "gateway's capacity for listeners"
    ) in outcome.message
    assert small.reconcile(BYSTANDER, range(200, 217)) == Outcome("done"), (
        "half of the free entries"
    )
    assert len(small.reconcile(BYSTANDER, range(200, 230)).missing) == 30 - 22, (
        "and of the reserve, because the Service is served already"
    )
    assert small.tables.quotas.take_retriable() == set()
    # A Service that is served can change, although its namespace now has more than its share.
    assert small.reconcile(GREEDY, range(101, 136)) == Outcome("done")
    assert len(small.reconcile(GREEDY, range(106, 142)).missing) == 1
    assert small.tables.quotas.take_retriable() == {GREEDY, BYSTANDER}


@pytest.mark.parametrize("forwarder", [False], indirect=True, ids=["tc"])
@pytest.mark.parametrize("small", [("retained_nodes", 32)], indirect=True, ids=["retained_nodes"])
def test_one_namespace_cannot_use_up_the_retained_nodes(small: Small, forwarder: Forwarder) -> None:
    """The listener is served, with fewer retained nodes."""
    outcome = small.reconcile(GREEDY, range(1, 2), nodes=20, protocol="UDP")
    assert outcome.in_part
    assert "connections may move" in outcome.message
    assert "share of this gateway's capacity for retained nodes" in outcome.message
    assert small.map.count() == 14
    assert small.reconcile(BYSTANDER, range(80, 81), nodes=7, protocol="UDP") == Outcome("done")
    assert small.map.count() == 21
    assert small.reconcile(GREEDY, range(1, 2), nodes=10, protocol="UDP") == Outcome("done"), (
        "nodes can be removed"
    )
    assert forwarder.run(udp()).node


@pytest.mark.parametrize("forwarder", [False], indirect=True, ids=["tc"])
@pytest.mark.parametrize("small", [("ranges", 32)], indirect=True, ids=["ranges"])
def test_one_namespace_cannot_use_up_the_source_ranges(small: Small) -> None:
    many = tuple(f"198.51.100.{i}/32" for i in range(20))
    outcome = small.reconcile(GREEDY, range(1, 2), ranges=many)
    assert (
        "share of this gateway's capacity for source ranges" in outcome.message
        or "used up" in outcome.message
    )
    assert not outcome.missing
    assert small.reconcile(GREEDY, range(1, 2), ranges=many[:14]) == Outcome("done")
    assert small.reconcile(BYSTANDER, range(80, 81), ranges=many[:7]) == Outcome("done")
    assert small.reconcile(BYSTANDER, range(80, 81), ranges=many[1:8]) == Outcome("done")
    assert "share" in small.reconcile(GREEDY, range(1, 2), ranges=many).message
    assert small.reconcile(BYSTANDER, range(0), ranges=()) == Outcome("done")
    assert small.tables.quotas.take_retriable() == {GREEDY}
