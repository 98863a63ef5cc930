"""Tables of the pure parts: specs and their differences, the interfaces of an address, when it is
announced, and who is alive."""

from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest

from fairlead.announce_sections import L2Config
from fairlead.drivers.l2 import L2Driver
from fairlead.drivers.l2.host_links import default_names
from fairlead.drivers.l2.liveness import (
    FORGET_S,
    GONE_EVERY,
    MAX_MEMBERS,
    MAX_REQUESTS_PER_S,
    Liveness,
)
from fairlead.drivers.l2.messages import Interface, Settings
from fairlead.drivers.l2.placing import HostLinks, Placement, place
from fairlead.drivers.l2.records import Hello, Place
from fairlead.drivers.l2.schedule import DELAYS_S, PER_S, REPEAT_S, Schedule
from fairlead.drivers.l2.spec import (
    Actual,
    Change,
    Requested,
    by_address,
    carried_out,
    combined,
    diff,
    render,
    withdrawals,
)
from fairlead.errors import Unavailable
from fairlead.model import Announcement, LoadBalancer, ServiceKey
from fairlead.net.selection import Present, Selection

WEB, API = ServiceKey("default", "web"), ServiceKey("default", "api")
ONE, TWO = "192.0.2.200", "2001:db8::200"


def balancer(*announcements: Announcement) -> LoadBalancer:
    return LoadBalancer(WEB, "uid", "class", (), (), announcements=announcements)


def test_an_address_that_a_service_loses_is_withdrawn_first() -> None:
    both, one = (balancer(Announcement(some, "l2")) for some in ((ONE, TWO), (ONE,)))
    actual = {WEB: Actual(render({WEB: both})[WEB])}
    assert withdrawals({WEB: both}, actual) == []
    assert withdrawals({WEB: one, API: both}, actual) == [Change(WEB, "withdraw", Requested(TWO))]


def test_an_address_that_another_method_announces_is_not_withdrawn_first() -> None:
    actual = {WEB: Actual(render({WEB: balancer(Announcement((ONE,), "l2"))})[WEB])}
    assert withdrawals({WEB: balancer(Announcement((ONE,), "bgp"))}, actual) == []


def test_an_address_is_kept_until_another_method_announces_it() -> None:
    before = render({WEB: balancer(Announcement((ONE, TWO), "l2"))})[WEB]
    other = balancer(Announcement((ONE,), "bgp"), Announcement((TWO,), "l2"))
    desired = render({WEB: other})
    (kept,) = changes = diff(desired, {WEB: Actual(before)})
    assert kept == Change(WEB, "keep", Requested(ONE))
    assert str(kept) == f"l2: keep {ONE} for default/web"
    assert carried_out({WEB: before}, changes) == {WEB: before}
    moved = {WEB: Actual(before, moved=frozenset({ONE}))}
    assert diff(desired, moved) == [Change(WEB, "withdraw", Requested(ONE))]
    # It moves back meanwhile, or the host leaves, or it is not announced any more.
    back = render({WEB: balancer(Announcement((ONE, TWO), "l2"))})
    assert diff(back, {WEB: Actual(before)}) == []
    leaving = render({WEB: balancer(Announcement((ONE, TWO), "bgp", leaving=True))})
    withdrawn = [Change(WEB, "withdraw", Requested(each)) for each in (ONE, TWO)]
    assert diff(leaving, {WEB: Actual(before)}) == withdrawn
    assert diff(render({WEB: balancer()}), {WEB: Actual(before)}) == withdrawn
    # An address that was not announced on layer 2 needs nothing.
    assert diff(desired, {WEB: Actual((Requested(TWO),))}) == []


def test_only_announcements_of_layer_2_are_announced() -> None:
    intents = {
        WEB: balancer(
            Announcement((TWO, ONE), "l2", candidates=("a",), interfaces=("eth1",)),
            Announcement(("192.0.2.9",), "bgp"),
        ),
        API: balancer(Announcement(("192.0.2.8",), "bgp")),
    }
    assert diff(render(intents), {}) == [
        Change(WEB, "announce", Requested(ONE, ("a",), False, ("eth1",))),
        Change(WEB, "announce", Requested(TWO, ("a",), False, ("eth1",))),
    ]


