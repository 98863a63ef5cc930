"""The decision: which routes and sessions make pools reachable, and what is missing for it."""

import ipaddress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.routers.sample import ANNOUNCE, HOPS, PEER, POOLS

from fairlead.announce_sections import (
    AnnounceConfig,
    BgpConfig,
    BgpPeerConfig,
    PoolAnnounce,
    SecretRef,
)
from fairlead.config import PoolConfig
from fairlead.errors import Refused
from fairlead.model import Family, Listener, LoadBalancer, Member, PodMember, ServiceKey
from fairlead.routers.reach import Request, plan
from fairlead.routers.values import Hop, Reach, Target

STATIC = Request(method="static")
NO_BGP = AnnounceConfig()
SINGLE = (Hop("gw1", ("192.0.2.11",)),)


PAIR = tuple(
    BgpPeerConfig(
        name=f"tor{number}",
        address=f"198.51.100.{number}",
        asn=64512,
        multihop=2,
        hold_time_s=30,
        keepalive_time_s=10,
        password_secret=SecretRef("session"),
    )
    for number in (1, 2)
)
EXTERNAL = msgspec.structs.replace(PEER, name="any", asn="external")
INTERNAL = msgspec.structs.replace(PEER, name="inner", asn="internal")
OTHER_INTERNAL = msgspec.structs.replace(INTERNAL, name="other", local_asn=64600)


def peers(*given: BgpPeerConfig) -> AnnounceConfig:
    return AnnounceConfig("bgp", bgp=BgpConfig(asn=64513, peers=given))


def subjects(reach: Reach) -> list[str]:
    return [each.subject for each in reach.notes]


@given(st.integers(0, 2**16 - 1), st.integers(0, 600))
def test_the_prefixes_are_exactly_the_addresses_of_the_pool(first: int, more: int) -> None:
    low = ipaddress.IPv4Address("198.18.0.0") + first
    high = low + more
    found = plan((PoolConfig("main", (f"{low}-{high}",)),), SINGLE, NO_BGP, STATIC)
    networks = [ipaddress.IPv4Network(each.prefix) for each in found.networks]
    assert sum(each.num_addresses for each in networks) == more + 1
    assert (networks[0][0], networks[-1][-1]) == (low, high)
    assert [each.prefix for each in found.routes] == [each.prefix for each in found.networks]
    assert found.prefixes("IPv4") == more + 1


def test_each_route_has_all_hosts_of_its_family_in_a_fixed_order() -> None:
    hops = (*HOPS, Hop("gw3", ("192.0.2.13",)))
    found = plan(POOLS, hops, NO_BGP, STATIC)
    assert found == plan(POOLS, hops[::-1], NO_BGP, STATIC)
    by_family = {route.family: [each.address for each in route.targets] for route in found.routes}
    assert by_family == {
        "IPv4": ["192.0.2.11", "192.0.2.12", "192.0.2.13"],
        "IPv6": ["2001:db8:2::11", "2001:db8:2::12"],
    }
    assert "gw3 have no IPv6 address" in str(found.notes[0])


def test_pools_of_layer_2_are_left_out_unless_they_are_named() -> None:
    announced = PoolConfig("local", ("192.0.2.96/28",), announce=PoolAnnounce(method="l2"))
    pools = (*POOLS, announced)
    found = plan(pools, HOPS, NO_BGP, STATIC)
    assert {each.pool for each in found.networks} == {"main", "shops"}
    assert "pool local is announced by ARP" in next(
        each.text for each in found.notes if each.subject == "layer 2"
    )
    named = plan(pools, HOPS, NO_BGP, Request(method="static", pools=("local",)))
    assert {each.pool for each in named.networks} == {"local"}
    with pytest.raises(Refused, match="--pool"):
        plan((announced,), HOPS, NO_BGP, STATIC)


