"""What BIRD shows about sessions, and what it means for a Service."""

from typing import Any

import pytest
from tests.drivers.bgp.site import VIP, VIP6, WEB, intent, peer

from fairlead.announce_sections import BfdConfig
from fairlead.drivers.bgp import spec
from fairlead.drivers.bgp.sessions import (
    Seen,
    Tracked,
    outcome_of,
    problem_of,
    seen_of,
    tracked,
    wants_of,
)
from fairlead.model import Outcome
from fairlead.net.bird_replies import BfdSession, Channel, Protocol

BOTH = frozenset(("ipv4", "ipv6"))
UP = Seen("established", exported=2, carries=BOTH)
WANTS = wants_of(spec.specs_of({WEB: intent(VIP, VIP6)})[WEB].contributions)
ONLY4 = wants_of(spec.specs_of({WEB: intent(VIP)})[WEB].contributions)


def session(name: str, *seen: Seen, **fields: Any) -> Tracked:
    one = tracked(peer(name, **fields), 10.0, "now")
    for each in seen:
        one.observe(each, "later")
    return one


def down(error: str) -> Seen:
    return Seen("down", error)


def test_the_message_of_the_neighbor_outlives_the_attempts_that_follow_it() -> None:
    one = session("a", UP, down("Received: Maximum number of prefixes reached"))
    assert one.changes == 2
    assert not one.observe(down("Socket: Connection refused"), "later")
    assert not one.observe(Seen("connecting"), "later")
    assert one.session.last_error == "Received: Maximum number of prefixes reached"
    assert [one.session.state] == ["down"]
    assert "raise the limit" in str(problem_of(one))
    assert one.observe(UP, "later")
    assert [one.session.state] == ["established"]
    assert one.session.last_error == "Received: Maximum number of prefixes reached"
    assert one.observe(down("Socket: Connection refused"), "later")
    assert "check that the neighbor runs BGP" in str(problem_of(one))


def test_a_session_without_any_answer_has_an_error_after_a_while() -> None:
    """As with another password, or behind a firewall that drops packets: BIRD has no error."""
    one = session("a")
    trying = Seen("connecting")
    assert not one.observe(trying, "later")
    assert (one.session.state, one.session.last_error) == ("connecting", "")
    assert one.observe(trying, "later", late=True)
    assert [one.session.state] == ["down"]
    for part in ("198.51.100.254 on TCP port 179", "firewall", "AS numbers", "password"):
        assert part in one.session.last_error
        assert part in str(problem_of(one))
    assert not one.observe(trying, "later", late=True)
    one.observe(down("Socket: Connection refused"), "later", late=True)
    assert one.session.last_error == "Socket: Connection refused"
    one.observe(UP, "later", late=True)
    assert [one.session.state] == ["established"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("Received: Connection collision resolution", "announce.bgp.speaker"),
        ("Received: Bad peer AS", "compare asn"),
        ("Error: No listening socket", "announce.bgp.localPort"),
        ("Neighbor: BFD session down", "BFD is enabled there"),
        ("Error: Hold timer expired", "check the link"),
    ],
)
def test_known_errors_have_a_remedy(error: str, remedy: str) -> None:
    finding = problem_of(session("a", down(error)), "bgpd (process 7)")
    assert error in finding.message
    assert remedy in finding.remedy
    assert ("bgpd (process 7)" in finding.message) == ("socket" in error)


def test_a_service_is_done_if_one_wanted_peer_gets_each_family() -> None:
    sessions = {
        "a": session("a", Seen("established", carries=frozenset(("ipv4",)))),
        "b": session("b", Seen("established", carries=frozenset(("ipv6",)))),
        "c": session("c", down("Socket: Connection refused")),
    }
    outcome = outcome_of(WANTS, sessions, (), now_s=100)
    assert outcome.state == "done"
    assert [each.subject for each in outcome.notes] == ["BGPPeer c"]
    del sessions["b"]
    outcome = outcome_of(WANTS, sessions, (), now_s=100)
    assert (outcome.state, outcome.in_part) == ("unavailable", True)
    assert "IPv6" in outcome.message


def test_a_new_session_is_waited_for_and_a_lost_one_is_not() -> None:
    young = session("a", Seen("connecting"))
    outcome = outcome_of(WANTS, {"a": young}, (), now_s=4)
    assert (outcome.state, outcome.again_s) == ("waiting", 6)
    assert outcome_of(WANTS, {"a": young}, (), now_s=11).state == "unavailable"
    lost = session("a", UP, down("Error: Hold timer expired"))
    assert outcome_of(WANTS, {"a": lost}, (), now_s=4).state == "unavailable"


