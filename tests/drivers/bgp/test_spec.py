"""The pure parts: which addresses are announced for which Service, and what BIRD's answers mean."""

import msgspec
import pytest

from fairlead.drivers.bgp import spec
from fairlead.drivers.bgp.sessions import Look, findings_of, is_configured, sessions_of
from fairlead.drivers.bgp.spec import NO_SERVICE, Change
from fairlead.model import Family, Listener, LoadBalancer, ServiceKey
from fairlead.net.bird_replies import BfdSession, Channel, Protocol
from fairlead.role_state import BgpSessionState, BgpState, Table
from fairlead.sections import BfdConfig, BgpConfig, BgpPeerConfig

WEB, DNS = ServiceKey("default", "web"), ServiceKey("default", "dns")
FIRST = BgpPeerConfig("tor-1", "192.0.2.1", 64512, bfd=BfdConfig())
SECOND = BgpPeerConfig("tor-2", "192.0.2.2", 64512)
SECTION = BgpConfig(64513, (FIRST, SECOND))
UP = Protocol(
    "fairlead_to_tor_1",
    "BGP",
    "up",
    "1:00",
    "Established",
    "Established",
    "192.0.2.1",
    64512,
    channels=(Channel("ipv4", "UP", 0, 3),),
)
DOWN = Protocol(
    "fairlead_to_tor_2", "BGP", "start", "1:00", "Active", "Active", last_error="Socket: refused"
)


IPV4: frozenset[Family] = frozenset({"IPv4"})
IPV6: frozenset[Family] = frozenset({"IPv6"})


def balancer(*addresses: str, families: tuple[Family, ...] = ("IPv4", "IPv6")) -> LoadBalancer:
    listeners = tuple(Listener(each, 80, "TCP", "Local", 30080, ()) for each in families)
    return LoadBalancer(WEB, "1", "fairlead.io/direct", addresses, listeners)


def test_the_addresses_at_which_a_service_takes_traffic_are_announced() -> None:
    both = balancer("2001:db8::1", "192.0.2.9")
    assert spec.render({WEB: both}) == {WEB: ("192.0.2.9", "2001:db8::1")}
    assert spec.render({WEB: balancer("2001:db8::1", "192.0.2.9", families=("IPv6",))}) == {
        WEB: ("2001:db8::1",)
    }
    assert spec.render({WEB: balancer("192.0.2.9", families=())}) == {}


def test_equal_states_give_no_change_and_changes_give_the_desired_state() -> None:
    known = {WEB: ("a", "b"), DNS: ("b",)}
    assert spec.diff(known, known) == []
    changes = spec.diff({WEB: ("b", "c")}, known)
    assert changes == [Change(WEB, ("b", "c"), ("a", "b")), Change(DNS, (), ("b",))]
    assert str(changes[0]) == "announce c, withdraw a by BGP for default/web"
    assert spec.carried_out(known, changes) == {WEB: ("b", "c")}


def test_withdrawals_announce_nothing() -> None:
    known = {WEB: ("a", "b"), DNS: ("b",)}
    assert spec.withdrawn({WEB: ("b", "c"), DNS: ("b", "d")}, known) == [
        Change(WEB, ("b",), ("a", "b"))
    ]


def test_what_no_service_shows_is_the_leftover_of_an_earlier_process() -> None:
    known = {WEB: ("a", "b")}
    found = spec.present(known, {"b", "c", "d"}, shown={"c"})
    assert found == {WEB: ("b",), NO_SERVICE: ("d",)}


def test_a_gateway_without_any_session_is_not_ready() -> None:
    waiting = UP.__class__("fairlead_to_tor_1", "BGP", "start", "1:00", "Connect", "Connect")
    found = list(findings_of(SECTION, Look((waiting, DOWN))))
    assert [(each.code, each.severity, each.blocks) for each in found] == [
        ("BgpSessionDown", "error", "Ready")
    ] * 2
    assert "router tor-2 (192.0.2.2, AS 64512) has no session" in found[1].message
    assert found[1].message.endswith("Active, Socket: refused")