@pytest.mark.parametrize(
    ("announce", "request_", "hops", "message"),
    [
        (NO_BGP, STATIC, (), "--next-hop"),
        (NO_BGP, Request(asn=64512), HOPS, "announce.bgp.asn"),
        (AnnounceConfig(bgp=BgpConfig(asn=64513)), Request(method="bgp"), HOPS, "--asn"),
        (AnnounceConfig("bgp", bgp=BgpConfig(asn=64513)), Request(), HOPS, "--method static"),
        (peers(EXTERNAL), Request(), HOPS, "--asn, or use --method static"),
        (peers(*PAIR), Request(), HOPS, "--peer: tor1, tor2, or use --method static"),
        (peers(*PAIR), Request(asn=64512), HOPS, "name the router with --peer: tor1, tor2$"),
        (peers(*PAIR), Request(method="bgp"), HOPS, "name the router with --peer: tor1, tor2$"),
        (peers(PAIR[0], EXTERNAL), Request(asn=64512), HOPS, "--peer: any, tor1$"),
        (ANNOUNCE, Request(peer="other"), HOPS, "name one of the peers: tor"),
        (ANNOUNCE, Request(pools=("other",)), HOPS, "name one of the pools: main, shops"),
    ],
)
def test_what_is_missing_is_named_with_a_remedy(
    announce: AnnounceConfig, request_: Request, hops: tuple[Hop, ...], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        plan(POOLS, hops, announce, request_)


def test_without_a_pool_there_is_no_plan() -> None:
    with pytest.raises(Refused, match="there is no pool"):
        plan((), HOPS, NO_BGP, STATIC)


def test_the_sessions_are_those_of_the_configured_peer() -> None:
    peer = msgspec.structs.replace(PEER, local_asn=64600, hold_time_s=30, families=("IPv6",))
    bgp = msgspec.structs.replace(ANNOUNCE.bgp, peers=(peer,))
    found = plan(POOLS, HOPS, msgspec.structs.replace(ANNOUNCE, bgp=bgp), Request()).sessions
    assert found is not None
    assert (found.router_asn, found.hosts_asn, found.hold_time_s) == (64512, 64600, 30)
    assert found.families == ("IPv6",)
    assert [each.address for each in found.neighbors] == ["192.0.2.11", "192.0.2.12"]


def test_one_of_two_routers_with_the_same_as_number_is_named() -> None:
    found = plan(POOLS, HOPS, peers(*PAIR), Request(peer="tor2"))
    assert found.sessions is not None
    assert (found.sessions.router_asn, found.sessions.router_address) == (64512, "198.51.100.2")
    assert (found.sessions.hold_time_s, found.sessions.keepalive_time_s) == (30, 10)
    assert (found.sessions.multihop, found.sessions.password) == (2, True)
    assert found.sessions.bfd is None
    assert "peers" not in subjects(found)


def test_static_routes_do_not_need_to_know_which_peer_the_router_is() -> None:
    found = plan(POOLS, HOPS, peers(*PAIR), STATIC)
    assert (found.sessions, bool(found.routes)) == (None, True)


@pytest.mark.parametrize(
    ("asn", "others", "expected"),
    [
        (64512, (INTERNAL, OTHER_INTERNAL), EXTERNAL),
        (64513, (EXTERNAL, OTHER_INTERNAL), INTERNAL),
        (64600, (INTERNAL,), OTHER_INTERNAL),
    ],
)
def test_a_peer_without_a_number_is_the_router_that_its_kind_fits(
    asn: int, others: tuple[BgpPeerConfig, ...], expected: BgpPeerConfig
) -> None:
    """An external peer has any number but that of the hosts in its session, an internal peer has
    that number."""
    expected = msgspec.structs.replace(expected, hold_time_s=77)
    found = plan(POOLS, HOPS, peers(*others, expected), Request(asn=asn))
    assert found.sessions is not None
    assert (found.sessions.router_asn, found.sessions.hold_time_s) == (asn, 77)
    assert "peers" not in subjects(found)


def test_an_internal_peer_has_the_number_of_the_hosts() -> None:
    found = plan(POOLS, HOPS, peers(INTERNAL), Request()).sessions
    assert found is not None
    assert (found.router_asn, found.internal) == (64513, True)


def test_a_number_that_fits_no_peer_is_a_router_that_is_no_peer() -> None:
    assert "peers" in subjects(plan(POOLS, HOPS, peers(*PAIR), Request(asn=64999)))
    assert "peers" in subjects(plan(POOLS, HOPS, peers(EXTERNAL), Request(asn=64513)))


def test_a_session_over_ipv6_leads_to_the_ipv6_addresses_of_the_hosts() -> None:
    peer = msgspec.structs.replace(PEER, address="2001:db8:2::1")
    bgp = msgspec.structs.replace(ANNOUNCE.bgp, peers=(peer,))
    found = plan(POOLS, HOPS, msgspec.structs.replace(ANNOUNCE, bgp=bgp), Request()).sessions
    assert found is not None
    assert [each.address for each in found.neighbors] == ["2001:db8:2::11", "2001:db8:2::12"]


def test_a_router_that_is_no_peer_is_told_what_to_configure() -> None:
    announce = AnnounceConfig(bgp=BgpConfig(asn=64513))
    found = plan(POOLS, HOPS, announce, Request(asn=64512))
    assert found.sessions is not None
    assert found.sessions.bfd is not None
    assert "asn: 64512" in next(each.text for each in found.notes if each.subject == "peers")
    assert "peers" not in subjects(plan(POOLS, HOPS, ANNOUNCE, Request()))


@pytest.mark.parametrize(
    ("host_routes", "expected"),
    [(False, {"IPv4": 2, "IPv6": 1}), (True, {"IPv4": 256 + 4, "IPv6": 256})],
)
def test_nodes_that_announce_host_routes_need_higher_limits_than_aggregates(
    host_routes: bool, expected: dict[Family, int]
) -> None:
    aggregates = PoolAnnounce(aggregation_length=24, aggregation_length_v6=64)
    pools = (
        PoolConfig("main", ("203.0.113.0/24", "2001:db8:f::/120"), announce=aggregates),
        PoolConfig("part", ("198.51.100.4/30",), announce=aggregates),
    )
    found = plan(pools, HOPS, ANNOUNCE, Request(), host_routes=host_routes)
    assert {family: found.prefixes(family) for family in found.families} == expected


def balancer(name: str, address: str, *listeners: dict[str, int]) -> LoadBalancer:
    """Return a load balancer with a listener for each of these weights of nodes."""
    return LoadBalancer(
        ServiceKey("default", name),
        f"uid-{name}",
        "fairlead.io/direct",
        (address,),
        tuple(
            Listener(
                "IPv4",
                80 + number,
                "TCP",
                "Local",
                30080 + number,
                tuple(Member(node, "192.0.2.1", weight) for node, weight in each.items()),
            )
            for number, each in enumerate(listeners)
        ),
    )


NODES = tuple(Hop(f"node{number}", (f"192.0.2.2{number}",)) for number in (1, 2, 3))


def test_routes_to_nodes_have_the_shares_of_the_pods() -> None:
    services = {"default/web": balancer("web", "203.0.113.1", {"node1": 3, "node2": 1})}
    (route,) = plan(POOLS, NODES, NO_BGP, STATIC, services).routes
    assert (route.prefix, route.about) == ("203.0.113.1/32", "Service default/web")
    assert route.targets == (Target("192.0.2.21", 3), Target("192.0.2.22", 1))
    alone = msgspec.structs.replace(STATIC, weights=False)
    (route,) = plan(POOLS, NODES, NO_BGP, alone, services).routes
    assert route.targets == (Target("192.0.2.21"), Target("192.0.2.22"))


def test_routes_to_gateway_routers_have_the_shares_of_the_pods_that_these_send_to() -> None:
    given = balancer("web", "203.0.113.1", {"node1": 1, "node2": 1, "node3": 1})
    pods = tuple(PodMember(f"10.244.1.{number}", 8080, "node1") for number in (10, 11, 12))
    pods += (PodMember("10.244.2.10", 8080, "node2"),)
    pods += (PodMember("10.244.3.10", 8080, "node3", "draining"),)
    (listener,) = given.listeners
    listener = msgspec.structs.replace(listener, pods=pods)
    services = {"default/web": msgspec.structs.replace(given, listeners=(listener,))}
    (route,) = plan(POOLS, NODES, NO_BGP, STATIC, services).routes
    assert route.targets == (Target("192.0.2.21", 3), Target("192.0.2.22", 1))


def test_only_nodes_that_serve_every_port_of_an_address_get_its_traffic() -> None:
    services = {
        "default/imap": balancer("imap", "203.0.113.1", {"node1": 2, "node2": 5}),
        "default/mail": balancer("mail", "203.0.113.1", {"node2": 1}, {"node2": 4, "node3": 1}),
        "default/other": balancer("other", "192.0.2.200", {"node1": 1}),
    }
    (route,) = plan(POOLS, NODES, NO_BGP, STATIC, services).routes
    assert route.targets == (Target("192.0.2.22", 1),)
    assert route.about == "Service default/imap, default/mail"
    assert "snapshot" in subjects(plan(POOLS, NODES, NO_BGP, STATIC, services))


def test_many_next_hops_are_named_as_a_limit_of_routers() -> None:
    hops = tuple(Hop(f"gw{number}", (f"192.0.2.{number}",)) for number in range(1, 18))
    assert "ECMP limit" in subjects(plan(POOLS[1:], hops, NO_BGP, STATIC))
    assert "ECMP limit" not in subjects(plan(POOLS[1:], hops[:16], NO_BGP, STATIC))
