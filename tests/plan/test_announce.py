"""How addresses are announced: the method and options of each address, which hosts may announce it,
and when a host leaves."""

import ipaddress
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import make_service

from fairlead.announce_sections import (
    AnnounceConfig,
    BgpConfig,
    BgpPeerConfig,
    LabelRequirement,
    LabelSelector,
    PoolAnnounce,
)
from fairlead.config import Config, PoolConfig
from fairlead.kube.crds import AddressPool
from fairlead.kube.objects import Node, ObjectKey, Service, ServiceStatus
from fairlead.model import Announcement
from fairlead.plan.announce import AnnouncePlan
from fairlead.plan.pool_terms import PoolIndex
from fairlead.state import State

EDGE = LabelSelector({"edge": ""})
SECTION = AnnounceConfig(method="l2")
POOLS = (
    PoolConfig("default", ("203.0.113.0/28",)),
    PoolConfig("l2", ("203.0.113.16/28",), announce=PoolAnnounce("l2", ("eth*",), (EDGE,))),
    PoolConfig(
        "bgp",
        ("203.0.113.32/28", "2001:db8:f::/112"),
        announce=PoolAnnounce(
            "bgp",
            peers=("b", "a", "b"),
            communities=("no-export", "64512:1:2", "64512:100"),
            local_preference=200,
            aggregation_length=28,
            aggregation_length_v6=112,
        ),
    ),
    PoolConfig("silent", ("203.0.113.48/28",), announce=PoolAnnounce("none")),
)
CONFIG = Config(pools=POOLS, announce=SECTION)


def node(name: str, labels: Mapping[str, str] | None = None, **more: Any) -> Node:
    """Return a Node. `more`: further fields of its JSON."""
    metadata = {"name": name, "labels": labels or {}} | more.pop("metadata", {})
    return msgspec.convert({"metadata": metadata, **more}, Node)


def state_of(*nodes: Node, pools: Mapping[str, Mapping[str, Any]] | None = None) -> State:
    """Return a cluster with these Nodes and AddressPools (name -> spec)."""
    state = State(())
    state.update_nodes({ObjectKey("", each.metadata.name): each for each in nodes})
    state.update_pools(
        {
            ObjectKey("", name): msgspec.convert(
                {"metadata": {"name": name}, "spec": spec}, AddressPool
            )
            for name, spec in (pools or {}).items()
        }
    )
    return state


def announced(
    *addresses: str,
    config: Config = CONFIG,
    state: State | None = None,
    host: str = "gw1",
    service: Service | None = None,
    **annotations: str,
) -> tuple[Announcement, ...]:
    """Return how a host announces addresses of a Service with these annotations of Fairlead."""
    given = {f"fairlead.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    return AnnouncePlan(config, host).announcements_of(
        state or state_of(), service or make_service(annotations=given), addresses
    )


def test_without_the_section_nothing_is_announced() -> None:
    config = msgspec.structs.replace(CONFIG, announce=None)
    assert announced("203.0.113.17", config=config, announce="l2") == ()


@pytest.mark.parametrize(
    ("address", "annotation", "method"),
    [
        ("203.0.113.1", "", "l2"),
        ("203.0.113.1", "bgp", "bgp"),
        ("203.0.113.1", "none", None),
        ("203.0.113.1", "arp", "l2"),
        ("203.0.113.17", "", "l2"),
        ("203.0.113.33", "", "bgp"),
        ("203.0.113.33", "L2", "l2"),
        ("203.0.113.49", "", None),
        ("203.0.113.49", "bgp", "bgp"),
        ("198.51.100.1", "", "l2"),  # in no pool
        ("2001:db8:f::1", "", "bgp"),
        ("2001:db8:e::1", "", "l2"),
    ],
)
def test_the_method_is_that_of_the_service_or_the_pool_or_the_section(
    address: str, annotation: str, method: str | None
) -> None:
    found = announced(address, announce=annotation, state=state_of(node("gw1", {"edge": ""})))
    assert [each.method for each in found] == ([method] if method else [])


def test_addresses_of_different_pools_are_announced_separately() -> None:
    assert announced("203.0.113.33", "2001:db8:f::1", "203.0.113.1", "203.0.113.49") == (
        Announcement(("203.0.113.1",), "l2"),
        Announcement(
            ("203.0.113.33", "2001:db8:f::1"),
            "bgp",
            peers=("a", "b"),
            communities=("64512:100", "64512:1:2", "no-export"),
            local_preference=200,
            aggregation_length=28,
            aggregation_length_v6=112,
        ),
    )


