"""The mirror of the maps is never half filled, and never older than the last change. It also
contains facts that the maps do not contain."""

import pytest
from msgspec.structs import replace
from tests.drivers.direct.applying import apply_changes, set_listener
from tests.drivers.direct.conftest import LISTENERS, REDIRECT, SERVICE, VIP4, Forwarder, tcp, udp

from fairlead.drivers.direct import spec
from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.drivers.direct.maps.convergence import CONVERGENCE_S
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.mirror import InstalledListener
from fairlead.drivers.direct.maps.quota import RESERVE
from fairlead.drivers.direct.maps.records import (
    LINK,
    LISTENER,
    LISTENER_KEY,
    NextHop,
    pack_listener_key,
)
from fairlead.drivers.direct.spec import DirectSpec, ListenerKey, ListenerSpec, SetListener, SetNode
from fairlead.errors import Unavailable
from fairlead.model import Outcome, ServiceKey
from fairlead.net.address import pack_address, unpack_address
from fairlead.net.maglev import table
from fairlead.net.transition import Slots, tracked_as, transition

pytestmark = pytest.mark.root

KEY = ListenerKey(VIP4, 80, "TCP")
RETAIN_DEPARTED_S = 60.0
OTHER = ServiceKey("default", "other")


def installed_by_key(tables: ListenerMaps) -> dict[ListenerKey, InstalledListener | None]:
    keys = tables.keys()
    return {key: tables.installed(key) for key in sorted(keys)}


def renew(forwarder: Forwarder) -> None:
    """Read the maps completely, and update the mirror."""
    forwarder.tables.adopt(forwarder.tables.survey(forwarder.tables.baseline()))


def test_changes_during_a_survey_are_not_overwritten_by_it(
    forwarder: Forwarder,
) -> None:
    tables, maps = forwarder.tables, forwarder.maps
    for port in (80, 81, 82, 83):
        forwarder.serve({"node1": 1}, port=port)
    survey = tables.survey(tables.baseline())
    after = forwarder.serve({"node1": 1, "node2": 1})
    assert after.previous
    tables.remove_listener(ListenerKey(VIP4, 81, "TCP"), SERVICE)
    forwarder.serve({"node2": 1}, port=84)
    tables.adopt(survey)
    installed = tables.installed(KEY)
    assert installed
    assert installed.slots == after
    assert [key.port for key in installed_by_key(tables)] == [80, 82, 83, 84]
    before = installed_by_key(tables)
    renew(forwarder)
    assert installed_by_key(tables) == before
    assert maps["owners"].count() == 4


def test_a_survey_finds_foreign_changes_beside_changes_made_during_it(forwarder: Forwarder) -> None:
    tables, maps = forwarder.tables, forwarder.maps
    for port in (80, 81, 82):
        forwarder.serve({"node1": 1}, port=port)
    known = tables.baseline()
    forwarder.serve({"node1": 1, "node2": 1}, port=81)
    maps["listeners"].delete(pack_listener_key(KEY))  # as another process would
    survey = tables.survey(known)
    after = forwarder.serve({"node2": 1}, port=82)
    tables.adopt(survey)
    assert [key.port for key in installed_by_key(tables)] == [81, 82]
    installed = tables.installed(ListenerKey(VIP4, 82, "TCP"))
    assert installed
    assert installed.slots == after
    assert installed.spec
    assert maps["owners"].count() == 2
    # Memory that was just released is not reused at once, because a program may still read it for a
    # packet.
    used = {each.record.current_offset for each in installed_by_key(tables).values() if each}
    forwarder.serve({"node1": 2, "node2": 1}, port=83)
    new = tables.installed(ListenerKey(VIP4, 83, "TCP"))
    assert new
    assert new.record.current_offset not in used


def test_a_next_hop_that_is_set_during_a_survey_is_not_overwritten_by_it(
    forwarder: Forwarder,
) -> None:
    survey = forwarder.tables.survey(forwarder.tables.baseline())
    forwarder.add_node("node1", "192.0.2.99")
    forwarder.add_node("newcomer", "192.0.2.98")
    forwarder.tables.adopt(survey)
    assert forwarder.tables.nodes.reachable_addresses("node1") == (
        ("node1", "192.0.2.99"),
        ("node1", "2001:db8::1"),
    )
    assert forwarder.tables.nodes.reachable_addresses("newcomer") == (("newcomer", "192.0.2.98"),)
    before = dict(forwarder.tables.nodes.numbers)
    renew(forwarder)
    assert forwarder.tables.nodes.numbers == before


