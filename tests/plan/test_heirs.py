"""The heirs of announced addresses: who takes over, who gives back, and that gateways whose
observations differ end with one owner of each address."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.kube.presence import OnLink
from fairlead.model import Announcement
from fairlead.plan.announce import SilentLinks, announcers_of, owner_of
from fairlead.plan.gateways import Gateways
from fairlead.plan.heirs import (
    GIVE_BACK_S,
    MAX_ASKED,
    RETURN_S,
    Heirs,
    Step,
    Watched,
    step_after_claim,
    watched_by,
)

NAMES = ("gw1", "gw2", "gw3")
ADDRESSES = [f"192.0.2.{number}" for number in range(1, 40)]
ADDRESSES_V6 = [f"2001:db8:1::{number:x}" for number in range(1, 40)]
ADDRESS = ADDRESSES[0]
SHARED = ADDRESSES[:9]
"""The addresses of a segment: each order of the gateways is among them."""


def link_of(name: str) -> OnLink:
    return OnLink("eth0", "192.0.2.0/24", f"02:00:00:00:00:{name[-1:]:0>2}")


def link6_of(name: str) -> OnLink:
    return OnLink("eth0", "2001:db8:1::/64", link_of(name).mac)


LINKS = {name: (link_of(name), link6_of(name)) for name in NAMES}


def gateways(*names: str) -> Gateways:
    return Gateways(frozenset(names), announcers={name: LINKS[name] for name in names})


@cache
def planned_with(silent: SilentLinks) -> Sequence[Announcement]:
    """Return who announces the addresses of a segment, as seen by a gateway that observes this."""
    found = (owner_of(each, announcers_of(gateways(*NAMES), {}, silent)) for each in SHARED)
    return [each for each in found if each is not None]


def announcement(
    address: str, *names: str, silent: Collection[str] = (), settling: Collection[str] = ()
) -> Announcement:
    found = gateways(*(names or NAMES))
    links = {
        name: tuple(
            OnLink("eth0", each.network, each.mac, settles=name in settling) for each in LINKS[name]
        )
        for name in found.announcers
    }
    lost = frozenset((name, "eth0") for name in silent)
    owner = owner_of(address, announcers_of(Gateways(found.alive, announcers=links), {}, lost))
    assert owner is not None
    return owner


def watched(
    own: str, *planned: Announcement, left: Mapping[str, Announcement] | None = None
) -> Mapping[Watched, tuple[str, ...]]:
    return watched_by(own, planned, LINKS, left or {})


def watch_of(name: str, *, left: bool = False) -> Watched:
    return Watched("eth0", link_of(name).mac, name, "eth0", left)


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_heir_is_the_next_owner(address: str) -> None:
    first = announcement(address)
    second = announcement(address, *(name for name in NAMES if name != first.owner))
    assert (first.heir, first.lost) == (second.owner, "")
    (third,) = {*NAMES} - {first.owner, first.heir}
    taken = announcement(address, silent={first.owner})
    assert (taken.owner, taken.heir, taken.lost) == (first.heir, third, first.owner)
    both = announcement(address, silent={first.owner, first.heir})
    assert (both.owner, both.heir, both.lost) == (third, "", first.owner), "both are lost"
    every = announcement(address, silent=NAMES)
    assert (every.owner, every.lost) == (first.owner, ""), "there is no other"
    leaving = announcement(address, settling={first.owner})
    assert (leaving.owner, leaving.heir, leaving.lost) == (first.heir, third, "")
    last = announcement(address, settling=NAMES, silent={first.owner})
    assert last.owner == first.heir, "of links that settle, one that answers"
    assert announcement(address, first.owner).heir == ""


def test_each_order_of_the_gateways_is_tested() -> None:
    assert len({(each.owner, each.heir) for each in planned_with(frozenset())}) == 6


def test_only_the_heir_watches_an_owner() -> None:
    planned = announcement(ADDRESS)
    (third,) = {*NAMES} - {planned.owner, planned.heir}
    assert watched(planned.heir, planned) == {watch_of(planned.owner): (ADDRESS,)}
    assert watched(planned.owner, planned) == watched(third, planned) == {}


def test_it_goes_on_watching_the_owner_that_it_has_replaced() -> None:
    planned = announcement(ADDRESS, silent={announcement(ADDRESS).owner})
    assert watched(planned.owner, planned) == {watch_of(planned.lost): (ADDRESS,)}


def test_it_watches_a_silent_owner_also_when_a_new_gateway_ranks_before_it() -> None:
    """The new gateway cannot know that the owner is lost, because it has never had an answer."""
    planned = announcement(ADDRESS, silent={announcement(ADDRESS).owner})
    assert watched(planned.heir, planned) == {
        watch_of(planned.owner): (ADDRESS,),
        watch_of(planned.lost): (ADDRESS,),
    }


def test_a_gateway_watches_the_one_to_which_it_has_left_addresses() -> None:
    planned = announcement(ADDRESS)
    left = {ADDRESS: Announcement(ADDRESS, planned.heir, "eth0")}
    assert watched(planned.owner, planned, left=left) == {
        watch_of(planned.heir, left=True): (ADDRESS,)
    }


def test_few_addresses_stand_for_all_of_a_gateway() -> None:
    planned = [announcement(each) for each in ADDRESSES]
    asked = watched("gw1", *planned)
    assert {each.gateway for each in asked} == {"gw2", "gw3"}
    assert {len(each) for each in asked.values()} == {MAX_ASKED}
    owners = {each.address: each.owner for each in planned}
    assert all(owners[each] == key.gateway for key, found in asked.items() for each in found)


def test_an_owner_of_ipv6_addresses_alone_is_watched_too() -> None:
    six = [announcement(each) for each in ADDRESSES_V6 if announcement(each).owner == "gw2"]
    mine = [each for each in six if each.heir == "gw1"]
    asked = tuple(each.address for each in mine[:MAX_ASKED])
    assert watched("gw1", *six) == {watch_of("gw2"): asked}
    four = next(
        each for each in map(announcement, ADDRESSES) if (each.owner, each.heir) == ("gw2", "gw1")
    )
    assert watched("gw1", four, mine[0]) == {watch_of("gw2"): (four.address, mine[0].address)}


def test_a_gateway_without_a_mac_address_or_a_link_is_not_watched() -> None:
    planned = announcement(ADDRESS)
    old = {**LINKS, planned.owner: (OnLink("eth0", "192.0.2.0/24"),)}
    assert watched_by(planned.heir, [planned], old, {}) == {}
    gone = {name: LINKS[name] for name in NAMES if name != planned.owner}
    assert watched_by(planned.heir, [planned], gone, {}) == {}


MINE = Announcement(ADDRESS, "gw1", "eth0", "gw2")
TAKEN = Announcement(ADDRESS, "gw1", "eth0", "gw3", lost="gw2")
OTHERS = Announcement(ADDRESS, "gw2", "eth0", "gw1")
BETWEEN = Announcement(ADDRESS, "gw3", "eth0", "gw1", lost="gw2")


@pytest.mark.parametrize(
    ("planned", "claimant", "failed_s_ago", "step"),
    [
        (MINE, "gw2", float("inf"), "leave"),
        (MINE, "gw3", float("inf"), "leave"),
        (MINE, "gw2", 0.0, "leave"),
        (MINE, "gw1", float("inf"), "ignore"),
        (MINE, "", float("inf"), "ignore"),
        (OTHERS, "gw2", float("inf"), "ignore"),
        (OTHERS, "gw3", float("inf"), "ignore"),
        (None, "gw2", float("inf"), "ignore"),
        (TAKEN, "gw2", 0.0, "insist"),
        (TAKEN, "gw2", GIVE_BACK_S - 1, "insist"),
        (TAKEN, "gw2", GIVE_BACK_S, "give back"),
        (TAKEN, "gw2", RETURN_S, "give back"),
        (TAKEN, "gw3", 0.0, "leave"),
        (BETWEEN, "gw2", GIVE_BACK_S - 1, "ignore"),
        (BETWEEN, "gw2", GIVE_BACK_S, "give back"),
        (BETWEEN, "gw3", GIVE_BACK_S, "ignore"),
    ],
)
def test_what_follows_when_another_gateway_announces_an_address(
    planned: Announcement | None, claimant: str, failed_s_ago: float, step: Step
) -> None:
    assert step_after_claim(planned, "gw1", claimant, failed_s_ago) == step


def test_a_gateway_is_lost_until_it_demands_its_addresses() -> None:
    heirs, other = Heirs("gw1"), watch_of("gw2")
    assert heirs.missed(other, 0.0)
    assert not heirs.missed(other, 1.0), "it is lost already"
    assert heirs.silent == {("gw2", "eth0")}
    heirs.answered(other, 10.0, alone=False)
    assert heirs.claimed(TAKEN, ADDRESS, "gw2", 10.0 + GIVE_BACK_S - 1) == "insist"
    assert heirs.silent
    assert heirs.claimed(TAKEN, ADDRESS, "gw2", 10.0 + GIVE_BACK_S) == "give back"
    assert not heirs.silent


def test_a_lease_with_another_text_than_a_mac_address_is_not_watched() -> None:
    planned = announcement(ADDRESS)
    for mac in ("x", "02:00:00:00:00:0g", "02:00:00:00:00:01:02", ""):
        wrong = {**LINKS, planned.owner: (OnLink("eth0", "192.0.2.0/24", mac),)}
        assert watched_by(planned.heir, [planned], wrong, {}) == {}


def test_a_gateway_that_was_cut_off_itself_takes_nothing() -> None:
    heirs = Heirs("gw1")
    heirs.missed(watch_of("gw2"), 0.0)
    heirs.missed(watch_of("gw3"), 0.0)
    heirs.answered(watch_of("gw2"), 10.0, alone=True)
    assert heirs.silent == {("gw3", "eth0")}
    heirs.forget((), ())
    assert not heirs.silent, "it is not watched any more"


def test_addresses_that_were_left_are_demanded_together() -> None:
    heirs = Heirs("gw1")
    second = Announcement(ADDRESSES[1], "gw1", "eth0", "gw2")
    assert heirs.claimed(MINE, ADDRESS, "gw2", 0.0) == "leave"
    assert heirs.claimed(second, second.address, "gw2", 5.0) == "leave"
    assert heirs.left == {
        each.address: Announcement(each.address, "gw2", "eth0") for each in (MINE, second)
    }
    assert not heirs.end(RETURN_S)
    assert heirs.end(5.0 + RETURN_S)
    assert heirs.left == {}


def test_addresses_that_were_left_come_back_if_nobody_answers() -> None:
    heirs = Heirs("gw1")
    heirs.claimed(MINE, ADDRESS, "gw2", 0.0)
    assert not heirs.missed(watch_of("gw3", left=True), 0.2)
    assert heirs.left
    assert not heirs.missed(watch_of("gw2", left=True), 0.2)
    assert (heirs.left, heirs.silent) == ({}, frozenset())
    heirs.claimed(MINE, ADDRESS, "gw2", 1.0)
    heirs.forget((), ())
    assert heirs.left == {}, "it is another gateway's by the plan"


class Segment:
    """Gateways on a segment, without processes and packets: in each turn they ask those that they
    watch, and hear what others announce, unless a cut separates them."""

    def __init__(self, names: Collection[str]) -> None:
        self.heirs = {name: Heirs(name) for name in names}
        self.cuts: set[frozenset[str]] = set()
        self.dead: set[str] = set()
        self.now_s = 0.0
        self.known: set[tuple[str, Watched]] = set()
        """Who has answered whom since it is watched."""
        self.owned: dict[str, set[str]] = {name: set() for name in names}

    @property
    def alive(self) -> list[str]:
        return [name for name in self.heirs if name not in self.dead]

    def connected(self, one: str, other: str) -> bool:
        return not {one, other} & self.dead and frozenset((one, other)) not in self.cuts

    def planned(self, name: str) -> Sequence[Announcement]:
        return planned_with(self.heirs[name].silent)

    def owned_by(self, name: str) -> set[str]:
        left = self.heirs[name].left
        return {each.address for each in self.planned(name) if each.owner == name} - left.keys()

    def turn(self, times: int) -> None:
        for _ in range(times):
            self.now_s += 0.2
            for name in self.alive:
                self.heirs[name].end(self.now_s)
                for claimed in self._announce(name, self.owned_by(name) - self.owned[name]):
                    self._announce(*claimed)
            for name in self.alive:
                self._ask(name)

    def _ask(self, name: str) -> None:
        heirs = self.heirs[name]
        asked = watched_by(name, self.planned(name), LINKS, heirs.left)
        heirs.forget(asked, {each.address for each in self.planned(name) if each.owner == name})
        self.known = {(each, key) for each, key in self.known if each != name or key in asked}
        self.known |= {(name, key) for key in asked if key.left}
        for key, addresses in asked.items():
            reached = self.connected(name, key.gateway)
            if not reached or not set(addresses) & self.owned_by(key.gateway):
                if (name, key) in self.known:
                    heirs.missed(key, self.now_s)
                continue
            self.known.add((name, key))
            if not key.left and (key.gateway, key.link) in heirs.silent:
                heirs.answered(key, self.now_s, alone=False)
                for claimed in self._announce(name, self.owned_by(name)):
                    self._announce(*claimed)

    def _announce(self, name: str, addresses: Collection[str]) -> Iterator[tuple[str, set[str]]]:
        """Let the others hear it, and yield what they announce then."""
        self.owned[name] = self.owned_by(name)
        for other in self.alive:
            if other == name or not self.connected(name, other):
                continue
            planned = {each.address: each for each in self.planned(other)}
            again = {
                each
                for each in addresses
                if self.heirs[other].claimed(planned[each], each, name, self.now_s) == "insist"
            }
            self.owned[other] &= self.owned_by(other)
            if again:
                yield other, again

    def owners(self) -> dict[str, list[str]]:
        return {
            each: [name for name in self.alive if each in self.owned_by(name)] for each in SHARED
        }


PAIRS = [frozenset(pair) for pair in (("gw1", "gw2"), ("gw1", "gw3"), ("gw2", "gw3"))]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(PAIRS)), st.sets(st.sampled_from(NAMES), max_size=2)),
        max_size=4,
    )
)
def test_after_any_cuts_and_failures_each_address_has_one_owner(
    histories: list[tuple[set[frozenset[str]], set[str]]],
) -> None:
    segment = Segment(NAMES)
    for cuts, dead in histories:
        segment.cuts, segment.dead = cuts, dead
        segment.turn(5)
    segment.cuts, segment.dead = set(), set()
    segment.turn(5)
    assert {len(each) for each in segment.owners().values()} == {1}, "a second after the end"
    for _ in range(3):
        segment.now_s += RETURN_S
        segment.turn(5)
    assert segment.owners() == {each: [announcement(each).owner] for each in SHARED}