@pytest.mark.parametrize(
    ("ranges", "length", "address", "expected"),
    [
        (["203.0.113.0/24"], 24, "203.0.113.9", 24),
        (["203.0.113.0/24"], 28, "203.0.113.9", 28),
        (["203.0.113.0/28"], 8, "203.0.113.9", 28),
        # Ranges that follow each other are one.
        (["203.0.113.128/25", "203.0.113.0/25"], 24, "203.0.113.9", 24),
        (["203.0.113.0/25", "198.51.100.0/24"], 24, "203.0.113.9", 25),
        (["203.0.113.6-203.0.113.12"], 24, "203.0.113.9", 30),
        (["203.0.113.6-203.0.113.12"], 24, "203.0.113.12", 32),
        (["203.0.113.0/25"], 24, "203.0.113.200", 32),  # no longer in the pool
        (["2001:db8:f::/112"], 64, "2001:db8:f::1", 112),
    ],
)
def test_a_route_covers_only_addresses_of_its_pool(
    ranges: list[str], length: int, address: str, expected: int
) -> None:
    announce = {
        "method": "bgp",
        "aggregationLength": min(length, 32),
        "aggregationLengthV6": max(length, 16),
    }
    pools = {"main": {"addresses": ranges, "announce": announce}}
    config = Config(announce=AnnounceConfig("bgp"))
    (found,) = announced(address, config=config, state=state_of(pools=pools))
    six = ":" in address
    assert (found.aggregation_length_v6 if six else found.aggregation_length) == expected


def test_routes_of_two_pools_are_never_one() -> None:
    """The pools have other peers: a common route would be announced to the peers of both."""
    pools = {
        name: {
            "addresses": [range_],
            "announce": {"method": "bgp", "aggregationLength": 24, "peers": [name]},
        }
        for name, range_ in (("one", "203.0.113.0/28"), ("two", "203.0.113.16/28"))
    }
    found = announced(
        "203.0.113.1",
        "203.0.113.17",
        config=Config(announce=AnnounceConfig("bgp")),
        state=state_of(pools=pools),
    )
    assert [(each.peers, each.aggregation_length) for each in found] == [
        (("one",), 28),
        (("two",), 28),
    ]


def test_a_service_may_choose_peers() -> None:
    (found,) = announced("203.0.113.33", bgp_peers=" c, a ,,c")
    assert found.peers == ("a",), "the pool permits a and b"
    (found,) = announced("203.0.113.33", bgp_peers="c")
    assert found.peers == ()
    (found,) = announced("203.0.113.1", announce="bgp")
    assert found.peers is None
    (found,) = announced("203.0.113.1", announce="bgp", bgp_peers="c,d")
    assert found.peers == ("c", "d")


def test_the_weight_is_for_routes_only() -> None:
    plan = AnnouncePlan(CONFIG, "gw1")
    one, two = plan.announcements_of(
        state_of(), make_service(), ("203.0.113.1", "203.0.113.33"), weight=3
    )
    assert (one.method, one.weight, two.method, two.weight) == ("l2", 0, "bgp", 3)


def test_selectors_choose_candidates_among_nodes() -> None:
    nodes = [node("gw1", {"edge": ""}), node("gw2"), node("gw3", {"edge": ""})]
    (found,) = announced("203.0.113.17", state=state_of(*nodes), host="gw2")
    # In layer 2 the hosts that may not announce must know that others do.
    assert found.candidates == ("gw1", "gw3")
    assert announced("203.0.113.1", host="gw2")[0].candidates is None


def test_a_host_without_a_node_matches_no_selector() -> None:
    pool = PoolConfig("bgp", ("203.0.113.0/28",), announce=PoolAnnounce("bgp", (), (EDGE,)))
    config = Config(pools=(pool,), announce=AnnounceConfig())
    state = state_of(node("gw1", {"edge": ""}))
    hosts = ("gw1", "outside")
    assert [
        len(announced("203.0.113.1", config=config, state=state, host=host)) for host in hosts
    ] == [1, 0]


def test_one_of_several_selectors_is_sufficient() -> None:
    exists = LabelSelector(match_expressions=(LabelRequirement("rack", "In", ("r1", "r2")),))
    pool = PoolConfig("l2", ("203.0.113.0/28",), announce=PoolAnnounce("l2", (), (EDGE, exists)))
    config = Config(pools=(pool,), announce=AnnounceConfig())
    nodes = [node("a", {"rack": "r2"}), node("b", {"rack": "r3"}), node("c", {"edge": ""})]
    (found,) = announced("203.0.113.1", config=config, state=state_of(*nodes))
    assert found.candidates == ("a", "c")


