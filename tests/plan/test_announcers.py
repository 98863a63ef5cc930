"""What the controller concludes from the Announcers of live hosts, and the Events of one host, as
values."""

import msgspec
import pytest

from fairlead.kube.announcers import ROUTING_DAEMON, Announcer, announcer_name, status_of
from fairlead.kube.objects import ObjectKey, ObjectMeta
from fairlead.model import Announcement, Finding
from fairlead.plan.announcer_events import MAX_EVENTS, Announced, lasting, notices
from fairlead.plan.announcers import (
    Announcers,
    HostAnnouncements,
    PeerSession,
    announcement_notes,
    changed_addresses,
    host_announcements,
)
from fairlead.role_state import AnnouncedAddress, BgpSession, BgpState, L2State
from fairlead.roles.announcing.watch import HAND_OVER_S, HIDDEN_S, KnownAnnouncers

FIRST, SECOND = "203.0.113.1", "203.0.113.2"
BOTH = Announcement((FIRST, SECOND), "l2")
GATEWAYS = frozenset({"gw1", "gw2"})
NONE: frozenset[str] = frozenset()


def announces(host: str, *addresses: str, role: str = "gateway") -> HostAnnouncements:
    return HostAnnouncements(role, host, frozenset(addresses))


def silent(host: str, *addresses: str, why: str = "") -> HostAnnouncements:
    return HostAnnouncements("gateway", host, NONE, frozenset(addresses), (why,) if why else ())


def notes(*hosts: HostAnnouncements, **fields: object) -> tuple[Finding, ...]:
    known = Announcers({f"{each.role}-{each.host}": each for each in hosts})
    return announcement_notes(msgspec.structs.replace(known, **fields), [BOTH], by_gateways=True)


def test_addresses_may_be_announced_by_different_hosts() -> None:
    assert notes(announces("gw1", FIRST), announces("gw2", SECOND)) == ()


def test_the_message_names_only_the_address_that_no_host_announces() -> None:
    (note,) = notes(announces("gw1", FIRST))
    assert note.blocks == "Ready"
    assert note.message == f"no gateway announces {SECOND} (method l2)"


def test_an_address_without_an_established_session_is_not_announced() -> None:
    (note,) = notes(announces("gw1", FIRST), silent("gw2", SECOND, why="tor1: refused"))
    assert note.blocks == "Ready"
    assert note.message == (
        f"{SECOND} is not announced: no BGP session is established on gw2: tor1: refused"
    )


def test_an_address_that_no_router_has_a_route_to_is_not_announced() -> None:
    refused = silent("gw2", SECOND, why="router tor1 has no route to it")
    (note,) = notes(msgspec.structs.replace(refused, peers=(PeerSession("tor1", True),)))
    assert note.blocks == "Ready"
    assert note.message.endswith(
        "BGP sessions are established, but no router takes its route from gw2: router tor1 has no "
        "route to it"
    )


def test_a_host_without_a_session_does_not_matter_while_another_host_has_one() -> None:
    assert notes(announces("gw1", FIRST, SECOND), silent("gw2", FIRST, SECOND)) == ()


def test_an_address_that_is_handed_over_is_announced() -> None:
    assert notes(announces("gw1", FIRST), handed_over=frozenset({SECOND})) == ()


@pytest.mark.parametrize(
    ("hosts", "hidden"),
    [
        ([announces("gw1", FIRST)], ("gw2",)),
        ([msgspec.structs.replace(announces("gw2", FIRST), complete=False)], ()),
    ],
    ids=["no Announcer", "not every address"],
)
def test_what_is_not_known_does_not_make_a_service_unready(
    hosts: list[HostAnnouncements], hidden: tuple[str, ...]
) -> None:
    (note,) = notes(*hosts, hidden=hidden)
    assert note.blocks == ""
    assert "it is not known whether" in note.message
    assert "gw2" in note.message


def test_nothing_is_reported_while_the_announcers_are_unknown() -> None:
    assert announcement_notes(None, [BOTH], by_gateways=True) == ()


