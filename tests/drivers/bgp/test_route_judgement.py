"""What is concluded from probes: which routes are installed, refused or unknown. Pure."""

from collections.abc import Sequence

from fairlead.drivers.bgp.by_address import ByAddress
from fairlead.drivers.bgp.route_checks import (
    ANSWER_S,
    FIRST_S,
    INTERVAL_S,
    MISSING_S,
    NOT_INSTALLED,
    PER_S,
    RouteChecks,
    Target,
    findings_of,
    judge,
    with_checks,
    without_refused,
)
from fairlead.drivers.bgp.route_paths import Path
from fairlead.model import Finding, Outcome
from fairlead.net.route_probe import Heard, Kind
from fairlead.role_state import AnnouncedAddress, RouteCheck

A, B = Target("tor1", "203.0.113.7"), Target("tor2", "203.0.113.7")
ROUTER = "198.51.100.254"
REFUSED = RouteCheck("tor1", A.address, "refused", "t0", "no route")


def heard(kind: Kind) -> Heard:
    return Heard(kind, "198.51.100.1", A.address, b"", ROUTER, "text")


class Clock:
    """Checks of one route, whose probes get the given answers one after the other."""

    def __init__(self) -> None:
        self.checks = RouteChecks()
        self.now_s = 100.0
        self.checks.want([A], self.now_s)

    def probes(self, *answers: Sequence[Kind]) -> list[str]:
        """Return the state after each probe."""
        states = []
        for kinds in answers:
            self.now_s += self.checks.wait_s(self.now_s)
            assert self.checks.due(self.now_s) == ([A], [])
            for kind in kinds:
                self.checks.hear(A, heard(kind))
            self.now_s += ANSWER_S
            assert self.checks.due(self.now_s) == ([], [A])
            self.checks.settle([A], self.now_s, f"at {self.now_s:g}")
            (state,) = {state for _, state in self.checks.counts()}
            states.append(state)
        return states


def test_a_route_is_probed_soon_after_its_announcement_and_then_regularly() -> None:
    clock = Clock()
    assert clock.checks.wait_s(clock.now_s) == FIRST_S
    assert clock.probes(["probe"]) == ["installed"]
    assert clock.checks.wait_s(clock.now_s) == INTERVAL_S
    assert clock.checks.results == ()


def test_one_lost_packet_or_one_answer_changes_nothing() -> None:
    clock = Clock()
    installed = ["installed"] * 2
    assert clock.probes(["probe"], []) == installed
    assert clock.checks.wait_s(clock.now_s) < INTERVAL_S
    assert clock.probes([], ["announced"]) == installed
    assert clock.probes(["refused"], ["probe"]) == installed
    assert clock.probes(["refused"], []) == installed


def test_two_refusals_in_a_row_are_reported_until_the_route_is_there() -> None:
    clock = Clock()
    assert clock.probes(["refused"], ["refused"]) == ["new", "refused"]
    (result,) = clock.checks.results
    assert (result.peer, result.address, result.state) == (*A, "refused")
    assert ROUTER in result.reason
    since = result.since
    # The router limits the rate of its answers.
    assert clock.probes(["refused"], [], [], [], []) == ["refused"] * 5
    assert clock.checks.results[0].since == since
    assert clock.probes(["announced"]) == ["installed"]
    assert clock.checks.results == ()
    assert clock.probes(["refused"], [], ["refused"]) == ["installed", "installed", "refused"]


def test_three_probes_without_answer_are_unknown_and_say_why() -> None:
    clock = Clock()
    assert clock.probes([], [], []) == ["new", "new", "unknown"]
    assert "no answer" in clock.checks.results[0].reason
    assert clock.probes(["probe"], ["other"], ["other"], ["other"]) == [
        *["installed"] * 3,
        "unknown",
    ]
    assert f"come to {ROUTER}" in clock.checks.results[0].reason
    assert clock.probes(["refused"], ["refused"]) == ["unknown", "refused"]


def settled(checks: RouteChecks, now_s: float, back: Sequence[Target]) -> float:
    """Send the next probes, of which only those to `back` come back. Return the time."""
    now_s += checks.wait_s(now_s)
    send, over = checks.due(now_s)
    for each in set(send) & set(back):
        checks.hear(each, heard("probe"))
    checks.settle(over, now_s, f"at {now_s:g}")
    return now_s