WITHOUT_NETWORK = {"conditions": [{"type": "NetworkUnavailable", "status": "True"}]}


def test_a_host_without_network_announces_if_no_other_host_can_take_over() -> None:
    addresses = ("203.0.113.1", "203.0.113.17", "203.0.113.33")

    def leaving(state: State) -> list[bool]:
        return [announced(each, state=state, host="gw1")[0].leaving for each in addresses]

    own = node("gw1", {"edge": ""}, status=WITHOUT_NETWORK)
    assert leaving(state_of(own)) == [False, False, False]
    assert leaving(state_of(own, node("gw2", status=WITHOUT_NETWORK))) == [False] * 3
    # The pool of the second address selects nodes.
    assert leaving(state_of(own, node("gw2"))) == [True, False, True]
    state = state_of(own, node("gw2", {"edge": ""}))
    assert leaving(state) == [True, True, True]
    state.update_yields(False, frozenset())
    assert leaving(state) == [False, False, False]


def test_a_cordoned_host_yields_the_addresses_that_another_host_may_announce() -> None:
    """The pool of the second address selects nodes, and that of the third one names peers, of which
    one selects nodes."""
    peers = (
        BgpPeerConfig(name="a", asn=64512, address="192.0.2.1", node_selectors=(EDGE,)),
        BgpPeerConfig(name="c", asn=64512, address="192.0.2.3"),
    )
    config = msgspec.structs.replace(
        CONFIG, announce=AnnounceConfig("l2", bgp=BgpConfig(peers=peers))
    )
    addresses = ("203.0.113.1", "203.0.113.17", "203.0.113.33")
    own = node("gw1", {"edge": ""}, spec={"unschedulable": True})

    def leaving(state: State) -> list[bool]:
        found = [announced(each, config=config, state=state, host="gw1") for each in addresses]
        return [each[0].leaving for each in found]

    for labels, expected in (({}, [True, False, False]), ({"edge": ""}, [True, True, True])):
        state = state_of(own, node("gw2", labels))
        assert leaving(state) == [False, False, False], "no other host is known"
        state.update_yields(False, frozenset({"gw2"}))
        assert leaving(state) == expected
        state.update_yields(False, frozenset())
        assert leaving(state) == [False, False, False], "no other host is alive"
    state = state_of(node("gw1"), node("gw2"))
    state.update_yields(False, frozenset({"gw2"}))
    assert not announced("203.0.113.1", config=config, state=state, host="gw1")[0].leaving


@pytest.mark.parametrize(
    "more",
    [
        {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": ""}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
)
def test_a_host_that_is_excluded_or_deleted_leaves_even_if_it_is_the_last(
    more: dict[str, Any],
) -> None:
    state = state_of(node("gw1", status=WITHOUT_NETWORK, **more))
    state.update_yields(False, frozenset())
    assert announced("203.0.113.33", state=state)[0].leaving


SHUTTING_DOWN = {
    "type": "Ready",
    "status": "False",
    "message": "[container runtime is down, node is shutting down]",
}
"""What a kubelet reports that ends the pods before its host stops."""


@pytest.mark.parametrize(
    ("more", "leaving"),
    [
        ({}, False),
        ({"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": ""}}, True),
        ({"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": "false"}}, False),
        ({"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}}, True),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/unschedulable"}]}}, False),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, True),
        ({"status": {"conditions": [{"type": "NetworkUnavailable", "status": "True"}]}}, True),
        ({"status": {"conditions": [{"type": "NetworkUnavailable", "status": "False"}]}}, False),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, False),
        ({"status": {"conditions": [SHUTTING_DOWN]}}, True),
        ({"status": {"conditions": [{**SHUTTING_DOWN, "status": "Unknown"}]}}, False),
    ],
)
def test_a_host_leaves_when_its_own_node_must_get_no_traffic(
    more: dict[str, Any], leaving: bool
) -> None:
    state = state_of(node("gw1", **more), node("gw2"))
    for address in ("203.0.113.1", "203.0.113.33"):
        assert announced(address, state=state)[0].leaving == leaving
        assert not announced(address, state=state, host="gw2")[0].leaving
        assert not announced(address, state=state, host="outside")[0].leaving