def test_only_addresses_whose_announcement_changes_are_planned_again() -> None:
    before = Announcers({"a": announces("gw1", FIRST), "b": announces("gw2", SECOND)})
    assert changed_addresses(before, before) == NONE
    gone = Announcers({"a": announces("gw1", FIRST)})
    assert changed_addresses(before, gone) == {SECOND}
    down = Announcers({"a": silent("gw1", FIRST, why="x"), "b": announces("gw2", SECOND)})
    assert changed_addresses(before, down) == {FIRST}
    why = Announcers({"a": silent("gw1", FIRST, why="y"), "b": announces("gw2", SECOND)})
    assert changed_addresses(down, why) == {FIRST}


def announcer(host: str, *addresses: str) -> dict[ObjectKey, Announcer | None]:
    state = L2State(addresses=tuple(AnnouncedAddress(each) for each in addresses))
    name = announcer_name("gateway", host)
    status = status_of("gateway", host, state, None, ready=True)
    return {ObjectKey("", name): Announcer(ObjectMeta(name=name), status)}


def test_the_announcer_of_a_host_that_is_gone_does_not_count() -> None:
    known = KnownAnnouncers()
    known.update(announcer("gw1", FIRST) | announcer("gw2"))
    assert known.value(0.0, GATEWAYS, NONE).hosts.keys() == {"gateway-gw1", "gateway-gw2"}
    after = known.value(1.0, frozenset({"gw2"}), NONE)
    assert after.hosts.keys() == {"gateway-gw2"}
    assert after.handed_over == {FIRST}
    assert known.value(1.0 + HAND_OVER_S, frozenset({"gw2"}), NONE).handed_over == NONE


def test_an_address_is_announced_while_it_passes_to_another_host() -> None:
    known = KnownAnnouncers()
    known.update(announcer("gw1", FIRST) | announcer("gw2"))
    known.value(0.0, GATEWAYS, NONE)
    known.update(announcer("gw1"))
    assert known.value(1.0, GATEWAYS, NONE).handed_over == {FIRST}
    known.update(announcer("gw2", FIRST))
    after = known.value(2.0, GATEWAYS, NONE)
    assert after.handed_over == NONE
    assert after.hosts["gateway-gw2"].announced == {FIRST}


def test_a_gateway_is_hidden_if_it_shows_no_announcer_for_a_while() -> None:
    known = KnownAnnouncers()
    known.update(announcer("gw1"))
    assert known.value(0.0, GATEWAYS, NONE).hidden == ()
    assert known.value(HIDDEN_S, GATEWAYS, NONE).hidden == ("gw2",)
    known.update(announcer("gw2"))
    assert known.value(HIDDEN_S, GATEWAYS, NONE).hidden == ()


def test_the_same_value_is_returned_while_nothing_changes() -> None:
    known = KnownAnnouncers()
    known.update(announcer("gw1", FIRST) | announcer("gw2"))
    assert known.value(0.0, GATEWAYS, NONE) is known.value(60.0, GATEWAYS, NONE)


def bgp(state: str = "established", error: str = "", speaker: str = "bird") -> BgpState:
    up = state == "established"
    peers = ("tor1",) if up and speaker == "bird" else ()
    sessions = [{"peer": "tor1", "address": "192.0.2.1", "state": state, "last_error": error}]
    return BgpState(
        speaker,
        (AnnouncedAddress(FIRST, ("default/web",), peers=peers),),
        tuple(msgspec.convert(sessions, list[BgpSession])) if speaker == "bird" else (),
    )


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (bgp(), True),
        (bgp("down", "refused"), False),
        (bgp(speaker="routes"), True),
        (msgspec.structs.replace(bgp(speaker="routes"), problem="no table"), False),
    ],
)
def test_an_address_counts_as_announced_by_bgp_if_a_neighbor_gets_it(
    state: BgpState, told: bool
) -> None:
    found = host_announcements(status_of("gateway", "gw1", None, state, ready=True))
    assert (FIRST in found.announced, FIRST in found.silent) == (told, not told)