def test_a_service_without_any_peer_is_refused() -> None:
    named = wants_of(spec.specs_of({WEB: intent(VIP, peers=("x",))})[WEB].contributions)
    for wants, words in ((WANTS, "no BGP peer is configured"), (named, "(x)")):
        outcome = outcome_of(wants, {}, (), now_s=0)
        assert (outcome.state, outcome.reason) == ("refused", "BgpSessionDown")
        assert words in outcome.message


def test_a_session_that_is_up_without_bfd_or_without_a_next_hop_is_noted() -> None:
    half = Seen("established", bfd="down", carries=frozenset(("ipv4",)))
    one = session("a", half._replace(without_next_hop=frozenset(("ipv6",))), bfd=BfdConfig())
    both = outcome_of(WANTS, {"a": one}, (), now_s=100)
    assert (both.state, both.in_part) == ("unavailable", True)
    assert "no IPv6 address on the interface" in both.message
    only = outcome_of(ONLY4, {"a": one}, (), now_s=100)
    assert only.state == "done"
    texts = [str(each) for each in only.notes]
    assert len(texts) == 1
    assert "BFD session is down" in texts[0]


def test_a_service_hears_only_of_sessions_that_would_carry_its_families() -> None:
    four = session("four", families=("IPv4",))
    six = session("six", down("Socket: Connection refused"), families=("IPv6",))
    sessions = {"four": four, "six": six}
    waits = outcome_of(ONLY4, sessions, (), now_s=4)
    assert (waits.state, waits.message) == (
        "waiting",
        "the BGP session with four is being established",
    )
    four.observe(Seen("established", carries=frozenset(("ipv4",))), "later")
    assert outcome_of(ONLY4, sessions, (), now_s=100) == Outcome("done")
    both = outcome_of(WANTS, sessions, (), now_s=100)
    assert "BGP session with six" in both.message
    without = outcome_of(ONLY4, {"six": six}, (), now_s=100)
    assert without.state == "unavailable"
    assert "no session carries IPv4 routes" in without.message
    assert "six" not in without.message


def test_a_session_is_known_by_what_its_neighbor_accepted() -> None:
    six = session("six", Seen("established", carries=frozenset(("ipv6",))))  # both are configured
    four = session("four", Seen("established", carries=frozenset(("ipv4",))))
    six.observe(down("Error: Hold timer expired"), "later")
    sessions = {"four": four, "six": six}
    assert outcome_of(ONLY4, sessions, (), now_s=100).notes == ()
    assert "BGP session with six (" in outcome_of(WANTS, sessions, (), now_s=100).message


def test_the_bfd_session_of_a_new_session_is_waited_for_and_a_lost_one_is_not() -> None:
    def notes(one: Tracked, now_s: float) -> int:
        return len(outcome_of(WANTS, {"a": one}, (), now_s=now_s).notes)

    one = tracked(peer("a", bfd=BfdConfig()), 10.0, "now")
    for _ in range(2):
        one.observe(UP._replace(bfd="down"), "later", 20.0)
        assert [notes(one, 19), notes(one, 20)] == [0, 1]
    one.observe(UP._replace(bfd="up"), "later", 30.0)
    assert notes(one, 20) == 0
    one.observe(UP._replace(bfd="down"), "later", 40.0)
    assert notes(one, 20) == 1


def test_the_state_of_a_protocol() -> None:
    channels = (Channel("ipv4", "UP", 3, "192.0.2.1"), Channel("ipv6", "UP", 2, "::"))
    protocol = Protocol(
        "p.tor1",
        "BGP",
        "up",
        "2026-01-01 10:00:00",
        "",
        "Established",
        "192.0.2.9",
        1,
        "",
        channels,
    )
    found = seen_of(
        peer("tor1", bfd=BfdConfig()), [protocol], [BfdSession("192.0.2.9", "e0", "Up")]
    )
    assert found.state == "established"
    assert (found.exported, found.bfd) == (3, "up")
    assert (set(found.carries), set(found.without_next_hop)) == ({"ipv4"}, {"ipv6"})
    assert seen_of(peer("tor2"), [protocol], []).state == "connecting"
    disabled = Protocol("p.tor1", "BGP", "down", "", "", "Down")
    assert seen_of(peer("tor1"), [disabled], []).state == "disabled"
    failed = Protocol("p.tor1", "BGP", "down", "", "", "Down", last_error="Error: x")
    assert seen_of(peer("tor1"), [failed], []) == Seen("down", "Error: x")