def test_applying_the_changes_gives_the_desired_specs() -> None:
    old = {WEB: (Requested(ONE), Requested("192.0.2.201")), API: (Requested(ONE),)}
    new = {WEB: (Requested(ONE, leaving=True), Requested(TWO))}
    changes = diff(new, {key: Actual(spec) for key, spec in old.items()})
    assert [str(each) for each in changes] == [
        f"l2: announce {ONE} for default/web",
        f"l2: announce {TWO} for default/web",
        f"l2: withdraw {ONE} for default/api",
        "l2: withdraw 192.0.2.201 for default/web",
    ]
    assert carried_out(old, changes) == new
    assert diff(new, {WEB: Actual(new[WEB])}) == []


def test_a_service_about_which_there_is_news_gets_a_change() -> None:
    spec = (Requested(ONE),)
    assert diff({WEB: spec}, {WEB: Actual(spec, unsettled=True)}) == [Change(WEB, "report")]


def test_an_address_of_several_services_may_be_owned_only_by_hosts_of_each() -> None:
    requests = [
        Requested(ONE, ("a", "b")),
        Requested(ONE, ("b", "c"), leaving=True),
        Requested(ONE, None, interfaces=("eth1",)),
    ]
    assert combined(requests) == Requested(ONE, ("b",), True, ("eth1",))
    assert by_address({WEB: (requests[0],), API: (requests[1],)}) == {
        ONE: {WEB: requests[0], API: requests[1]}
    }


# Interfaces

LINKS = HostLinks(
    (Present("lo"), Present("eth0"), Present("eth1"), Present("bond0"), Present("tun0")),
    {
        "eth0": (ip_interface("192.0.2.11/24"), ip_interface("2001:db8::11/64")),
        "eth1": (ip_interface("198.51.100.11/24"), ip_interface("203.0.113.1/32")),
        "bond0": (ip_interface("10.0.0.1/8"),),
        "tun0": (ip_interface("172.16.0.1/12"),),
    },
    {"eth0": 2, "eth1": 3, "bond0": 4},
    ("bond0",),
)


