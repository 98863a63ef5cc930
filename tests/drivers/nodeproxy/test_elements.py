"""The map elements of a Service, without a kernel."""

from collections.abc import Iterator
from ipaddress import ip_network

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers.nodeproxy.conftest import NODE4, NODE6, backends, port, service

from fairlead.drivers.nodeproxy.cleanup import flow_endpoints, stale_clients
from fairlead.drivers.nodeproxy.elements import (
    NO_SERVICE,
    Change,
    Element,
    Spec,
    canonical,
    difference,
    elements_of,
    parsed,
)
from fairlead.drivers.nodeproxy.skeleton import (
    chain_of,
    endpoint_map,
    of_family,
    on_demand,
    prerequisites,
)
from fairlead.model import Backend, NodeService, ServiceKey

NODES = (NODE4, NODE6)
LOCAL, REMOTE = backends("local1"), backends("remote1")


def of(spec: Spec, name: str) -> set[str]:
    return {str(element) for element in spec if element.map == name}


def test_the_elements_of_a_frontend_with_each_type_of_address() -> None:
    spec = elements_of(service(port(LOCAL + REMOTE), external="Local"), NODES)
    assert of(spec, "services4") == {
        '172.30.0.41 . 6 . 80 comment "default/web" : goto pick_2',
        '198.51.100.10 . 6 . 80 comment "default/web" : goto pick_2',
        '198.51.100.20 . 6 . 80 comment "default/web" : goto pick_2',
        '192.168.0.2 . 6 . 30001 comment "default/web" : goto pick_2',
    }
    assert of(spec, "outside4") == {
        "198.51.100.10 . 6 . 80 : goto pick_local_1",
        "198.51.100.20 . 6 . 80 : goto pick_local_1",
        "192.168.0.2 . 6 . 30001 : goto pick_local_1",
    }
    assert of(spec, "masquerade4") == {
        "172.30.0.41 . 6 . 80 : goto masquerade_strangers",
        "198.51.100.10 . 6 . 80 : goto masquerade_own",
        "198.51.100.20 . 6 . 80 : goto masquerade_own",
        "192.168.0.2 . 6 . 30001 : goto masquerade_own",
    }
    assert of(spec, "endpoints4_2") >= {
        "172.30.0.41 . 6 . 80 . 0 : 10.1.0.1 . 8080",
        "172.30.0.41 . 6 . 80 . 1 : 10.2.0.1 . 8080",
    }
    assert of(spec, "cluster_ips4") == {'172.30.0.41 comment "default/web"'}
    assert not [element for element in spec if element.map.removesuffix("_2").endswith("6")]


@pytest.mark.parametrize(
    ("internal", "external", "pods", "inside", "outside"),
    [
        ("Cluster", "Cluster", (), "goto refuse", None),
        ("Local", "Local", (), "goto refuse", None),
        ("Cluster", "Local", REMOTE, "goto pick_1", "drop"),
        ("Local", "Cluster", REMOTE, "drop", None),
        ("Local", "Local", REMOTE, "drop", "drop"),
        ("Local", "Local", LOCAL, "goto pick_1", "goto pick_local_1"),
    ],
)
def test_the_verdict_follows_from_policy_and_endpoints(
    internal: str, external: str, pods: tuple[Backend, ...], inside: str, outside: str | None
) -> None:
    spec = elements_of(service(port(pods), internal=internal, external=external), NODES)
    verdicts = {(element.map, element.key): element.value for element in spec}
    assert verdicts["services4", "172.30.0.41 . 6 . 80"] == inside
    assert verdicts.get(("outside4", "198.51.100.10 . 6 . 80")) == outside
    assert ("outside4", "172.30.0.41 . 6 . 80") not in verdicts