def test_another_routing_daemon_stands_for_its_neighbors() -> None:
    status = status_of("gateway", "gw1", None, bgp(speaker="routes"), ready=True)
    assert status.addresses[0].peers == (ROUTING_DAEMON,)


def test_equal_states_are_no_event() -> None:
    assert notices("gateway gw1", Announced(bgp=bgp()), Announced(bgp=bgp())) == []


def test_each_change_of_a_session_is_one_event() -> None:
    up, down = Announced(bgp=bgp()), Announced(bgp=bgp("down", "Hold timer expired"))
    (lost,) = notices("gateway gw1", up, down)
    assert (lost.services, lost.reason) == ((), "BgpSessionDown")
    assert lost.message == (
        "gateway gw1: the BGP session with tor1 (192.0.2.1) is down: Hold timer expired"
    )
    found = notices("gateway gw1", down, up)
    assert [each.reason for each in found] == ["AddressAnnounced", "BgpSessionUp"]
    assert found[0].services == ("default/web",)


def test_many_addresses_at_the_same_time_are_one_event() -> None:
    one = bgp()
    (address,) = one.addresses
    some, many = (
        msgspec.structs.replace(
            one,
            addresses=tuple(
                msgspec.structs.replace(address, address=f"203.0.113.{number}")
                for number in range(1, count + 1)
            ),
        )
        for count in (MAX_EVENTS, MAX_EVENTS + 1)
    )
    before = Announced(bgp=msgspec.structs.replace(one, addresses=()))
    assert len(notices("gateway gw1", before, Announced(bgp=some))) == MAX_EVENTS
    (only,) = notices("gateway gw1", before, Announced(bgp=many))
    assert (only.services, only.reason) == ((), "AddressAnnounced")
    assert only.message == (
        "gateway gw1 announces 21 addresses: 203.0.113.1, 203.0.113.2, 203.0.113.3 and others"
    )
    (more,) = notices("gateway gw1", Announced(bgp=some), Announced(bgp=many))
    assert more.services == ("default/web",)


def test_a_new_session_is_an_event_only_if_it_fails() -> None:
    trying = Announced(bgp=bgp("connecting"))
    assert notices("gateway gw1", Announced(), trying) == []
    (failed,) = notices("gateway gw1", trying, Announced(bgp=bgp("connecting", "refused")))
    assert failed.reason == "BgpSessionDown"


def test_a_peer_that_is_refused_beside_a_working_one_is_an_event_with_an_end() -> None:
    up = Announced(bgp=bgp())
    finding = Finding("PeerRefused", "BGP peer tor2 is not used: x", subject="BGPPeer tor2")
    refused = Announced(bgp=msgspec.structs.replace(up.bgp, findings=(finding,)))
    (told,) = notices("gateway gw1", up, refused)
    assert (told.services, told.kind, told.reason) == ((), "Warning", "PeerRefused")
    assert told.message == "gateway gw1: BGP peer tor2 is not used: x"
    assert lasting("gateway gw1", refused) == [told]
    (ended,) = notices("gateway gw1", refused, up)
    assert (ended.kind, ended.reason, ended.subject) == ("Normal", "Recovered", told.subject)
    assert ended.message == "gateway gw1: PeerRefused of BGPPeer tor2 no longer holds"


def test_the_finding_about_a_peer_is_among_the_problems_however_many_others_there_are() -> None:
    l2 = L2State(findings=tuple(Finding("NotOnInterface", f"{n} is nowhere") for n in range(99)))
    state = BgpState(findings=(Finding("PeerRefused", "BGP peer tor2 is not used: x"),))
    status = status_of("gateway", "gw1", l2, state, ready=True)
    assert status.problems[0] == "BGP peer tor2 is not used: x"


def test_only_problems_are_reported_again() -> None:
    assert lasting("gateway gw1", Announced(bgp=bgp())) == []
    assert lasting("gateway gw1", Announced(bgp=bgp("connecting"))) == []
    (down,) = lasting("gateway gw1", Announced(bgp=bgp("down", "refused")))
    assert down.reason == "BgpSessionDown"