def test_changes_of_nodes_and_pools_are_followed() -> None:
    config = Config(announce=AnnounceConfig())
    spec = {"addresses": ["203.0.113.0/28"], "announce": {"method": "l2"}}
    state = state_of(node("gw1"), pools={"main": spec})
    plan, service = AnnouncePlan(config, "gw1"), make_service()

    def found() -> tuple[Announcement, ...]:
        return plan.announcements_of(state, service, ("203.0.113.1",))

    def pool(**announce: object) -> None:
        changed = {"metadata": {"name": "main"}, "spec": spec | {"announce": announce}}
        state.update_pools({ObjectKey("", "main"): msgspec.convert(changed, AddressPool)})

    assert found() == (Announcement(("203.0.113.1",), "l2"),)
    selector = {"matchLabels": {"edge": ""}}
    pool(method="l2", nodeSelectors=[selector])
    assert found()[0].candidates == ()
    state.update_nodes({ObjectKey("", "gw1"): node("gw1", {"edge": ""})})
    assert found()[0].candidates == ("gw1",)
    pool(method="bgp")
    assert found() == (Announcement(("203.0.113.1",), "bgp"),)
    pool()
    assert found() == ()


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"spec": {"addresses": ["203.0.113.0/28", "203.0.113.64-203.0.113.200"]}},
        {"spec": {"addresses": ["203.0.113.0/28", "nonsense"]}},
    ],
    ids=["deleted", "overlaps", "invalid"],
)
def test_a_pool_that_assigns_nothing_any_more_still_announces(change: dict[str, Any]) -> None:
    spec = {"addresses": ["203.0.113.0/28"], "announce": {"method": "bgp", "peers": ["a"]}}
    other = {"addresses": ["203.0.113.64/26"], "announce": {"method": "l2"}}
    state = state_of(pools={"other": other})
    body = {
        "metadata": {"name": "main", "creationTimestamp": "2026-01-02T00:00:00Z"}
        | change.get("metadata", {}),
        "spec": spec | change.get("spec", {}),
    }
    state.update_pools({ObjectKey("", "main"): msgspec.convert(body, AddressPool)})
    config = Config(announce=AnnounceConfig())
    found = announced("203.0.113.1", "203.0.113.65", config=config, state=state)
    assert [(each.addresses, each.method) for each in found] == [
        (("203.0.113.1",), "bgp"),
        (("203.0.113.65",), "l2"),  # the pool that is in use takes precedence
    ]


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ({"method": "carrier-pigeon"}, None),
        ({"method": "bgp", "nodeSelectors": [{"matchLabel": {"a": "b"}}]}, None),
        ({"method": "l2", "interfaces": ["eth0/1"]}, None),
        ({"method": "bgp", "communities": ["70000:1", "64512:1"]}, "bgp"),
    ],
)
def test_a_section_that_cannot_be_read_announces_nothing(
    section: dict[str, Any], method: str | None
) -> None:
    state = state_of(pools={"main": {"addresses": ["203.0.113.0/28"], "announce": section}})
    found = announced("203.0.113.1", config=Config(announce=SECTION), state=state)
    assert [each.method for each in found] == ([method] if method else [])
    assert method is None or found[0].communities == ("64512:1",)


RESTRICTED: dict[str, Any] = {
    "method": "bgp",
    "nodeSelectors": [{"matchLabels": {"edge": ""}}],
    "peers": ["a"],
    "communities": ["no-export"],
}
INVALID: tuple[dict[str, Any], ...] = (
    {"nodeSelectors": [{"matchLabels": {"a b": ""}}]},
    {"interfaces": ["10.0.0.0/33"]},
)


def pool_of(section: Mapping[str, Any], **status: Any) -> dict[ObjectKey, AddressPool]:
    body = {
        "metadata": {"name": "main"},
        "spec": {"addresses": ["203.0.113.0/28"], "announce": section},
        "status": status,
    }
    return {ObjectKey("", "main"): msgspec.convert(body, AddressPool)}


def shown(name: str, address: str, **annotations: str) -> Service:
    given = {f"fairlead.io/{each}": text for each, text in annotations.items()}
    service = make_service(name, annotations=given)
    status = {"loadBalancer": {"ingress": [{"ip": address}]}}
    return msgspec.structs.replace(service, status=msgspec.convert(status, ServiceStatus))