def test_each_family_gets_only_its_own_addresses() -> None:
    six = port(backends("local1", family="IPv6"), family="IPv6")
    spec = elements_of(service(port(LOCAL), six, source_ranges=("2001:db8:c::/64",)), NODES)
    assert of(spec, "services6") >= {'2001:db8::2 . 6 . 30001 comment "default/web" : goto pick_1'}
    assert of(spec, "allowed6") == {"2001:db8:f::10 . 6 . 80 . 2001:db8:c::/64"}
    assert of(spec, "allowed4") == of(spec, "restricted4") == set()


def test_source_ranges_are_merged_and_admit_the_address_itself_if_they_admit_the_node() -> None:
    spec = elements_of(
        service(port(LOCAL), source_ranges=(" 192.168.0.0/16", "192.168.7.0/24", "203.0.113.7/32")),
        NODES,
    )
    assert of(spec, "restricted4") == {"198.51.100.10 . 6 . 80"}
    assert of(spec, "allowed4") == {
        f"198.51.100.10 . 6 . 80 . {source}"
        for source in ("192.168.0.0/16", "203.0.113.7", "198.51.100.10")
    }
    several = (
        port(LOCAL, balancers=("198.51.100.10", "198.51.100.11")),
        port(LOCAL, number=81, balancers=("198.51.100.12",)),
    )
    spec = elements_of(service(*several, source_ranges=("192.168.0.0/16",)), NODES)
    for frontend in ("198.51.100.10 . 6 . 80", "198.51.100.11 . 6 . 80", "198.51.100.12 . 6 . 81"):
        allowed = {key for key in of(spec, "allowed4") if key.startswith(frontend)}
        assert allowed == {
            f"{frontend} . {source}"
            for source in ("192.168.0.0/16", "198.51.100.10/31", "198.51.100.12")
        }
    elsewhere = elements_of(service(*several, source_ranges=("203.0.113.0/24",)), NODES)
    assert {key.rpartition(" ")[2] for key in of(elsewhere, "allowed4")} == {"203.0.113.0/24"}
    everybody = elements_of(
        service(port(LOCAL), source_ranges=("0.0.0.0/0", "203.0.113.0/24")), NODES
    )
    assert of(everybody, "restricted4") == set()


