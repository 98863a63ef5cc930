"""The mirror of the maps: never half filled, never older than the last change, and what it remembers beside them."""

import pytest
from tests.drivers.direct.conftest import REDIRECT, SERVICE, VIP4, Forwarder, tcp

from fairlead.drivers.direct import spec
from fairlead.drivers.direct.arena import GRACE_S
from fairlead.drivers.direct.next_hop import NextHop
from fairlead.drivers.direct.spec import DirectSpec, ListenerKey, ListenerSpec, SetListener, SetNode
from fairlead.drivers.direct.steps import carry_out
from fairlead.drivers.direct.tables import Tables
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey
from fairlead.net.maglev import table
from fairlead.net.transition import Slots, transition

pytestmark = pytest.mark.root

KEY = ListenerKey(VIP4, 80, "TCP")
KEEP_LEFT_S = 60.0
OTHER = ServiceKey("default", "other")


def test_a_survey_that_a_change_overtook_is_not_adopted(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    tables = forwarder.tables
    survey = tables.survey(tables.known())
    after = forwarder.serve({"node1": 1, "node2": 1})
    assert after.previous
    assert not tables.adopt(survey)
    installed = tables.installed(KEY)
    assert installed
    assert installed.slots == after
    assert tables.adopt(tables.survey(tables.known()))
    assert tables.installed(KEY) == installed


def test_a_survey_that_a_new_next_hop_overtook_is_not_adopted(forwarder: Forwarder) -> None:
    survey = forwarder.tables.survey(forwarder.tables.known())
    forwarder.add_node("node1", "192.0.2.99")
    assert not forwarder.tables.adopt(survey)
    assert forwarder.tables.nodes.usable()["node1"] == ("192.0.2.99", "2001:db8::1")


def test_a_survey_changes_nothing_until_it_is_adopted(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    (packed, _), *_ = forwarder.maps["listeners"].items()
    forwarder.maps["listeners"].delete(packed)  # by somebody else
    survey = forwarder.tables.survey(forwarder.tables.known())
    assert forwarder.tables.actual(None).keys() == {SERVICE}
    assert len(list(forwarder.maps["owners"].items())) == 1
    assert forwarder.tables.adopt(survey)
    assert forwarder.tables.actual(None) == {}
    assert list(forwarder.maps["owners"].items()) == []


def test_what_a_listener_is_for_is_remembered_while_its_tables_are_as_they_were_written(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    forwarder.serve({"node1": 1, "node2": 1})
    tables = forwarder.tables
    before = tables.installed(KEY)
    assert before
    assert tables.adopt(tables.survey(tables.known()))
    assert tables.installed(KEY) == before
    memory = forwarder.maps["arena"].memory()
    memory[before.record.current_offset * 64] ^= 1  # by somebody else
    memory.close()
    assert tables.adopt(tables.survey(tables.known()))
    found = tables.installed(KEY)
    assert found
    assert found.spec is None
    assert found.slots != before.slots


def test_setting_what_is_there_writes_nothing(forwarder: Forwarder) -> None:
    slots = forwarder.serve({"node1": 1, "node2": 1})
    (record,) = (value for _, value in forwarder.maps["listeners"].items())
    listener = ListenerSpec(KEY, False, (("node1", 1), ("node2", 1)), ("node1", "node2", "node3"))
    forwarder.tables.set_listener(SetListener(SERVICE, "uid", listener, slots))
    assert [value for _, value in forwarder.maps["listeners"].items()] == [record]
    installed = forwarder.tables.installed(KEY)
    assert installed
    assert installed.spec == listener


def test_a_listener_is_not_taken_from_a_service_that_holds_it(forwarder: Forwarder) -> None:
    forwarder.serve({"node1": 1})
    theirs = ListenerSpec(KEY, False, (("node2", 1),), ("node2",))
    slots = transition(Slots(), table(theirs.weights), frozenset())
    with pytest.raises(Unavailable, match="10:80/TCP is held by Service default/web"):
        forwarder.tables.set_listener(SetListener(OTHER, "uid-other", theirs, slots))
    assert forwarder.run(tcp("S")).node == "node1"
    assert forwarder.tables.actual(None).keys() == {SERVICE}
    forwarder.tables.set_listener(SetListener(OTHER, "uid-other", theirs, slots, taken_from=SERVICE))
    assert forwarder.run(tcp("S")).node == "node2"
    assert forwarder.tables.actual(None).keys() == {OTHER}


class Clocked:
    """A forwarder's maps under tables whose clock is set by hand, as after a start of the driver."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.forwarder = forwarder
        self.now_s = 1000.0
        self.tables = forwarder.tables
        self.restart()

    def restart(self) -> None:
        self.tables.close()
        self.tables = Tables(self.forwarder.maps, keep_left_s=KEEP_LEFT_S, clock=lambda: self.now_s)
        self.tables.adopt(self.tables.survey(self.tables.known(), with_entries=True))
        self.forwarder.tables = self.tables

    def bring(self, weights: dict[str, int]) -> None:
        """Policy Cluster: the members are those with a weight."""
        listener = ListenerSpec(KEY, False, tuple(sorted(weights.items())), tuple(sorted(weights)), keeps_left=True)
        addresses = tuple(sorted((node, f"192.0.2.{node[-1]}") for node in weights))
        changes = spec.diff({SERVICE: DirectSpec("uid", (listener,), addresses)}, self.tables.actual(None))
        next_hops = {change: NextHop(1, here=False) for change in changes if isinstance(change, SetNode)}
        assert carry_out(self.tables, changes, next_hops) == {}

    def nodes(self, ports: range, flags: str) -> dict[int, str]:
        return {port: self.forwarder.run(tcp(flags, port)).node for port in ports}


@pytest.fixture
def clocked(forwarder: Forwarder) -> Clocked:
    return Clocked(forwarder)


OLD, TRACKED, NEW = range(20000, 20050), range(30000, 30050), range(40000, 40050)


@pytest.mark.parametrize("restart", [False, True])
def test_with_policy_cluster_connections_outlive_the_pods_of_their_node(clocked: Clocked, restart: bool) -> None:
    """Those to node1 have no entries, those to node2 have nothing else: no slot names it in the end."""
    clocked.bring({"node1": 1})
    assert set(clocked.nodes(OLD, "S").values()) == {"node1"}
    clocked.bring({"node1": 1, "node2": 9})
    tracked = {port: node for port, node in clocked.nodes(TRACKED, "S").items() if node == "node2"}
    clocked.bring({"node3": 1})
    installed = clocked.tables.installed(KEY)
    assert installed
    assert "node2" not in installed.slots.nodes
    if restart:
        clocked.restart()
    for _ in range(3):
        clocked.now_s += GRACE_S + 0.1
        clocked.bring({"node3": 1})
    assert set(clocked.nodes(OLD, "A").values()) == {"node1"}
    assert {port: clocked.forwarder.run(tcp("A", port)).node for port in tracked} == tracked
    assert set(clocked.nodes(NEW, "S").values()) == {"node3"}


def test_those_who_left_are_forgotten_in_the_end(clocked: Clocked) -> None:
    clocked.bring({"node1": 1, "node2": 1})
    clocked.nodes(OLD, "S")
    clocked.bring({"node1": 1, "node3": 1})
    clocked.now_s += KEEP_LEFT_S - 1
    clocked.bring({"node1": 1})
    assert "node2" in clocked.nodes(OLD, "A").values()
    clocked.now_s += 2
    clocked.bring({"node1": 1})
    assert "node2" not in clocked.nodes(OLD, "A").values()
    clocked.now_s += GRACE_S
    clocked.bring({"node1": 1})
    assert clocked.tables.nodes.numbers.keys() == {"node1", "node3"}
    clocked.now_s += KEEP_LEFT_S
    for _ in range(2):
        clocked.bring({"node1": 1})
        clocked.now_s += GRACE_S
    assert clocked.tables.nodes.numbers.keys() == {"node1"}
    assert clocked.forwarder.run(tcp("S")).verdict == REDIRECT
