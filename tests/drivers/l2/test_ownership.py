"""Who owns an address: the decision, and after any history of events exactly one owner."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.drivers.l2.network import LINK, STALE_S, Network

from fairlead.drivers.l2.engine import OVERLAP_S, Engine
from fairlead.drivers.l2.entry import Announce, SetState, Want
from fairlead.drivers.l2.ownership import Standing, decide, outranks, weight
from fairlead.drivers.l2.records import Place

NAMES = ["gw-1", "gw-2", "gw-3", "gw-4"]
PLACES = [Place(LINK, f"192.0.2.{number}") for number in range(200, 206)]
READY: dict[str, Standing] = dict.fromkeys(NAMES, "ready")
SETTLED_S = 3.0
"""Longer than discovery, probes, and the skews of all ranks together."""


def network(count: int = 3, places: list[Place] = PLACES) -> Network:
    made = Network(NAMES[:count])
    for host in made.hosts.values():
        host.start(made.now_s)
        host.want(dict.fromkeys(places, Want()), [], made.now_s)
    made.run(SETTLED_S)
    made.moves.clear()
    return made


def one_owner(made: Network, place: Place) -> str:
    (owner,) = made.owners(place)
    return owner


# The decision


def test_the_holder_stays_while_it_is_ready_whatever_its_rank() -> None:
    for name in NAMES:
        assert decide("192.0.2.1", "gw-1", name, READY, None) == (name, None)


@pytest.mark.parametrize("standing", ["starting", "leaving", "stale", None])
def test_a_holder_that_is_not_ready_is_replaced(standing: Standing | None) -> None:
    standings = dict(READY)
    del standings["gw-2"]
    if standing is not None:
        standings["gw-2"] = standing
    found = {name: decide("192.0.2.1", name, "gw-2", standings, None) for name in NAMES}
    owner = found["gw-1"].owner
    assert owner != "gw-2"
    assert {each.owner for each in found.values()} == {owner}, "all hosts decide alike"
    ranks = [each.rank for name, each in found.items() if name != "gw-2"]
    assert sorted(rank for rank in ranks if rank is not None) == [0, 1, 2]
    assert found["gw-2"].rank is None


def test_only_candidates_may_own_an_address() -> None:
    decision = decide("192.0.2.1", "gw-1", "gw-1", READY, ("gw-3",))
    assert decision == ("gw-3", None)
    assert decide("192.0.2.1", "gw-1", None, READY, ()) == (None, None)


def test_owners_are_spread_and_a_loss_moves_only_the_addresses_of_the_lost_host() -> None:
    addresses = [f"192.0.{number >> 8}.{number & 255}" for number in range(1000)]
    before = {each: decide(each, "gw-1", None, READY, None).owner for each in addresses}
    counts = Counter(before.values())
    assert min(counts.values()) > 200
    left = {name: READY[name] for name in NAMES if name != "gw-2"}
    after = {each: decide(each, "gw-1", None, left, None).owner for each in addresses}
    assert {each for each in addresses if before[each] != after[each]} == {
        each for each in addresses if before[each] == "gw-2"
    }


@given(st.text(min_size=1), st.text(min_size=1))
def test_of_two_holders_exactly_one_outranks_the_other(one: str, other: str) -> None:
    if one != other:
        assert outranks("192.0.2.1", one, other) != outranks("192.0.2.1", other, one)
    assert weight("192.0.2.1", one) == weight("192.0.2.1", one)


# Histories


def test_hosts_that_start_together_share_the_addresses() -> None:
    made = network()
    assert {one_owner(made, place) for place in PLACES} == set(NAMES[:3])


def test_a_dead_host_is_replaced_and_nothing_else_moves() -> None:
    made = network()
    before = {place: one_owner(made, place) for place in PLACES}
    dead = before[PLACES[0]]
    made.hosts[dead].alive = False
    made.run(SETTLED_S)
    for place in PLACES:
        assert one_owner(made, place) != dead
        assert before[place] == dead or one_owner(made, place) == before[place]
    assert {cause for _, _, cause in made.moves} == {f"{dead} does not answer"}
    after = {place: one_owner(made, place) for place in PLACES}
    made.hosts[dead].kernel.clear()
    made.hosts[dead].state = "starting"
    made.hosts[dead].alive = True
    made.hosts[dead].start(made.now_s)
    made.hosts[dead].want(dict.fromkeys(PLACES, Want()), [], made.now_s)
    made.run(SETTLED_S)
    assert {place: one_owner(made, place) for place in PLACES} == after, "nothing moves back"


def test_a_dead_process_moves_nothing_until_it_is_stale() -> None:
    made = network()
    owner = one_owner(made, PLACES[0])
    made.hosts[owner].engine = None
    made.run(STALE_S - 5)
    assert made.moves == []
    made.run(10 + SETTLED_S)
    assert one_owner(made, PLACES[0]) != owner
    assert {cause for _, _, cause in made.moves} == {f"the process of {owner} is away"}


def test_a_restarted_process_keeps_what_its_kernel_owns() -> None:
    made = network()
    owner = one_owner(made, PLACES[0])
    made.hosts[owner].engine = None
    made.run(2)
    made.hosts[owner].start(made.now_s)
    made.hosts[owner].want(dict.fromkeys(PLACES, Want()), [], made.now_s)
    made.run(SETTLED_S)
    assert made.moves == []
    assert one_owner(made, PLACES[0]) == owner


def test_a_leaving_host_answers_until_another_one_has_announced_the_address() -> None:
    made = network()
    place = PLACES[0]
    owner = one_owner(made, place)
    made.hosts[owner].leave(made.now_s, leaving=True)
    while made.owners(place) == [owner]:
        made.run(0.01)
    assert owner in made.owners(place)
    made.run(OVERLAP_S / 2)
    assert owner in made.owners(place), "both answer for a moment"
    made.run(SETTLED_S)
    assert one_owner(made, place) != owner
    assert {cause for _, _, cause in made.moves} == {f"{owner} is leaving"}
    moved = len(made.moves)
    made.hosts[owner].leave(made.now_s, leaving=False)
    made.run(SETTLED_S)
    assert len(made.moves) == moved


def test_a_host_that_is_alone_keeps_its_addresses_although_it_leaves() -> None:
    made = network(1)
    made.hosts["gw-1"].leave(made.now_s, leaving=True)
    made.run(10)
    assert one_owner(made, PLACES[0]) == "gw-1"


def test_after_a_split_each_address_has_one_owner_within_a_second() -> None:
    made = network(4)
    made.side = {"gw-1": 0, "gw-2": 0, "gw-3": 1, "gw-4": 1}
    made.run(SETTLED_S)
    assert any(len(made.owners(place)) == 2 for place in PLACES)
    made.side = dict.fromkeys(NAMES, 0)
    made.run(1)
    for place in PLACES:
        assert len(made.owners(place)) == 1


@pytest.mark.parametrize("alone", NAMES)
def test_a_host_that_was_cut_off_yields_to_the_others(alone: str) -> None:
    """Its data plane counts the nodes of the others as dead, whatever its rank is."""
    made = network(4)
    before = {place: one_owner(made, place) for place in PLACES}
    made.side[alone] = 1
    made.run(SETTLED_S)
    assert all(alone in made.owners(place) and len(made.owners(place)) == 2 for place in PLACES)
    made.side[alone] = 0
    made.announced.clear()
    made.run(1)
    assert alone not in {name for name, _ in made.announced}
    after = {place: one_owner(made, place) for place in PLACES}
    assert alone not in after.values()
    kept = {place: owner for place, owner in before.items() if owner != alone}
    assert kept == {place: after[place] for place in kept}
    made.run(SETTLED_S)
    assert after == {place: one_owner(made, place) for place in PLACES}


def test_hosts_that_were_all_cut_off_agree_on_one_owner() -> None:
    made = network(4)
    made.side = {name: number for number, name in enumerate(NAMES)}
    made.run(SETTLED_S)
    assert all(len(made.owners(place)) == 4 for place in PLACES)
    made.side = dict.fromkeys(NAMES, 0)
    made.run(1)
    assert all(len(made.owners(place)) == 1 for place in PLACES)


def test_of_two_hosts_the_survivor_keeps_what_it_took_over() -> None:
    """It cannot know whether it was cut off or the other host died."""
    made = network(2)
    made.hosts["gw-2"].alive = False
    made.run(SETTLED_S)
    assert {one_owner(made, place) for place in PLACES} == {"gw-1"}
    host = made.hosts["gw-2"]
    host.alive, host.kernel, host.state = True, {}, "starting"
    host.start(made.now_s)
    host.want(dict.fromkeys(PLACES, Want()), [], made.now_s)
    made.run(SETTLED_S)
    assert {one_owner(made, place) for place in PLACES} == {"gw-1"}


def test_a_member_that_is_alive_but_does_not_act_is_passed_over() -> None:
    """The process of the first in rank is dead when the owner dies."""
    made = network(3)
    place = PLACES[0]
    owner = one_owner(made, place)
    others = [name for name in NAMES[:3] if name != owner]
    first = max(others, key=lambda name: weight(place.address, name))
    made.hosts[first].engine = None
    made.hosts[owner].alive = False
    made.run(SETTLED_S)
    assert one_owner(made, place) not in (owner, first)


def test_an_address_that_a_stranger_has_is_not_announced_until_it_is_free() -> None:
    made = Network(NAMES[:2])
    place = PLACES[0]
    made.strangers[place] = b"\2\0\0\0\1\1"
    for host in made.hosts.values():
        host.start(made.now_s)
        host.want({place: Want()}, [], made.now_s)
    made.run(30)
    assert made.owners(place) == []
    del made.strangers[place]
    made.run(30)
    one_owner(made, place)


def test_without_candidates_no_host_answers() -> None:
    made = network()
    for host in made.hosts.values():
        host.want({PLACES[0]: Want(candidates=())}, [], made.now_s)
        made.carry_out(host)
    made.run(SETTLED_S)
    assert made.owners(PLACES[0]) == []


def test_candidates_take_over_from_a_host_that_is_none_any_more() -> None:
    made = network()
    owner = one_owner(made, PLACES[0])
    (other, *_) = (name for name in NAMES[:3] if name != owner)
    for host in made.hosts.values():
        host.want({PLACES[0]: Want(candidates=(other,))}, [], made.now_s)
        made.carry_out(host)
        assert made.owners(PLACES[0])
    made.run(SETTLED_S)
    assert one_owner(made, PLACES[0]) == other


def test_thirty_flaps_of_a_link_move_an_address_once() -> None:
    made = network(2)
    place = PLACES[0]
    owner = one_owner(made, place)
    for _ in range(30):
        made.hosts[owner].alive = False
        made.hosts[owner].kernel.update(dict.fromkeys(PLACES, False))
        made.run(0.5)
        made.hosts[owner].alive = True
        made.hosts[owner].start(made.now_s)
        made.hosts[owner].want(dict.fromkeys(PLACES, Want()), [], made.now_s)
        made.run(1.0)
    assert one_owner(made, place) != owner
    assert [each[0] for each in made.moves].count(place) == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_address_that_its_owner_withdraws_is_taken_over_soon(lost: int) -> None:
    """The owner remains a member, for example because its interface has lost an address."""
    made = network()
    place = PLACES[0]
    owner = one_owner(made, place)
    made.lost_withdrawals = lost
    made.hosts[owner].want({}, [place], made.now_s)
    made.carry_out(made.hosts[owner])
    made.run(0.95)
    assert one_owner(made, place) != owner
    made.run(SETTLED_S)
    assert [(at, cause) for at, _, cause in made.moves] == [
        (place, f"{owner} may not announce it any more")
    ]


def test_a_service_that_is_deleted_on_all_hosts_moves_nothing() -> None:
    made = network()
    place = PLACES[0]
    owner = one_owner(made, place)
    for host in sorted(made.hosts.values(), key=lambda each: each.name != owner):
        host.want({}, [place], made.now_s)
        made.carry_out(host)
        made.run(0.1)
    made.run(SETTLED_S)
    assert made.moves == []
    assert made.owners(place) == []


def test_a_withdrawal_that_its_owner_did_not_send_moves_nothing() -> None:
    made = network()
    place = PLACES[0]
    owner = one_owner(made, place)
    for host in made.hosts.values():
        assert host.engine is not None
        host.engine.withdrawn(place, owner, made.now_s)
    made.run(SETTLED_S)
    assert made.moves == []
    assert one_owner(made, place) == owner


def test_members_that_held_no_address_leave_nothing_behind() -> None:
    """Any station of the link can invent names."""
    engine = Engine("gw-1")
    engine.add_link(LINK, 0.0)
    engine.want({PLACES[0]: Want()}, [], 0.0)
    for number in range(1000):
        engine.members(LINK, {f"node-{number}": "ready"}, float(number))
    assert engine._links[LINK].former == {}


class AnyHistory(RuleBasedStateMachine):
    """Hosts and processes die and return, hosts leave and stay, the network splits and heals. When
    it is whole again, each address has exactly one owner; and while all stay, nothing moves."""

    @initialize()
    def start(self) -> None:
        self.network = network(3, PLACES[:3])

    def _host(self, number: int) -> str:
        return NAMES[number]

    @rule(number=st.integers(0, 2))
    def host_dies(self, number: int) -> None:
        host = self.network.hosts[self._host(number)]
        host.alive, host.engine = False, None
        host.kernel.clear()
        host.state = "starting"
        self.network.run(0.3)

    @rule(number=st.integers(0, 2))
    def process_dies(self, number: int) -> None:
        self.network.hosts[self._host(number)].engine = None
        self.network.run(0.1)

    @rule(number=st.integers(0, 2))
    def starts(self, number: int) -> None:
        host = self.network.hosts[self._host(number)]
        host.alive = True
        if host.engine is None:
            host.start(self.network.now_s)
            if host.state == "leaving":
                host.state = "ready"
            host.want(dict.fromkeys(PLACES[:3], Want()), [], self.network.now_s)
        self.network.run(0.2)

    @rule(number=st.integers(0, 2), leaving=st.booleans())
    def leaves_or_stays(self, number: int, leaving: bool) -> None:
        host = self.network.hosts[self._host(number)]
        if host.engine is not None:
            host.leave(self.network.now_s, leaving)
        self.network.run(0.2)

    @rule(sides=st.tuples(*[st.integers(0, 1)] * 3))
    def splits(self, sides: tuple[int, int, int]) -> None:
        self.network.side = dict(zip(NAMES[:3], sides, strict=True))
        self.network.run(0.4)

    @rule(duration_s=st.sampled_from([0.05, 0.3, 1.0, 3.0]))
    def time_passes(self, duration_s: float) -> None:
        self.network.run(duration_s)

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        made = self.network
        made.side = dict.fromkeys(NAMES[:3], 0)
        for number in range(3):
            self.starts(number)
            host = made.hosts[self._host(number)]
            if host.state == "leaving":
                host.leave(made.now_s, leaving=False)
        made.run(2 * SETTLED_S)
        for place in PLACES[:3]:
            assert len(made.owners(place)) == 1, f"{place}: {made.owners(place)}"
        made.moves.clear()
        made.run(5)
        assert made.moves == [], "without a lost holder nothing moves"


AnyHistory.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyHistory = AnyHistory.TestCase


def test_an_owner_that_defends_its_address_answers_for_it() -> None:
    """The kernel yields after the deadline, and its report of that may be lost."""
    engine = Engine("gw-1")
    engine.add_link(LINK, 0.0)
    engine.set_ready(0.0, ready=True, leaving=False)
    engine.want({PLACES[0]: Want()}, [], 0.0, owned=[PLACES[0]])
    engine.effects.clear()
    engine.claim(PLACES[0], "gw-2", b"\2\0\0\0\0\2", "announced", 1.0)
    assert engine.effects == [SetState(PLACES[0], True), Announce(PLACES[0])]