class Addresses(tuple[str, ...]):
    """Addresses of a node that count how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[str]:
        Addresses.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("ports", [1, 100])
def test_the_source_ranges_of_a_service_are_compared_with_its_node_once(ports: int) -> None:
    """A Service may have 10,000 ranges, and many ports and addresses."""
    Addresses.reads = 0
    several = (port(LOCAL, number=80 + at) for at in range(ports))
    wanted = service(*several, source_ranges=("192.168.0.0/16", "203.0.113.7/32"))
    spec = elements_of(wanted, Addresses(NODES), NODES)
    assert len(of(spec, "allowed4")) == 3 * ports
    assert Addresses.reads == 1


def test_an_address_with_two_types_is_served_once() -> None:
    twice = msgspec.structs.replace(port(LOCAL), external_ips=("198.51.100.10",), node_port=0)
    assert len(of(elements_of(service(twice), NODES), "services4")) == 2


def test_addresses_are_parsed_as_by_kube_proxy() -> None:
    assert canonical("010.000.1.09") == "10.0.1.9"
    assert canonical("2001:DB8:0:0::1") == "2001:db8::1"
    assert canonical("::ffff:192.0.2.1") == "::ffff:192.0.2.1"


def test_elements_without_an_owner_are_listed() -> None:
    record = {
        "map": {"name": "services4", "elem": [[{"concat": ["192.0.2.1", 6, 80]}, {"drop": None}]]}
    }
    assert parsed([record]) == {
        NO_SERVICE: frozenset({Element("services4", "192.0.2.1 . 6 . 80", "drop")})
    }


def test_a_deletion_names_only_the_key() -> None:
    element = Element("services4", "192.0.2.1 . 6 . 80", "goto pick_1", "default/web")
    key = ServiceKey("default", "web")
    assert [str(change) for change in difference({}, {key: frozenset({element})})] == [
        "delete element inet fairlead services4 { 192.0.2.1 . 6 . 80 }"
    ]
    assert [str(change) for change in difference({key: frozenset({element})}, {})] == [
        'add element inet fairlead services4 { 192.0.2.1 . 6 . 80 comment "default/web" : goto '
        "pick_1 }"
    ]


pods = st.lists(st.sampled_from(["local1", "local2", "remote1"]), unique=True).map(
    lambda names: backends(*names)
)
policies = st.sampled_from(["Cluster", "Local"])
services = st.builds(
    lambda chosen, internal, external, affinity, ranges: service(
        port(chosen),
        internal=internal,
        external=external,
        affinity_timeout_s=affinity,
        source_ranges=ranges,
    ),
    pods,
    policies,
    policies,
    st.sampled_from([0, 60]),
    st.sampled_from([(), ("203.0.113.0/24",)]),
)


@given(services, services)
def test_applying_a_difference_gives_the_desired_elements_without_duplicate_keys(
    old: NodeService, new: NodeService
) -> None:
    before, after = ({old.service: elements_of(each, NODES)} for each in (old, new))
    there = set(before[old.service])
    keys = {(element.map, element.key) for element in there}
    for change in difference(after, before):
        assert isinstance(change, Change)
        if change.verb == "delete":
            there -= set(change.elements)
            keys -= {(element.map, element.key) for element in change.elements}
        else:
            assert not keys & {(element.map, element.key) for element in change.elements}
            there |= set(change.elements)
            keys |= {(element.map, element.key) for element in change.elements}
    assert there == after[new.service]
    assert difference(after, after) == ()


@given(services)
def test_every_verdict_finds_its_endpoints(intent: NodeService) -> None:
    """A frontend with the verdict `pick_N` has the slots 0 to N-1 in the map of that chain, and no
    other slots in any map."""
    spec = elements_of(intent, NODES)
    slots = {(e.map, e.key) for e in spec if e.map.startswith(("endpoints", "local_endpoints"))}
    wanted = set()
    for element in spec:
        if element.map in ("services4", "outside4") and "_" in element.value:
            kind, _, count = element.value.rpartition("_")
            name = f"{'local_endpoints' if kind.endswith('_local') else 'endpoints'}4_{count}"
            wanted |= {(name, f"{element.key} . {slot}") for slot in range(int(count))}
    assert slots == wanted


@pytest.mark.parametrize(("protocol", "number"), [("UDP", 17), ("SCTP", 132)])
def test_flows_are_checked_when_an_endpoint_is_removed_or_the_first_one_added(
    protocol: str, number: int
) -> None:
    def spec(*names: str) -> Spec:
        chosen = backends(*names, port=53)
        served = msgspec.structs.replace(
            port(chosen, protocol=protocol, balancers=(), node_port=0), external_ips=()
        )
        return elements_of(service(served), NODES)

    frontend = ("172.30.0.41", 80)
    one, two = ("10.1.0.1", 53), ("10.1.0.2", 53)
    assert flow_endpoints(spec("local1"), spec("local1", "local2")) == {}
    assert flow_endpoints(spec("local1", "local2"), spec("local1")) == {number: {frontend: {one}}}
    assert flow_endpoints(spec("local1"), spec("local2")) == {number: {frontend: {two}}}
    assert flow_endpoints(spec(), spec("local1")) == {number: {frontend: {one}}}
    assert flow_endpoints(frozenset(), spec("local1")) == {number: {frontend: {one}}}
    # No other endpoint could take over the flows, so they are unchanged, as in kube-proxy.
    assert flow_endpoints(spec("local1"), spec()) == {}
    assert flow_endpoints(spec("local1"), frozenset()) == {}
    assert flow_endpoints(frozenset(), elements_of(service(port(LOCAL)), NODES)) == {}


def test_udp_flows_may_lead_to_every_serving_endpoint() -> None:
    """Flows may also lead to serving endpoints that get no new flows. Only one of the three
    endpoints gets new flows here."""
    going = backends("local2", "remote1", port=53)
    served = port(
        backends("local1", port=53), protocol="UDP", serving=going, node_port=0, balancers=()
    )
    spec = elements_of(
        service(msgspec.structs.replace(served, external_ips=()), internal="Local"), NODES
    )
    called = "172.30.0.41 . 17 . 80"
    assert of(spec, "flows4") == {
        f"{called} . {pod} . 53" for pod in ("10.1.0.1", "10.1.0.2", "10.2.0.1")
    }
    assert of(spec, "services4") == {f'{called} comment "default/web" : goto pick_1'}


def test_recorded_clients_outside_keep_only_local_endpoints() -> None:
    intent = service(port(LOCAL + REMOTE), external="Local", affinity_timeout_s=60)
    specs = [elements_of(intent, NODES)]

    def client(address: str, endpoint: str, frontend: str = "198.51.100.10 . 6 . 80") -> Element:
        return Element("affinity4_0", f"{frontend} . {address}", endpoint)

    networks = [ip_network("10.0.0.0/8")]
    good = [client("10.1.0.9", "10.2.0.1 . 8080"), client("203.0.113.2", "10.1.0.1 . 8080")]
    bad = [
        client("203.0.113.2", "10.2.0.1 . 8080"),
        client("10.1.0.9", "10.2.0.9 . 8080"),
        client("10.1.0.9", "10.1.0.1 . 8080", "198.51.100.99 . 6 . 80"),
    ]
    assert stale_clients(good + bad, specs, networks) == bad
    # At a NodePort, a pod counts as an external client, because it may be on another node.
    at_node = client("10.1.0.9", "10.2.0.1 . 8080", f"{NODES[0]} . 6 . 30001")
    assert stale_clients([at_node], specs, networks) == []
    assert stale_clients([at_node], specs, networks, NODES) == [at_node]


def test_recorded_clients_of_a_service_without_affinity_are_deleted() -> None:
    remembered = Element("affinity4_0", "198.51.100.10 . 6 . 80 . 203.0.113.2", "10.1.0.1 . 8080")
    others = elements_of(
        service(port(LOCAL, cluster_ip="172.30.0.42", balancers=(), node_port=0), name="other"),
        NODES,
    )
    service_with_affinity, plain = (
        elements_of(service(port(LOCAL), affinity_timeout_s=timeout_s), NODES)
        for timeout_s in (60, 0)
    )
    assert stale_clients([remembered], [service_with_affinity, others], []) == []
    assert stale_clients([remembered], [plain, others], []) == [remembered]


def test_the_rules_of_chains_that_are_created_on_demand() -> None:
    assert prerequisites("remember6_600_3") == ("recall6_3", "remember6_600_3")
    assert prerequisites("pick_3") == ("pick_3",)
    assert [chain_of(endpoint_map(chain, "6")) for chain in ("pick_3", "pick_local_12")] == [
        "pick_3",
        "pick_local_12",
    ]
    assert chain_of("services4") == ""
    assert "ip saddr map @affinity4_3" in on_demand("recall4_3")
    assert on_demand("remember4_600_3").count("update @affinity4_3") == 3
    assert "numgen random mod 3 map @local_endpoints4_3" in on_demand("pick_local_3")
    with pytest.raises(ValueError, match="choose_3"):
        on_demand("choose_3")


def test_cidrs_of_a_family_do_not_overlap() -> None:
    assert of_family(
        "4", ["10.0.0.0/9", "10.128.0.0/9", "10.1.0.0/16", "fd00::/8", " 192.0.2.1/32"]
    ) == (
        "10.0.0.0/8",
        "192.0.2.1",
    )
    assert of_family("6", ["10.0.0.0/9"]) == ()
