"""No open connection moves: sequences of changes, compared with a model of the forwarder's decision
for each packet."""

from array import array
from dataclasses import dataclass
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairlead.net.maglev import EMPTY, MIN_SIZE, Table, table, table_of
from fairlead.net.transition import (
    NONE,
    TRACKED,
    Slots,
    by_rule,
    in_place,
    is_settled,
    nodes_in,
    previous_in_c,
    previous_in_python,
    renumber,
    tracked_as,
    transition,
)

NAMES = ("a", "b", "c", "d", "e")


@dataclass
class Connection:
    """An open connection: the hash of its flow, the hash of its client's address, its node, and its
    flow entry if it has one."""

    flow: int
    source: int
    node: str = ""
    entry: str = ""


def look_up(slots: bytes, connection: Connection, *, by_source: bool) -> int:
    """Model slot() of bpf/choose.h: multiply-shift."""
    numbers = array("H", slots)
    digest = connection.source if by_source else connection.flow
    return numbers[digest * len(numbers) >> 32] if numbers else NONE


def owners(slots: Slots, connection: Connection) -> tuple[str, str | None]:
    """Return the current node ("" for none), and the value of `previous`: a node, "" for TRACKED,
    None for NONE."""
    current = look_up(slots.current, connection, by_source=slots.by_source)
    previous = look_up(slots.previous, connection, by_source=slots.previous_by_source)
    name = {NONE: "", TRACKED: ""} | dict(enumerate(slots.nodes))
    return name[current], None if previous == NONE else name[previous]


def open_connection(slots: Slots, connection: Connection) -> bool:
    """Model choose_tcp() of bpf/choose.h for a SYN."""
    current, previous = owners(slots, connection)
    connection.node = current
    connection.entry = current if previous is not None else ""
    return bool(current)


def node_of(slots: Slots, connection: Connection) -> str:
    """Model choose_tcp() of bpf/choose.h for a later segment."""
    current, previous = owners(slots, connection)
    return current if previous is None else connection.entry or previous or current


@dataclass(frozen=True)
class Step:
    weights: dict[str, int]
    draining: frozenset[str]
    by_source: bool


STEPS = st.builds(
    Step,
    # The sums are from 1 to 2,000, so that tables of all sizes occur.
    st.dictionaries(
        st.sampled_from(NAMES), st.one_of(st.integers(1, 4), st.integers(5, 400)), max_size=4
    ),
    st.frozensets(st.sampled_from(NAMES)),
    st.booleans(),
)


def new_connections(source: Random, count: int) -> list[Connection]:
    return [Connection(source.getrandbits(32), source.getrandbits(32)) for _ in range(count)]