def test_one_session_is_enough_and_the_other_is_named() -> None:
    (found,) = findings_of(SECTION, Look((UP, DOWN), families=IPV4))
    assert (found.code, found.severity, found.blocks) == ("BgpSessionDown", "warning", "")
    assert list(findings_of(BgpConfig(64513, (FIRST,)), Look((UP,), families=IPV4))) == []


def test_a_family_of_addresses_that_no_router_learns_makes_the_gateway_not_ready() -> None:
    third = BgpPeerConfig("tor-2", "2001:db8::2", 64512)
    section = BgpConfig(64513, (FIRST, third))
    for families, blocks in ((IPV4, ""), (IPV6, "Ready")):
        (found,) = findings_of(section, Look((UP, DOWN), families=families))
        assert (found.code, found.blocks) == ("BgpSessionDown", blocks)
    empty = msgspec.structs.replace(UP, channels=(Channel("ipv4", "UP", 0, 0),))
    section = BgpConfig(64513, (FIRST,))
    (found,) = findings_of(section, Look((empty,), families=IPV4))
    assert (found.code, found.blocks) == ("BgpSessionDown", "Ready")
    assert found.message == (
        "router tor-1 (192.0.2.1, AS 64512) learns no address from this gateway: the session has "
        "no routes"
    )
    assert list(findings_of(section, Look((empty,)))) == []


def test_a_bird_with_a_removed_router_is_named_and_its_sessions_go_on() -> None:
    section = BgpConfig(64513, (FIRST,))
    assert is_configured(section, Look((UP,)))
    assert not is_configured(section, Look((UP, DOWN)))
    assert not is_configured(section, Look(()))
    (found,) = findings_of(section, Look((UP, DOWN), problem="other", refused=True))
    assert (found.code, found.severity, found.blocks) == ("BirdConfigurationRefused", "error", "")
    assert found.message == "routers learn addresses by another configuration: other"


def test_a_family_without_a_router_is_named() -> None:
    section = BgpConfig(64513, (FIRST,))
    (found,) = findings_of(section, Look((UP,), families=IPV4 | IPV6))
    assert found.blocks == "Ready"
    assert found.code == "NoRouterOfFamily"
    assert found.message.startswith("IPv6 addresses are announced to no router")


@pytest.mark.parametrize(
    ("refused", "code"), [(False, "BirdNotAnswering"), (True, "BirdConfigurationRefused")]
)
def test_a_bird_that_does_not_work_is_named_with_the_command_that_starts_it(
    refused: bool, code: str
) -> None:
    (found,) = findings_of(SECTION, Look(problem="asking BIRD: no", refused=refused))
    assert (found.code, found.blocks) == (code, "Ready")
    assert str(found).endswith(
        "start it on this host: bird -R -c /run/fairlead/bird/bird.conf -s "
        "/run/fairlead/bird/bird.ctl"
    )


def test_the_sessions_are_shown_in_the_order_of_the_configuration() -> None:
    look = Look((DOWN, UP), (BfdSession("192.0.2.1", "eth0", "Up"),))
    sessions = sessions_of(SECTION, look)
    assert sessions == (
        BgpSessionState("tor-1", "192.0.2.1", 64512, "Established", "Up", 3),
        BgpSessionState("tor-2", "192.0.2.2", 64512, "Active", "", 0, "Socket: refused"),
    )
    table, line = BgpState(3, sessions).shown()
    assert isinstance(table, Table)
    assert list(table.rows[0]) == [
        "tor-1", "192.0.2.1", "64512", "Established", "Up", "3", "-"
    ]  # fmt: skip
    assert line == "announces by BGP: 3"
    unknown = sessions_of(SECTION, Look())
    assert [(each.state, each.bfd) for each in unknown] == [("unknown", "unknown"), ("unknown", "")]