@pytest.mark.parametrize("mistake", INVALID)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_mistake_in_a_pool_keeps_the_present_announcements(
    mistake: dict[str, Any], restarted: bool
) -> None:
    """The last valid section is in the memory of a process, or in the status of the pool."""
    config = Config(announce=AnnounceConfig())
    state = state_of(node("gw1", {"edge": ""}))
    web = shown("web", "203.0.113.1")
    api = shown("api", "203.0.113.2", announce="bgp", **{"bgp-peers": "a,b"})
    state.update_services({ObjectKey("default", each.metadata.name): each for each in (web, api)})
    state.update_pools(pool_of(RESTRICTED))
    plan = AnnouncePlan(config, "gw1")

    def found(service: Service, address: str) -> tuple[Announcement, ...]:
        return plan.announcements_of(state, service, (address,))

    before = found(web, "203.0.113.1"), found(api, "203.0.113.2")
    for (each,) in before:
        assert (each.peers, each.communities, each.candidates) == (
            ("a",),
            ("no-export",),
            ("gw1",),
        )
    if restarted:
        plan = AnnouncePlan(config, "gw1")
        state.update_pools(pool_of(RESTRICTED | mistake, announce=RESTRICTED))
    else:
        state.update_pools(pool_of(RESTRICTED | mistake))
    assert (found(web, "203.0.113.1"), found(api, "203.0.113.2")) == before
    new = shown("new", "203.0.113.3", announce="bgp")
    assert found(new, "203.0.113.3") == ()
    state.update_pools(pool_of({"method": "bgp"}))
    assert [each.peers for each in found(new, "203.0.113.3")] == [None]


@pytest.mark.parametrize("mistake", INVALID)
def test_a_service_cannot_bypass_a_pool_whose_section_was_never_valid(
    mistake: Mapping[str, Any],
) -> None:
    state = state_of(node("gw1"))
    web = shown("web", "203.0.113.1", announce="bgp")
    state.update_services({ObjectKey("default", "web"): web})
    state.update_pools(pool_of(mistake))
    config = Config(announce=AnnounceConfig())
    assert announced("203.0.113.1", config=config, state=state, service=web) == ()


RANGES = st.lists(st.tuples(st.integers(0, 250), st.integers(0, 30)), min_size=1, max_size=8).map(
    lambda some: [
        (f"198.51.100.{first}", f"198.51.100.{min(255, first + more)}") for first, more in some
    ]
)


@given(RANGES, st.sets(st.integers(0, 255), min_size=1, max_size=20))
def test_the_index_finds_the_pool_that_contains_an_address(
    ranges: list[tuple[str, str]], values: set[int]
) -> None:
    """Compared with a search through all pools: those in use, then the others by name."""
    pools = {
        f"pool{number}": {"addresses": [f"{first}-{last}"]}
        for number, (first, last) in enumerate(ranges)
    }
    state = state_of(pools=pools)
    index = PoolIndex(Config(), state.pools)

    def contains(name: str, address: str) -> bool:
        first, last = (ipaddress.ip_address(each) for each in ranges[int(name[4:])])
        return first <= ipaddress.ip_address(address) <= last  # type: ignore[operator]

    used: list[str] = []
    for name in sorted(pools):
        spans = [ranges[int(each[4:])] for each in used]
        first, last = (int(ipaddress.ip_address(each)) for each in ranges[int(name[4:])])
        if all(
            int(ipaddress.ip_address(high)) < first or last < int(ipaddress.ip_address(low))
            for low, high in spans
        ):
            used.append(name)
    order = [*used, *sorted(pools.keys() - set(used))]
    for value in values:
        address = f"198.51.100.{value}"
        wanted = next((name for name in order if contains(name, address)), None)
        found = index.find(address)
        assert (found.name if found else None) == wanted


@given(st.permutations(["203.0.113.1", "203.0.113.17", "203.0.113.33", "2001:db8:f::1"]))
def test_equal_clusters_give_equal_announcements(addresses: list[str]) -> None:
    state = state_of(node("gw1", {"edge": ""}), node("gw2"))
    shared = AnnouncePlan(CONFIG, "gw1")
    service = make_service()
    first = shared.announcements_of(state, service, addresses)
    again = AnnouncePlan(CONFIG, "gw1").announcements_of(state, service, addresses)
    assert first == again == shared.announcements_of(state, service, addresses)
    assert sorted(each for one in first for each in one.addresses) == sorted(addresses)


def test_the_section_of_bgp_does_not_change_the_announcement() -> None:
    config = msgspec.structs.replace(
        CONFIG, announce=AnnounceConfig("l2", bgp=BgpConfig(asn=64512))
    )
    assert announced("203.0.113.33", config=config) == announced("203.0.113.33")