def test_a_new_node_makes_no_other_listener_unknown(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    known = forwarder.tables.baseline()
    forwarder.add_node("newcomer", "192.0.2.98")
    survey = forwarder.tables.survey(known)
    assert survey.changed == {}
    forwarder.tables.adopt(survey)
    installed = forwarder.tables.installed(KEY)
    assert installed
    assert installed.spec


def test_a_survey_changes_nothing_until_it_is_adopted(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    (packed, _), *_ = forwarder.maps["listeners"].items()
    forwarder.maps["listeners"].delete(packed)  # as another process would
    survey = forwarder.tables.survey(forwarder.tables.baseline())
    assert forwarder.tables.actual(None).keys() == {SERVICE}
    assert len(list(forwarder.maps["owners"].items())) == 1
    forwarder.tables.adopt(survey)
    assert forwarder.tables.actual(None) == {}
    assert list(forwarder.maps["owners"].items()) == []


def test_the_spec_of_a_listener_is_known_until_another_process_changes_its_tables(
    forwarder: Forwarder,
) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node1": 1, "node2": 1})
    tables = forwarder.tables
    before = tables.installed(KEY)
    assert before
    renew(forwarder)
    assert tables.installed(KEY) == before
    memory = forwarder.maps["arena"].memory()
    memory[before.record.current_offset * 64] ^= 1  # as another process would
    memory.close()
    renew(forwarder)
    found = tables.installed(KEY)
    assert found
    assert found.spec is None
    assert found.slots != before.slots


def test_setting_the_installed_slots_writes_nothing(forwarder: Forwarder) -> None:
    slots = forwarder.serve({"node1": 1, "node2": 1})
    (record,) = (value for _, value in forwarder.maps["listeners"].items())
    listener = ListenerSpec(KEY, False, (("node1", 1), ("node2", 1)), ("node1", "node2", "node3"))
    set_listener(forwarder.tables, SetListener(SERVICE, "uid", listener, slots))
    assert [value for _, value in forwarder.maps["listeners"].items()] == [record]
    installed = forwarder.tables.installed(KEY)
    assert installed
    assert installed.spec == listener


def test_a_listener_is_not_taken_from_a_service_that_holds_it(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    theirs = ListenerSpec(KEY, False, (("node2", 1),), ("node2",))
    slots = transition(Slots(), table(theirs.weights), frozenset())
    with pytest.raises(Unavailable, match="10:80/TCP is held by Service default/web"):
        set_listener(forwarder.tables, SetListener(OTHER, "uid-other", theirs, slots))
    assert forwarder.run(tcp("S")).node == "node1"
    assert forwarder.tables.actual(None).keys() == {SERVICE}
    set_listener(
        forwarder.tables, SetListener(OTHER, "uid-other", theirs, slots, taken_from=SERVICE)
    )
    assert forwarder.run(tcp("S")).node == "node2"
    assert forwarder.tables.actual(None).keys() == {OTHER}


def test_if_one_of_several_listeners_cannot_be_set_the_others_are(
    forwarder: Forwarder,
) -> None:
    """First the UID of one listener is too long for the record of its owner, then the map is too
    small for all listeners."""
    tables = forwarder.tables
    listener = ListenerSpec(KEY, False, (("node1", 1),), ("node1",))
    slots = transition(Slots(), table(listener.weights), frozenset())

    def change(port: int, uid: str = "uid") -> SetListener:
        return SetListener(
            SERVICE, uid, replace(listener, key=ListenerKey(VIP4, port, "TCP")), slots
        )

    failures = tables.set_listeners([change(80), change(81, "u" * 41), change(82)])
    assert {key.port for key in failures} == {81}
    assert forwarder.run(tcp("S")).node == "node1"
    strange = [
        LISTENER_KEY.pack(bytes(16), number.to_bytes(2, "big"), 6)
        for number in range(LISTENERS // RESERVE + 2)
    ]
    # As another process would.
    forwarder.maps["listeners"].update_all(dict.fromkeys(strange, LISTENER.pack(*[0] * 8)))
    slots = Slots()
    most = LISTENERS - LISTENERS // RESERVE
    failures = tables.set_listeners([change(port) for port in range(100, 100 + most - 2)])
    assert len(failures) == 2
    present = tables.keys()
    assert len(present) == most - 2
    assert forwarder.maps["listeners"].count() == LISTENERS
    forwarder.maps["listeners"].delete_all(strange)
    renew(forwarder)
    assert tables.keys() == present
    assert tables.set_listeners([change(key.port) for key in failures]) == {}


class Clocked:
    """`ListenerMaps` on the maps of a forwarder, as after a start of the driver. The test sets
    their clock."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.forwarder = forwarder
        self.now_s = 1000.0
        self.tables = forwarder.tables
        self.restart()

    def restart(self, *, peers: bool = False) -> None:
        self.tables.close()
        self.tables = ListenerMaps(self.forwarder.maps, peers=peers, clock=lambda: self.now_s)
        self.tables.adopt(self.tables.survey(self.tables.baseline(), with_entries=True))
        self.forwarder.tables = self.tables

    def reconcile(self, weights: dict[str, int]) -> None:
        """Set the listener, with policy Cluster and the nodes in `weights` as its members."""
        listener = ListenerSpec(
            KEY, False, tuple(sorted(weights.items())), tuple(sorted(weights)), retain_departed=True
        )
        addresses = tuple(sorted((node, f"192.0.2.{node[-1]}") for node in weights))
        changes = spec.diff(
            {SERVICE: DirectSpec("uid", (listener,), addresses)},
            self.tables.actual(None),
            RETAIN_DEPARTED_S,
        )
        next_hops = {
            change: NextHop(LINK, 1, change.address)
            for change in changes
            if isinstance(change, SetNode)
        }
        assert apply_changes(self.tables, changes, next_hops) == {}

    def nodes(self, ports: range, flags: str) -> dict[int, str]:
        return {port: self.forwarder.run(tcp(flags, port)).node for port in ports}


@pytest.fixture
def clocked(forwarder: Forwarder) -> Clocked:
    return Clocked(forwarder)


OLD, TRACKED, NEW = range(20000, 20050), range(30000, 30050), range(40000, 40050)


@pytest.mark.parametrize("restart", [False, True])
def test_with_policy_cluster_connections_outlive_the_pods_of_their_node(
    clocked: Clocked, restart: bool
) -> None:
    """Connections to node1 have no entries. Connections to node2 have only entries: in the end no
    slot names node2."""
    clocked.reconcile({"node1": 1})
    assert set(clocked.nodes(OLD, "S").values()) == {"node1"}
    clocked.reconcile({"node1": 1, "node2": 9})
    tracked = {port: node for port, node in clocked.nodes(TRACKED, "S").items() if node == "node2"}
    clocked.reconcile({"node3": 1})
    installed = clocked.tables.installed(KEY)
    assert installed
    assert "node2" not in installed.slots.nodes
    if restart:
        clocked.restart()
    for _ in range(3):
        clocked.now_s += GRACE_S + 0.1
        clocked.reconcile({"node3": 1})
    assert set(clocked.nodes(OLD, "A").values()) == {"node1"}
    assert {port: clocked.forwarder.run(tcp("A", port)).node for port in tracked} == tracked
    assert set(clocked.nodes(NEW, "S").values()) == {"node3"}


def test_departed_nodes_are_removed_in_the_end(clocked: Clocked) -> None:
    clocked.reconcile({"node1": 1, "node2": 1})
    clocked.nodes(OLD, "S")
    clocked.reconcile({"node1": 1, "node3": 1})
    clocked.now_s += RETAIN_DEPARTED_S - 1
    clocked.reconcile({"node1": 1})
    assert "node2" in clocked.nodes(OLD, "A").values()
    clocked.now_s += 2
    clocked.reconcile({"node1": 1})
    assert "node2" not in clocked.nodes(OLD, "A").values()
    clocked.now_s += GRACE_S
    clocked.reconcile({"node1": 1})
    assert clocked.tables.nodes.numbers.keys() == {"node1", "node3"}
    clocked.now_s += RETAIN_DEPARTED_S
    for _ in range(2):
        clocked.reconcile({"node1": 1})
        clocked.now_s += GRACE_S
    assert clocked.tables.nodes.numbers.keys() == {"node1"}
    assert clocked.forwarder.run(tcp("S")).verdict == REDIRECT


def test_a_drain_ends_when_its_time_is_over(clocked: Clocked) -> None:
    """node2 gets no new connections, and keeps its connections for 30 s. The time starts again with
    a restart."""

    def reconcile(weights: dict[str, int], drain_s: float = 30.0) -> dict[ServiceKey, Outcome]:
        """Set the listener. node1 and node2 are always members."""
        listener = ListenerSpec(
            KEY, False, tuple(sorted(weights.items())), ("node1", "node2"), drain_s=drain_s
        )
        changes = spec.diff(
            {SERVICE: DirectSpec("uid", (listener,), ())}, clocked.tables.actual(None)
        )
        return apply_changes(clocked.tables, changes, {})

    def kept() -> set[str]:
        return set(clocked.nodes(OLD, "A").values())

    assert reconcile({"node1": 1, "node2": 1}) == {}
    assert set(clocked.nodes(OLD, "S").values()) == {"node1", "node2"}
    (outcome,) = reconcile({"node1": 1}).values()
    assert outcome.state == "done"
    assert 30.0 < outcome.again_s < 30.1
    assert [(each.node, each.left_s) for each in clocked.tables.draining()] == [("node2", 30.0)]
    clocked.now_s += 29.0
    assert reconcile({"node1": 1}) == {}
    assert kept() == {"node1", "node2"}
    clocked.restart()
    reconcile({"node1": 1})
    assert [(each.node, each.left_s) for each in clocked.tables.draining()] == [("node2", 30.0)], (
        "the time starts again"
    )
    clocked.now_s += 30.0
    reconcile({"node1": 1})
    assert kept() == {"node1"}
    installed = clocked.tables.installed(KEY)
    assert installed
    assert installed.slots.previous == b"", "no slot is in transition any more"
    assert clocked.tables.draining() == []
    assert reconcile({"node1": 1}) == {}, "the drain stays over"
    assert kept() == {"node1"}
    reconcile({"node1": 1, "node2": 1})
    assert set(clocked.nodes(NEW, "S").values()) == {"node1", "node2"}, (
        "a member that returns gets connections like any other"
    )
    reconcile({"node1": 1}, drain_s=0.0)
    clocked.now_s += 1e6
    assert reconcile({"node1": 1}, drain_s=0.0) == {}
    assert set(clocked.nodes(NEW, "A").values()) == {"node1", "node2"}, (
        "a drain without a limit does not end"
    )


def test_changes_of_unused_slots_leave_no_slot_in_transition(clocked: Clocked) -> None:
    """So gateways that learn of the nodes in different orders have equal slots, and no packet is
    lost because of connections that never existed."""
    clocked.reconcile({"node1": 1})
    clocked.reconcile({"node1": 1, "node2": 1})
    clocked.reconcile({"node1": 1, "node2": 1, "node3": 1})
    installed = clocked.tables.installed(KEY)
    assert installed
    assert installed.slots == transition(
        Slots(), table((("node1", 1), ("node2", 1), ("node3", 1))), frozenset()
    )
    before = clocked.nodes(OLD, "S")
    clocked.reconcile({"node3": 1, "node1": 3})
    installed = clocked.tables.installed(KEY)
    assert installed
    assert installed.slots.previous
    assert clocked.nodes(OLD, "A") == before


def test_with_peers_a_listener_whose_unused_slots_change_is_converging(
    clocked: Clocked,
) -> None:
    """The time starts again with a restart. Without peers the convergence ends at once."""

    def converging() -> bool:
        installed = clocked.tables.installed(KEY)
        assert installed
        return installed.record.converging

    clocked.restart(peers=True)
    clocked.reconcile({"node1": 1})
    clocked.now_s += CONVERGENCE_S
    clocked.tables.end_convergence()
    assert not converging()
    clocked.reconcile({"node1": 1, "node2": 1})
    assert converging()
    clocked.now_s += CONVERGENCE_S / 2
    clocked.reconcile({"node1": 1, "node3": 1})
    clocked.now_s += CONVERGENCE_S / 2
    clocked.tables.end_convergence()
    assert converging()
    clocked.restart(peers=True)
    clocked.now_s += CONVERGENCE_S / 2
    clocked.tables.end_convergence()
    assert converging()
    clocked.nodes(OLD, "S")
    clocked.now_s += CONVERGENCE_S / 2
    clocked.tables.end_convergence()
    assert not converging()
    clocked.reconcile({"node2": 1, "node3": 1})
    assert not converging(), "the slots were in use"
    clocked.tables.remove_listener(KEY, SERVICE)
    clocked.reconcile({"node1": 1})
    clocked.restart()
    assert converging()
    clocked.tables.end_convergence()
    assert not converging()


def test_the_first_packets_arrive_while_unused_slots_are_changed(clocked: Clocked) -> None:
    clocked.reconcile({"node1": 1, "node2": 1})
    listener = ListenerSpec(KEY, False, (("node1", 1), ("node3", 1)), ("node1", "node2", "node3"))
    changes = spec.diff({SERVICE: DirectSpec("uid", (listener,), ())}, clocked.tables.actual(None))
    before = clocked.nodes(OLD, "S")
    apply_changes(clocked.tables, changes, {})
    assert clocked.nodes(OLD, "A") == before


@pytest.mark.parametrize("forwarder", [False], indirect=True, ids=["tc"])
def test_slots_received_from_a_peer_after_planning_are_not_undone(clocked: Clocked) -> None:
    """The peer has changed to node3 and back meanwhile. Connections that it opened to node3 may
    arrive at this gateway, which gets the slots of the peer."""
    retained_nodes = ("node1", "node2", "node3")
    clocked.reconcile({"node1": 1, "node2": 1})
    clocked.nodes(OLD, "S")
    here = clocked.tables.installed(KEY)
    assert here
    there = transition(here.slots, table((("node2", 1), ("node3", 1))), frozenset(retained_nodes))
    received = tracked_as(
        here.slots,
        transition(there, table(here.spec.weights if here.spec else ()), frozenset(retained_nodes)),
    )
    listener = ListenerSpec(KEY, False, (("node1", 1), ("node2", 3)), retained_nodes)
    changes = spec.diff({SERVICE: DirectSpec("uid", (listener,), ())}, clocked.tables.actual(None))
    clocked.tables.set_peer_slots(
        KEY, SERVICE, "uid", received, retained_nodes, restricted=False, used=True
    )
    assert apply_changes(clocked.tables, changes, {}) == {}
    installed = clocked.tables.installed(KEY)
    assert installed
    assert installed.slots == transition(
        received, table(listener.weights), frozenset(retained_nodes)
    )
    assert [each.slots for each in changes if isinstance(each, SetListener)] != [installed.slots]
    assert (
        spec.diff({SERVICE: DirectSpec("uid", (listener,), ())}, clocked.tables.actual(None)) == ()
    )


@pytest.mark.parametrize("forwarder", [False], indirect=True, ids=["tc"])
def test_a_released_number_of_a_node_is_not_reused_next(
    forwarder: Forwarder,
) -> None:
    """An ignored flow entry may still contain the number. A complete read in between makes no
    difference."""
    nodes, others = forwarder.tables.nodes, list(forwarder.tables.nodes.numbers)
    gone = nodes.number("gone")
    for now_s in (0.0, GRACE_S):
        nodes.forget_unused(others, now_s)
    assert "gone" not in nodes.numbers
    renew(forwarder)
    assert nodes.number("new") == gone + 1


def test_addresses_are_those_of_listeners(forwarder: Forwarder) -> None:
    def count_entries() -> set[str]:
        return {unpack_address(key) for key, _ in forwarder.maps["addresses"].items()}

    forwarder.serve({"node1": 1})
    forwarder.serve({"node1": 1}, port=81)
    forwarder.serve({"node1": 1}, address="2001:db8:f00::10")
    assert count_entries() == {VIP4, "2001:db8:f00::10"}
    forwarder.tables.remove_listener(KEY, SERVICE)
    assert count_entries() == {VIP4, "2001:db8:f00::10"}
    forwarder.maps["addresses"].update(pack_address("203.0.113.99"), bytes(4))  # as another process
    forwarder.maps["addresses"].delete(pack_address(VIP4))
    renew(forwarder)
    assert count_entries() == {VIP4, "2001:db8:f00::10"}
    forwarder.tables.remove_listener(ListenerKey(VIP4, 81, "TCP"), SERVICE)
    assert count_entries() == {"2001:db8:f00::10"}


def test_nodes_retain_udp_flows_while_they_serve(clocked: Clocked) -> None:
    key = ListenerKey(VIP4, 80, "UDP")

    def reconcile(*nodes: str, also: str = "") -> None:
        listener = ListenerSpec(
            key, False, tuple((node, 1) for node in nodes), (*nodes, *([also] if also else []))
        )
        apply_changes(
            clocked.tables,
            spec.diff({SERVICE: DirectSpec("uid", (listener,), ())}, clocked.tables.actual(None)),
            {},
        )

    def send(ports: range) -> dict[int, str]:
        return {port: clocked.forwarder.run(udp(port)).node for port in ports}

    reconcile("node1")
    assert set(send(OLD).values()) == {"node1"}
    send(OLD)
    for others in (("node2",), ("node2", "node3"), ("node3",)):
        reconcile("node1", *others)
        assert set(send(OLD).values()) == {"node1"}, "flows stay with a node that serves"
    clocked.restart()
    assert set(send(OLD).values()) == {"node1"}
    reconcile("node3")
    assert set(send(OLD).values()) == {"node3"}
    assert clocked.forwarder.maps["retained_nodes"].count() == 1
    reconcile("node3", also="node4")
    assert clocked.forwarder.maps["retained_nodes"].count() == 2, "also if no slot changes"
    reconcile("node3")
    assert clocked.forwarder.maps["retained_nodes"].count() == 1
    clocked.tables.remove_listener(key, SERVICE)
    assert clocked.forwarder.maps["retained_nodes"].count() == 0
