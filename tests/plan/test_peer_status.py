"""The conditions of BGPPeers: whether their fields can be used, and whether every host has a
session."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from fairlead.announce_sections import BgpConfig, BgpPeerConfig
from fairlead.kube.announcers import status_of
from fairlead.kube.crds import BGPPeer
from fairlead.plan.announcers import Announcers, host_announcements
from fairlead.plan.peer_status import PeerState, peer_states
from fairlead.plan.peers import refusal
from fairlead.role_state import BgpSession, BgpState, RouteCheck

SECTION = BgpConfig(asn=64513)
VALID = {"asn": 64512, "address": "192.0.2.1"}
UP = BgpSession("tor", "192.0.2.1", "established")
DOWN = BgpSession("tor", "192.0.2.1", "down", last_error="Connection refused")


def bgp_peer(spec: Mapping[str, Any], name: str = "tor") -> dict[str, BGPPeer]:
    return {name: msgspec.convert({"metadata": {"name": name}, "spec": spec}, BGPPeer)}


def announcers(
    *sessions: BgpSession, hidden: tuple[str, ...] = (), **states: BgpState
) -> Announcers:
    """Return announcers gw1, gw2, and so on with one session each, and those of `states`."""
    states |= {f"gw{at}": BgpState(sessions=(each,)) for at, each in enumerate(sessions, 1)}
    return Announcers(
        {
            host: host_announcements(status_of("gateway", host, None, bgp, ready=True))
            for host, bgp in states.items()
        },
        hidden,
    )


def state(
    found: Announcers | None, spec: Mapping[str, Any] = VALID, section: BgpConfig = SECTION
) -> PeerState:
    return peer_states(section, bgp_peer(spec), found)["tor"]


def established(found: Announcers | None) -> tuple[str, str, str]:
    """Return sessions, status and message of the condition Established."""
    shown = state(found)
    (condition,) = [each for each in shown.conditions if each.type == "Established"]
    return shown.sessions, condition.status, condition.message


def test_every_host_has_a_session() -> None:
    shown = state(announcers(UP, UP))
    assert shown.sessions == "2/2"
    assert [(each.type, each.status) for each in shown.conditions] == [
        ("Accepted", "True"),
        ("Established", "True"),
    ]


def test_a_host_without_a_session_is_named_with_the_reason() -> None:
    assert established(announcers(UP, DOWN)) == (
        "1/2",
        "False",
        "1 of 2 hosts have no session: gateway gw2: Connection refused",
    )


def test_a_host_that_cannot_configure_the_peer_has_no_session() -> None:
    refused = BgpState(findings=(refusal("tor", "Secret x/bgp does not exist", "create it"),))
    sessions, status, message = established(announcers(UP, gw2=refused))
    assert (sessions, status) == ("1/2", "False")
    assert "gateway gw2: BGP peer tor is not used: Secret x/bgp does not exist" in message


def test_a_long_list_of_hosts_is_shortened() -> None:
    _, _, message = established(announcers(*[DOWN] * 5))
    assert message.endswith("gateway gw3: Connection refused; and 2 more")


def test_a_session_without_bfd_is_established_and_its_problem_named() -> None:
    impaired = msgspec.structs.replace(UP, bfd="down")
    assert established(announcers(impaired)) == (
        "1/1",
        "True",
        "gateway gw1: its BFD session is down",
    )


def test_a_session_whose_router_has_no_route_to_an_address_is_impaired() -> None:
    check = RouteCheck("tor", "203.0.113.7", "refused", "t0", "no route")
    unknown = msgspec.structs.replace(check, address="203.0.113.8", state="unknown")
    host = BgpState(sessions=(UP,), routes=(check, unknown))
    assert established(announcers(gw1=host)) == (
        "1/1",
        "True",
        "gateway gw1: the router has no route to 1 of the announced addresses",
    )


@pytest.mark.parametrize("found", [None, announcers(UP, hidden=("gw2",))])
def test_what_cannot_be_seen_is_unknown(found: Announcers | None) -> None:
    assert established(found)[1] == "Unknown"


def test_a_peer_that_no_host_has_is_not_established() -> None:
    assert established(announcers())[:2] == ("", "False")


def test_sessions_of_another_routing_daemon_are_unknown() -> None:
    shown = state(announcers(), section=BgpConfig(asn=64513, speaker="routes"))
    assert [each.status for each in shown.conditions] == ["True", "Unknown"]


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (VALID | {"asn": 0}, "asn"),
        (VALID | {"address": "router.example"}, "spec.address"),
        (VALID | {"ttlSecurity": True, "multihop": 2}, "spec.ttlSecurity"),
        (VALID | {"gracefulRestart": True}, "spec.gracefulRestart"),
    ],
)
def test_a_peer_with_a_mistake_is_not_accepted(spec: Mapping[str, Any], part: str) -> None:
    accepted, _ = state(announcers(), spec).conditions
    assert (accepted.type, accepted.status, accepted.reason) == ("Accepted", "False", "PeerRefused")
    assert part in accepted.message


def test_a_peer_with_a_name_of_the_configuration_is_not_used() -> None:
    section = BgpConfig(asn=64513, peers=(BgpPeerConfig(name="tor", asn=1, address="192.0.2.9"),))
    accepted, session = state(announcers(UP), section=section).conditions
    assert (accepted.status, session.status) == ("False", "False")
    assert "in the configuration file" in accepted.message