def test_an_address_whose_packets_stay_away_while_others_come_back_is_reported() -> None:
    other, sixth = Target("tor1", "203.0.113.8"), Target("tor1", "2001:db8:f::7")
    checks = RouteChecks()
    checks.want([A, other, sixth], 0.0)
    now_s = 0.0
    while now_s < MISSING_S:
        now_s = settled(checks, now_s, [other])
    assert [each.state for each in checks.results] == ["unknown", "unknown"]
    while now_s < MISSING_S + FIRST_S + 2 * INTERVAL_S:
        now_s = settled(checks, now_s, [other])
    assert {each.address: each.state for each in checks.results} == {
        A.address: "missing",
        sixth.address: "unknown",  # no other address of its family is known to come back
    }
    (found,) = findings_of(checks.results, {})
    assert "tor1 probably has no route to 203.0.113.7, although" in str(found)
    noted = with_checks(Outcome("done"), checks.results, {A.address: ("tor1",)}, {})
    assert (noted.state, [each.code for each in noted.notes]) == ("done", [NOT_INSTALLED])
    first = checks.results
    for _ in range(20):
        now_s = settled(checks, now_s, [other])
    assert checks.results == first
    for _ in range(60):
        now_s = settled(checks, now_s, [A])
    assert A.address not in {each.address for each in checks.results}


def test_only_the_router_itself_can_say_that_it_has_no_route() -> None:
    path = Path("eth0", b"host", b"router", ROUTER, ("198.51.100.1",))
    said = heard("refused")
    assert path.is_from_router(said)  # from the address in the session
    elsewhere = said._replace(by="192.0.2.1")
    assert not path.is_from_router(elsewhere)
    assert path.is_from_router(elsewhere._replace(mac=b"router"))
    assert not path.is_from_router(elsewhere._replace(mac=b"router", forwarded=True))


def test_an_announcer_that_got_the_packet_outweighs_every_error() -> None:
    assert judge([heard("other"), heard("refused"), heard("announced")]) == ("installed", "")
    assert judge([heard("other"), heard("refused")])[0] == "refused"


def test_many_routes_are_probed_at_a_limited_rate() -> None:
    checks = RouteChecks()
    targets = [Target("tor1", f"2001:db8::{number:x}") for number in range(200)]
    checks.want(targets, 0.0)
    now_s, sent = 0.0, 0
    while sent < len(targets):
        now_s += checks.wait_s(now_s)
        send, over = checks.due(now_s)
        sent += len(send)
        for each in over:
            checks.hear(each, heard("probe"))
        checks.settle(over, now_s, "now")
        assert sent <= (now_s - FIRST_S) * PER_S + 3
    assert now_s >= len(targets) / PER_S


def test_routes_that_are_no_longer_announced_are_forgotten() -> None:
    clock = Clock()
    clock.probes(["refused"], ["refused"])
    clock.checks.want([B], clock.now_s)
    assert clock.checks.results == ()
    assert clock.checks.counts() == {("tor2", "new"): 1}
    clock.checks.want([], clock.now_s)
    assert clock.checks.next_s() is None


def test_a_finding_names_the_router_and_its_addresses() -> None:
    names = {"tor1": "tor1 (198.51.100.254)"}
    checks = [RouteCheck("tor1", f"203.0.113.{n}", "refused", f"t{n}", "x") for n in range(5)]
    (found,) = findings_of([*checks, RouteCheck("tor2", "", "unchecked", "", "multihop")], names)
    assert (found.code, found.subject) == (NOT_INSTALLED, "BGPPeer tor1")
    for text in ("tor1 (198.51.100.254)", "203.0.113.0", "and 2 others", "since t0", "prefix list"):
        assert text in str(found)


def test_a_service_is_unavailable_only_if_each_peer_refuses_an_address() -> None:
    note = Finding("BgpSessionDown", "down")
    done = Outcome("done", notes=(note,))
    both = {A.address: ("tor1", "tor2")}
    part = with_checks(done, [REFUSED], both, {})
    assert (part.state, [each.code for each in part.notes]) == (
        "done",
        [note.code, NOT_INSTALLED],
    )
    only = with_checks(done, [REFUSED], {A.address: ("tor1",), "2001:db8::1": ("tor1",)}, {})
    assert (only.state, only.reason, only.in_part) == ("unavailable", NOT_INSTALLED, True)
    assert A.address in only.message
    unknown = RouteCheck("tor1", A.address, "unknown", "t0", "no answer")
    assert with_checks(done, [unknown], {A.address: ("tor1",)}, {}) is done
    waiting = Outcome("waiting", "x")
    assert with_checks(waiting, [REFUSED], both, {}) is waiting


def test_a_peer_that_refuses_an_address_does_not_count_among_its_peers() -> None:
    addresses = (
        AnnouncedAddress(A.address, peers=("tor1", "tor2")),
        AnnouncedAddress("203.0.113.8", peers=("tor1",)),
    )
    found = without_refused(addresses, [REFUSED])
    assert [each.peers for each in found] == [("tor2",), ("tor1",)]
    assert without_refused(addresses, []) == addresses


def test_checks_are_found_by_address_and_a_new_tuple_replaces_the_index() -> None:
    first = tuple(RouteCheck("tor", f"203.0.113.{n}", "unknown", "", "") for n in (1, 2, 1))
    index = ByAddress[RouteCheck]()
    assert index.among(first, ["203.0.113.1", "203.0.113.9"]) == [first[0], first[2]]
    assert index.among(first[:1], ["203.0.113.2"]) == []