@settings(max_examples=60)
@given(st.lists(STEPS, min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_no_connection_to_a_retained_node_moves(steps: list[Step], seed: int) -> None:
    source, slots, connections = Random(seed), Slots(), list[Connection]()
    for step in steps:
        retained_nodes = step.draining | step.weights.keys()
        slots = transition(
            slots, table(tuple(step.weights.items())), retained_nodes, by_source=step.by_source
        )
        connections = [each for each in connections if each.node in retained_nodes]
        assert [node_of(slots, each) for each in connections] == [each.node for each in connections]
        connections += [
            each for each in new_connections(source, 60) if open_connection(slots, each)
        ]


@settings(max_examples=60)
@given(st.lists(STEPS, min_size=1, max_size=6))
def test_invariants_of_slots_after_any_steps(steps: list[Step]) -> None:
    slots = Slots()
    for step in steps:
        wanted, retained_nodes = (
            table(tuple(step.weights.items())),
            step.draining | step.weights.keys(),
        )
        slots = transition(slots, wanted, retained_nodes, by_source=step.by_source)
        assert transition(slots, wanted, retained_nodes, by_source=step.by_source) == slots
        named = [slots.nodes[i] for i in array("H", slots.current)]
        assert named == [wanted.nodes[i] for i in array("H", wanted.slots)]
        previous = {slots.nodes[i] for i in {*array("H", slots.previous)} - {NONE, TRACKED}}
        assert previous <= retained_nodes
        assert set(slots.nodes) == previous | set(named)
        assert list(slots.nodes) == sorted(set(slots.nodes))


@settings(max_examples=60)
@given(st.lists(STEPS, min_size=1, max_size=6), STEPS)
def test_settled_slots_are_unchanged_by_the_rule(steps: list[Step], last: Step) -> None:
    """The shortcut for unchanged slots applies only where the full computation gives the same
    result."""
    slots = Slots()
    for step in steps:
        slots = transition(
            slots,
            table(tuple(step.weights.items())),
            step.draining | step.weights.keys(),
            by_source=step.by_source,
        )
    for step in (*steps, last):
        wanted, retained_nodes = (
            table(tuple(step.weights.items())),
            step.draining | step.weights.keys(),
        )
        if is_settled(slots, wanted, retained_nodes, by_source=step.by_source):
            assert by_rule(slots, wanted, retained_nodes, by_source=step.by_source) == slots


def slots_after(steps: list[Step]) -> Slots:
    """Return the slots after these steps, with every node retained in all steps."""
    slots = Slots()
    for step in steps:
        slots = transition(
            slots, table(tuple(step.weights.items())), frozenset(NAMES), by_source=step.by_source
        )
    return slots


def halves(*, by_source: bool) -> list[Step]:
    """Return steps in which half of the slots move from one node to another."""
    return [
        Step(weights, frozenset(), by_source) for weights in ({"a": 1, "b": 1}, {"b": 1, "c": 1})
    ]


@settings(max_examples=60)
@given(
    st.lists(STEPS, min_size=1, max_size=5),
    st.lists(STEPS, min_size=1, max_size=5),
    st.integers(0, 1 << 30),
)
@example(halves(by_source=False), halves(by_source=True), 1)
@example(halves(by_source=True)[:1], halves(by_source=False), 1)
def test_tracking_as_another_gateway_moves_no_connection(
    here: list[Step], there: list[Step], seed: int
) -> None:
    source, own, other = Random(seed), slots_after(here), slots_after(there)
    mine = [each for each in new_connections(source, 60) if open_connection(own, each)]
    theirs = [
        each for each in new_connections(source, 60) if open_connection(other, each) and each.entry
    ]
    tracked = tracked_as(own, other)
    assert (tracked.nodes, tracked.current) == (own.nodes, own.current)
    assert [node_of(tracked, each) for each in mine] == [each.node for each in mine]
    assert [node_of(tracked, each) for each in theirs] == [each.node for each in theirs]
    assert tracked_as(tracked, other) == tracked


NUMBERS = st.one_of(st.integers(0, 5), st.just(NONE), st.just(TRACKED))


@given(st.data(), st.sampled_from([1, 2, 12]), st.frozensets(st.integers(0, 6)))
def test_c_and_python_compute_the_same_transition(
    data: st.DataObject, size: int, retained_nodes: frozenset[int]
) -> None:
    """The tables include tables of other sizes and empty ones."""

    def numbers() -> "array[int]":
        length = data.draw(
            st.sampled_from([each for each in (0, 1, 2, 4, 12) if not each or size % each == 0])
        )
        return array("H", data.draw(st.lists(NUMBERS, min_size=length, max_size=length)))

    was, before, now = numbers(), numbers(), numbers()
    longest = max(len(was), len(before), len(now))
    if all(not each or longest % len(each) == 0 for each in (was, before, now)):
        assert previous_in_c(was, before, now, retained_nodes) == previous_in_python(
            was, before, now, retained_nodes
        )


def test_a_tracked_slot_stays_tracked_while_another_node_may_have_its_connections() -> None:
    current, tracked = array("H", [0]), array("H", [TRACKED])
    for compute in (previous_in_c, previous_in_python):
        assert list(compute(current, tracked, current, {0, 1})) == [TRACKED]
        assert list(compute(current, tracked, current, {1})) == [TRACKED]
        assert list(compute(current, tracked, current, {0})) == [NONE]


def test_tracked_slots_are_not_settled_when_only_one_node_is_retained() -> None:
    only = table((("a", 1),))
    slots = Slots(only.nodes, only.slots, array("H", [TRACKED]).tobytes())
    assert is_settled(slots, only, {"a", "b"}, by_source=False)
    assert not is_settled(slots, only, {"a"}, by_source=False)
    assert by_rule(slots, only, {"a"}, by_source=False).previous == b""


@given(st.lists(NUMBERS), st.lists(st.integers(0, 65535), min_size=6, max_size=6))
def test_renumbering_leaves_none_and_tracked(slots: list[int], to: list[int]) -> None:
    expected = [each if each in (NONE, TRACKED) else to[each] for each in slots]
    assert list(renumber(array("H", slots), array("H", to))) == expected


@given(st.lists(NUMBERS), st.lists(NUMBERS))
def test_the_nodes_of_tables(one: list[int], other: list[int]) -> None:
    assert nodes_in(array("H", one), array("H", other)) == sorted({*one, *other} - {NONE, TRACKED})


def test_growing_from_2_to_500_pods_and_back_moves_nothing() -> None:
    source, slots, connections, sizes = Random(7), Slots(), list[Connection](), set()
    scale = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 250, 100, 10, 1]
    for pods in scale:
        slots = transition(slots, table((("a", pods), ("b", pods))), frozenset("ab"))
        sizes.add(len(slots.current) // 2)
        assert [node_of(slots, each) for each in connections] == [each.node for each in connections]
        connections += [
            each for each in new_connections(source, 500) if open_connection(slots, each)
        ]
    assert len(connections) == 500 * len(scale)
    assert sizes == {MIN_SIZE << doubling for doubling in range(7)}


SIZES = st.sampled_from([MIN_SIZE << doubling for doubling in range(4)])


@settings(max_examples=60)
@given(st.lists(st.tuples(STEPS, SIZES), min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_no_connection_to_a_retained_node_moves_between_tables_of_other_sizes(
    steps: list[tuple[Step, int]], seed: int
) -> None:
    source, slots, connections = Random(seed), Slots(), list[Connection]()
    for step, size in steps:
        weights, retained_nodes = (
            tuple(sorted(step.weights.items())),
            step.draining | step.weights.keys(),
        )
        slots = transition(slots, table_of(weights, size), retained_nodes, by_source=step.by_source)
        assert len(slots.current) in (0, 2 * size)
        connections = [each for each in connections if each.node in retained_nodes]
        assert [node_of(slots, each) for each in connections] == [each.node for each in connections]
        connections += [
            each for each in new_connections(source, 60) if open_connection(slots, each)
        ]


@settings(max_examples=100)
@given(
    st.lists(STEPS, min_size=1, max_size=5),
    st.lists(STEPS, min_size=1, max_size=4),
    st.integers(0, 1 << 30),
)
def test_writing_in_place_moves_only_connections_that_no_table_records(
    steps: list[Step], over: list[Step], seed: int
) -> None:
    """The sizes stay, nodes that are to be removed have no slot, and connections to nodes that
    continue to serve stay. Connections to other retained nodes stay too if there is a previous
    table with the size and the hash of the current one."""
    source, slots, connections = Random(seed), Slots(), list[Connection]()
    for step in steps:
        retained_nodes = step.draining | step.weights.keys()
        slots = transition(
            slots, table(tuple(step.weights.items())), retained_nodes, by_source=step.by_source
        )
        connections = [each for each in connections if each.node in retained_nodes]
        connections += [
            each for each in new_connections(source, 60) if open_connection(slots, each)
        ]
    for step in over:
        if not slots.current:
            return
        weights, retained_nodes = (
            tuple(sorted(step.weights.items())),
            step.draining | step.weights.keys(),
        )
        exact = (
            len(slots.previous) >= len(slots.current)
            and slots.by_source == slots.previous_by_source
        )
        old, slots = (
            slots,
            in_place(
                slots,
                table_of(weights, len(slots.current) // 2) if weights else EMPTY,
                retained_nodes,
            ),
        )
        assert len(slots.current) == (len(old.current) if weights else 0)
        assert len(slots.previous) == len(old.previous)
        assert {slots.nodes[i] for i in array("H", slots.current)} <= step.weights.keys()
        assert {
            slots.nodes[i] for i in {*array("H", slots.previous)} - {NONE, TRACKED}
        } <= retained_nodes
        assert all(
            now == was
            for was, now in zip(old.current, slots.current, strict=False)
            if old.nodes == slots.nodes and set(old.nodes) <= step.weights.keys()
        )
        connections = [
            each for each in connections if each.node in (retained_nodes if exact else step.weights)
        ]
        assert [node_of(slots, each) for each in connections] == [each.node for each in connections]
        connections += [
            each for each in new_connections(source, 60) if open_connection(slots, each)
        ]


def test_unchanged_weights_need_no_previous_table() -> None:
    weights = table((("a", 1), ("b", 2)))
    slots = transition(Slots(), weights, frozenset("ab"))
    assert (
        transition(slots, weights, frozenset("ab")) == slots == Slots(weights.nodes, weights.slots)
    )


def test_slots_are_settled_until_a_share_changes_or_a_retained_node_leaves() -> None:
    before, after = table((("a", 1), ("b", 2))), table((("a", 2), ("b", 1), ("c", 1)))
    slots = transition(transition(Slots(), before, frozenset("ab")), after, frozenset("abc"))
    assert slots.previous
    assert is_settled(slots, after, frozenset("abc"), by_source=False)
    assert not is_settled(slots, before, frozenset("abc"), by_source=False)
    assert not is_settled(slots, after, frozenset("bc"), by_source=False)
    assert not is_settled(slots, after, frozenset("abc"), by_source=True)


def test_the_previous_table_is_dropped_when_only_one_node_is_left() -> None:
    slots = transition(Slots(), table((("a", 1), ("b", 1))), frozenset("ab"))
    slots = transition(slots, table((("a", 1),)), frozenset("ab"))
    assert slots.previous
    assert not transition(slots, table((("a", 1),)), frozenset("a")).previous


def test_without_nodes_the_tables_are_empty() -> None:
    slots = transition(Slots(), table((("a", 1), ("b", 1))), frozenset("ab"))
    assert transition(slots, Table((), b""), frozenset()) == Slots()