@pytest.mark.parametrize(
    ("address", "selectors", "expected"),
    [
        (ONE, (), ("eth0",)),
        (TWO, (), ("eth0",)),
        ("198.51.100.7", (), ("eth1",)),
        ("198.51.100.7", ("eth*",), ("eth0", "eth1")),
        ("203.0.113.1", ("eth1",), ("eth1",)),
    ],
)
def test_an_address_is_placed_where_its_network_is_or_where_its_pool_says(
    address: str, selectors: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert place(address, selectors, ("eth0", "eth1"), LINKS) == (expected, None)


@pytest.mark.parametrize(
    ("address", "selectors", "default", "parts"),
    [
        ("203.0.113.1", (), ("eth0", "eth1"), ("203.0.113.1", "eth0 (192.0.2.0/24", "eth1")),
        (ONE, ("eth9",), ("eth0",), (ONE, "eth9", "correct the interfaces of the pool")),
        ("172.16.0.9", ("tun0",), ("eth0",), ("tun0", "MAC address")),
        ("10.0.0.9", (), ("bond0",), ("bond0", "balance-alb", "another mode")),
        (ONE, (), (), (ONE, "none")),
    ],
)
def test_an_address_without_an_interface_is_refused_in_words(
    address: str, selectors: Any, default: Any, parts: tuple[str, ...]
) -> None:
    names, problem = place(address, selectors, default, LINKS)
    assert names == ()
    assert problem is not None
    assert problem.code == "NotOnInterface"
    for part in parts:
        assert part in str(problem)


@pytest.mark.parametrize("selector", ["default-route", "10.9.0.0/16"])
def test_a_selector_that_chooses_nothing_for_a_moment_keeps_its_interfaces(selector: str) -> None:
    former = Selection({selector: ("eth0", "eth7")}, ())
    links = LINKS._replace(former=former)
    assert place(ONE, (selector,), (), links) == (("eth0",), None)
    assert default_names((selector,), tuple, links) == ("eth0",)
    assert place(ONE, (selector,), (), LINKS).interfaces == ()


async def test_a_withdrawal_that_fails_is_repeated() -> None:
    driver = L2Driver(
        "gateway", "gw-1", L2Config(), ("true",), cluster=str, pin_path=Path("/nonexistent")
    )
    driver._request({WEB: (Requested(ONE),)})
    with pytest.raises(Unavailable):  # the announcing process ends at once
        await driver._helper.run(Settings("gw-1", b"", "", 0.05, 3, 60.0, True))
    (withdrawal,) = changes = diff({}, await driver.read({WEB}))
    assert withdrawal == Change(WEB, "withdraw", Requested(ONE))
    with pytest.raises(Unavailable):
        await driver.apply(changes)
    assert diff({}, await driver.read({WEB})) == changes


# The schedule


def test_an_address_is_announced_at_once_then_rarer_and_at_last_each_minute() -> None:
    schedule, at, times = Schedule(), Place(2, ONE), []
    schedule.start(at, 100.0)
    for _ in range(len(DELAYS_S) + 2):
        now_s = schedule.next_s()
        assert now_s is not None
        assert schedule.due(now_s) == [at]
        times.append(round(now_s - 100, 2))
    assert times == [0, 0.05, 0.2, 1.1, 2.2, 5.0, 5.0 + REPEAT_S, 5.0 + 2 * REPEAT_S]
    schedule.stop(at)
    assert schedule.next_s() is None


def test_all_addresses_are_announced_at_once_and_repetitions_are_paced() -> None:
    schedule = Schedule()
    places = [Place(2, f"10.0.{number >> 8}.{number & 255}") for number in range(1000)]
    for each in places:
        schedule.start(each, 0.0)
    assert len(schedule.due(0.0)) == 1000
    seconds = 0.0
    sent = 0
    while sent < 1000:
        seconds += 0.01
        found = len(schedule.due(seconds))
        assert found <= 0.01 * PER_S + 2
        sent += found
    assert seconds >= 0.95


# Liveness

INTERVAL_S, MULTIPLIER = 0.05, 3
MAC = b"\2\0\0\0\0\2"


def answer(liveness: Liveness, now_s: float, **fields: Any) -> bool:
    values: dict[str, Any] = {"mac": MAC, "name": "gw-2", "state": "ready", "remaining_ms": 1000}
    return liveness.heard(Hello(**(values | {"token": liveness.round} | fields)), now_s)


def alive(now_s: float = 0.0) -> Liveness:
    made = Liveness("gw-1", INTERVAL_S, MULTIPLIER, now_s)
    made.requests(now_s)
    assert answer(made, now_s)
    return made


def test_a_member_is_gone_after_as_many_unanswered_requests_as_configured() -> None:
    liveness, now_s, sent = alive(), 0.0, 0
    while liveness.standings:
        now_s = liveness.next_s()
        liveness.verdicts(now_s)
        if liveness.standings and liveness.requests(now_s) is not None:
            sent += 1
    assert sent == MULTIPLIER
    assert now_s == pytest.approx((MULTIPLIER + 0.5) * INTERVAL_S)


def test_a_process_that_was_away_declares_no_member_dead() -> None:
    liveness = alive()
    liveness.requests(INTERVAL_S)
    assert not liveness.verdicts(100.0), "it has sent only one request since the last answer"
    liveness.requests(100.0)
    assert answer(liveness, 100.0) is False
    assert liveness.standings == {"gw-2": "ready"}


def test_an_answer_that_is_older_than_the_verdict_does_not_revive_a_member() -> None:
    liveness = alive()
    now_s = 0.0
    while not liveness.verdicts(now_s):
        now_s = liveness.next_s()
        liveness.requests(now_s)
    assert not answer(liveness, now_s, token=1)
    assert liveness.standings == {}
    while liveness.requests(now_s) is None:
        now_s = liveness.next_s()
    assert answer(liveness, now_s)
    assert liveness.standings == {"gw-2": "ready"}


def test_a_member_that_is_gone_is_asked_rarely_and_discovery_asks_all() -> None:
    liveness = Liveness("gw-1", INTERVAL_S, MULTIPLIER, 0.0)
    liveness.requests(0.0)
    answer(liveness, 0.0)
    liveness.restart(0.0)
    asked, everyone = 0, 0
    for _ in range(100):
        requests = liveness.requests(liveness.next_s())
        assert requests is not None
        asked += len(requests.macs)
        everyone += requests.everyone
    assert asked == 100 // GONE_EVERY
    assert 4 <= everyone <= 15, "several at first, then one each second"


def test_many_members_are_asked_less_often() -> None:
    liveness = Liveness("gw-1", INTERVAL_S, MULTIPLIER, 0.0)
    liveness.requests(0.0)
    for number in range(200):
        mac = bytes([2, 0, 0, 0, 1, number])
        answer(liveness, 0.0, name=f"node-{number}", mac=mac)
    assert len(liveness.standings) / liveness.interval_s <= MAX_REQUESTS_PER_S


@pytest.mark.parametrize(
    ("fields", "standing"),
    [({"remaining_ms": 0}, "stale"), ({"state": "leaving"}, "leaving"), ({}, "ready")],
)
def test_the_standing_of_a_member_follows_its_answer(fields: dict[str, Any], standing: str) -> None:
    liveness = Liveness("gw-1", INTERVAL_S, MULTIPLIER, 0.0)
    liveness.requests(0.0)
    answer(liveness, 0.0, **fields)
    assert liveness.standings == {"gw-2": standing}


def test_an_own_answer_is_ignored() -> None:
    liveness = Liveness("gw-1", INTERVAL_S, MULTIPLIER, 0.0)
    liveness.requests(0.0)
    assert not answer(liveness, 0.0, name="gw-1")
    assert liveness.standings == {}


def test_members_that_are_gone_for_long_are_forgotten_and_do_not_slow_the_checks() -> None:
    """Nodes come and go, and each has a new name."""
    liveness = Liveness("gw-1", INTERVAL_S, 4, 0.0)
    liveness.requests(0.0)
    for number in range(1000):
        answer(liveness, 0.0, name=f"node-{number}", mac=b"\2\0\0\1" + number.to_bytes(2))
    liveness.restart(0.0)
    assert liveness.interval_s <= 1000 / MAX_REQUESTS_PER_S / GONE_EVERY
    now_s = 0.0
    while now_s < FORGET_S + 60.0:
        now_s = liveness.next_s() + 1.0
        liveness.requests(now_s)
    assert (liveness.members, liveness.names) == ({}, {})
    assert liveness.interval_s == INTERVAL_S


def test_invented_members_are_limited() -> None:
    liveness = Liveness("gw-1", INTERVAL_S, 4, 0.0)
    liveness.requests(0.0)
    for number in range(2 * MAX_MEMBERS):
        answer(liveness, 0.0, name=f"node-{number}", mac=b"\2\0\0\1" + number.to_bytes(2))
    assert len(liveness.members) == MAX_MEMBERS
    assert not answer(liveness, 0.0, name="one-more")


def test_an_interface_that_has_vanished_does_not_prevent_the_placement_of_others() -> None:
    """The placements of addresses follow a change of the interfaces later."""
    driver = L2Driver("gateway", "gw-1", L2Config(), (), cluster=str, pin_path=Path("/nonexistent"))
    driver._placements = {"192.0.2.1": Placement(("eth0", "eth1"))}
    links = HostLinks((), {"eth0": ()}, {"eth0": 2})
    assert driver._used(links) == (Interface(2, "eth0"),)
