"""Addresses that the cluster itself uses: no Service gets one, and a Service that has one is not
served there."""

from collections.abc import Collection, Mapping
from ipaddress import ip_address, ip_network
from itertools import cycle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import plan_gateway

from fairlead.config import ApiServerConfig, ClusterConfig, Config, GatewayConfig, PoolConfig
from fairlead.errors import Refused
from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.objects import EndpointSlice, Node, ObjectKey, Service
from fairlead.model import LoadBalancer, NodeService, ServiceKey
from fairlead.plan.cluster import plan_node
from fairlead.plan.exclusions import (
    MAX_NODE_ADDRESSES,
    Exclusions,
    Use,
    of_config,
    of_hosts,
)
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.pool_status import PoolState, pool_states
from fairlead.plan.pools import read_pools
from fairlead.plan.projection import of_node
from fairlead.roles.controller import Planner
from fairlead.state import State

A, B = ServiceKey("default", "a"), ServiceKey("default", "b")


def make_service(
    key: ServiceKey,
    *,
    requested: str = "",
    held: Collection[str] = (),
    cluster_ip: str = "",
    created: str | None = None,
) -> Service:
    annotations = {"fairlead.io/addresses": requested} if requested else {}
    if held:
        annotations["fairlead.io/class"] = "fairlead.io/direct"
    return msgspec.convert(
        {
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "uid": f"uid-{key.name}",
                "creationTimestamp": created,
                "annotations": annotations,
                "managedFields": [{"manager": "fairlead-claim"}] if held else [],
            },
            "spec": {
                "type": "ClusterIP" if cluster_ip else "LoadBalancer",
                "clusterIPs": [cluster_ip or "10.96.0.1"],
                "ipFamilies": sorted({"IPv6" if ":" in each else "IPv4" for each in held}),
                "ports": [{"port": 80, "nodePort": 30080}],
            },
            "status": {
                "loadBalancer": {"ingress": [{"ip": each, "ipMode": "VIP"} for each in held]}
            },
        },
        Service,
    )


def make_node(
    name: str, *addresses: str, pods: Collection[str] = (), created: str | None = None
) -> Node:
    kinds = ("InternalIP", "ExternalIP")
    listed = [{"type": kind, "address": each} for kind, each in zip(cycle(kinds), addresses)]
    body = {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"podCIDRs": list(pods)},
        "status": {"addresses": listed},
    }
    return msgspec.convert(body, Node)


def make_pool(*addresses: str) -> AddressPool:
    return msgspec.convert(
        {"metadata": {"name": "lan"}, "spec": {"addresses": addresses}}, AddressPool
    )


def api_slice(*addresses: str, name: str = "kubernetes") -> EndpointSlice:
    return msgspec.convert(
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": "kubernetes"},
            },
            "endpoints": [{"addresses": [each]} for each in addresses],
            "ports": [{"name": "https", "port": 6443}],
        },
        EndpointSlice,
    )


class Site:
    """A controller's state and plan."""

    def __init__(self, *pool: str, config: Config | None = None) -> None:
        self.config = config or Config(default_class="fairlead.io/direct")
        self.state = State(())
        self.state.exclude("configuration", of_config(self.config))
        self.state.update_pools({ObjectKey("", "lan"): make_pool(*pool)})
        self.planner = Planner(self.state, self.config)

    def put(self, *services: Service) -> None:
        self.state.update_services({ObjectKey(*each.key): each for each in services})

    def put_nodes(self, *nodes: Node) -> None:
        """Store what the roles store of these Nodes."""
        self.state.update_nodes(
            {ObjectKey("", each.metadata.name): of_node(each) for each in nodes}
        )

    def delete_node(self, name: str) -> None:
        self.state.update_nodes({ObjectKey("", name): None})

    def plan(self, *keys: ServiceKey) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        return self.planner(keys)

    def addresses(self, key: ServiceKey) -> tuple[str, ...]:
        planned = self.plan(key)[key]
        return planned.addresses if isinstance(planned, LoadBalancer) else ()

    def pool(self) -> PoolState:
        self.plan()
        return pool_states(self.planner.ledger, self.state.pools, KeptAddressLimits(10, 30))["lan"]


@given(
    networks=st.lists(st.sampled_from(["10.0.0.0/24", "10.0.0.0/30", "10.0.0.9", "10.0.1.0/31"])),
    removed=st.integers(0, 9),
    address=st.sampled_from(["10.0.0.1", "10.0.0.9", "10.0.0.200", "10.0.1.1", "10.0.2.1"]),
)
def test_an_address_is_found_in_each_network_of_each_owner_until_it_is_removed(
    networks: list[str], removed: int, address: str
) -> None:
    exclusions = Exclusions()
    for number, network in enumerate(networks):
        exclusions.update(f"owner {number}", {network: Use("used")})
    if removed < len(networks):
        exclusions.update(f"owner {removed}", {})
        del networks[removed]
    inside = any(ip_address(address) in ip_network(each) for each in networks)
    assert (exclusions.find(address) is not None) == inside


def test_a_node_excludes_a_limited_number_of_addresses() -> None:
    """A kubelet writes the status of its own Node, and must not take the addresses of all
    Services."""
    site = Site("192.0.2.0/24")
    site.put_nodes(make_node("node1", *(f"192.0.2.{number}" for number in range(200))))
    hosts = [number for number in range(256) if site.state.exclusions.host_at(f"192.0.2.{number}")]
    assert hosts == list(range(MAX_NODE_ADDRESSES))


@pytest.mark.parametrize(
    ("cidr", "address", "counts"),
    [
        ("0.0.0.0/0", "10.2.0.1", False),
        ("10.0.0.0/7", "10.2.0.1", False),
        ("10.0.0.0/8", "10.2.0.1", True),
        ("::/0", "2001:db8::1", False),
        ("2001:db8::/31", "2001:db8::1", False),
        ("2001:db8::/32", "2001:db8::1", True),
    ],
)
def test_the_network_of_a_nodes_pods_counts_unless_it_is_too_large(
    cidr: str, address: str, counts: bool
) -> None:
    site = Site("192.0.2.20")
    site.put_nodes(make_node("node1", pods=[cidr, "192.0.2.0/24"]))
    assert (site.state.exclusions.find(address) is not None) == counts
    assert site.state.exclusions.find("192.0.2.20") is not None


def test_a_service_does_not_get_the_address_of_a_node() -> None:
    site = Site("192.0.2.20-192.0.2.23")
    site.put_nodes(make_node("node1", "192.0.2.21"), make_node("node2", "192.0.2.22", "192.0.2.20"))
    site.put(make_service(A), make_service(B))
    assert site.addresses(A) == ("192.0.2.23",)
    refused = site.plan(B)[B]
    assert isinstance(refused, Refused)
    assert "no IPv4 address is free in pool lan" in str(refused)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("10.1.0.21", "10.1.0.21 is an address of Node node1"),
        ("10.1.0.22", "10.1.0.22 is an address of Node node1"),
        ("10.1.0.31", "10.1.0.31 is an address of an API server"),
        ("10.1.0.32", "10.1.0.32 is an address of an API server"),
        ("10.1.0.33", "10.1.0.33 is an address of the API server's load balancer"),
        ("10.1.0.41", "10.1.0.41 is an address or next hop of gateway gw1"),
        ("10.1.0.42", "10.1.0.42 is an address of a gateway (gateway.peers)"),
        ("10.2.1.9", "10.2.1.9 is in 10.2.1.0/24, the pods of Node node1"),
        ("10.3.0.9", "10.3.0.9 is in 10.3.0.0/24, the pods (cluster.podCIDRs)"),
        ("10.4.0.9", "10.4.0.9 is in 10.4.0.0/24, the ClusterIPs (cluster.serviceCIDRs)"),
        ("10.5.0.9", "10.5.0.9 is the ClusterIP of Service default/b"),
    ],
)
def test_a_request_for_an_address_that_the_cluster_uses_is_refused(address: str, why: str) -> None:
    config = Config(
        default_class="fairlead.io/direct",
        cluster=ClusterConfig(pod_cidrs=("10.3.0.0/24",), service_cidrs=("10.4.0.0/24",)),
        gateway=GatewayConfig(
            peers=("10.1.0.42:9445",),
            api_server=ApiServerConfig(("10.1.0.33",), ("10.1.0.32:6443",)),
        ),
    )
    site = Site("10.0.0.0-10.255.255.255", config=config)
    site.put_nodes(make_node("node1", "10.1.0.21", "10.1.0.22", pods=["10.2.1.0/24"]))
    site.put(make_service(A, requested=address), make_service(B, cluster_ip="10.5.0.9"))
    site.state.update_slices({ObjectKey("default", "kubernetes"): api_slice("10.1.0.31")})
    site.state.exclude_gateways({"gw1": ["10.1.0.41"]})
    refused = site.plan(A)[A]
    assert isinstance(refused, Refused)
    assert why in str(refused)
    assert "request another address" in str(refused)


def test_a_pool_shows_which_of_its_addresses_are_excluded_and_why() -> None:
    site = Site("10.0.0.0-10.255.255.255", "192.0.2.20-192.0.2.29")
    assert site.pool().available == ((1 << 24) + 10, 0)
    site.put_nodes(make_node("node1", "192.0.2.21", pods=["10.2.0.0/16", "10.2.1.0/24"]))
    site.put_nodes(make_node("node2", "198.51.100.7"))
    state = site.pool()
    assert state.available == ((1 << 24) - (1 << 16) + 9, 0)
    (condition,) = [each for each in state.conditions if each.type == "Excluded"]
    assert (condition.status, condition.reason) == ("True", "AddressesExcluded")
    assert "192.0.2.21 (an address of Node node1)" in condition.message
    assert "10.2.0.0/16 (the pods of Node node1)" in condition.message
    assert "node2" not in condition.message
    site.delete_node("node1")
    assert site.pool().available == ((1 << 24) + 10, 0)


def test_the_status_of_a_pool_can_be_read_after_a_node_is_deleted_and_before_the_next_plan() -> (
    None
):
    site = Site("192.0.2.20-192.0.2.29")
    site.put_nodes(make_node("node1", "192.0.2.21"))
    before = site.pool()
    site.delete_node("node1")
    limits = KeptAddressLimits(10, 30)
    assert pool_states(site.planner.ledger, site.state.pools, limits)["lan"] == before
    assert site.pool() != before


def test_a_service_that_waits_gets_the_address_of_a_node_that_is_deleted() -> None:
    site = Site("192.0.2.21")
    site.put_nodes(make_node("node1", "192.0.2.21"))
    site.put(make_service(A))
    assert site.addresses(A) == ()
    with site.state.subscribers.subscription() as dirty:
        site.delete_node("node1")
        assert A in dirty
    assert site.addresses(A) == ("192.0.2.21",)


def test_a_service_that_waits_gets_the_address_of_an_api_server_that_is_gone() -> None:
    site = Site("192.0.2.31")
    name = ObjectKey("default", "kubernetes")
    site.state.update_slices({name: api_slice("192.0.2.31", "192.0.2.32")})
    site.put(make_service(A))
    assert site.addresses(A) == ()
    with site.state.subscribers.subscription() as dirty:
        site.state.update_slices({name: api_slice("192.0.2.32")})
        assert A in dirty
    assert site.addresses(A) == ("192.0.2.31",)


def test_only_the_slice_that_the_api_servers_write_names_api_servers() -> None:
    site = Site("192.0.2.31")
    slices = {"kubernetes": "192.0.2.32", "kubernetes-x7k2p": "192.0.2.31"}
    for name, address in slices.items():
        site.state.update_slices({ObjectKey("default", name): api_slice(address, name=name)})
    site.put(make_service(A))
    assert site.addresses(A) == ("192.0.2.31",)
    assert site.state.exclusions.host_at("192.0.2.32") is not None


def test_a_released_cluster_ip_is_given_to_a_service_that_waits_in_the_same_plan() -> None:
    site = Site("192.0.2.21")
    site.put(make_service(B, cluster_ip="192.0.2.21"), make_service(A))
    assert site.addresses(A) == ()
    site.state.update_services({ObjectKey(*B): None})
    planned = site.plan(B)[A]
    assert isinstance(planned, LoadBalancer)
    assert planned.addresses == ("192.0.2.21",)


@pytest.mark.parametrize("pool", ["192.0.2.20-192.0.2.29", "198.51.100.1"])
def test_a_service_that_has_the_address_of_a_new_node_keeps_it_and_is_not_ready(pool: str) -> None:
    site = Site(pool)
    site.put(make_service(A, held=["192.0.2.21", "2001:db8::1"]))
    site.put_nodes(make_node("node2", "192.0.2.99"))
    before = site.plan(A)[A]
    assert isinstance(before, LoadBalancer)
    site.put_nodes(make_node("node1", "192.0.2.21"))
    planned = site.plan(A)[A]
    assert isinstance(planned, LoadBalancer)
    assert planned.addresses == before.addresses == ("192.0.2.21", "2001:db8::1")
    (finding,) = [each for each in planned.notes if each.code == "AddressExcluded"]
    assert finding.blocks == "Ready"
    assert "192.0.2.21 is an address of Node node1" in finding.message
    site.delete_node("node1")
    assert site.plan(A)[A] == before


BEFORE, AFTER = "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"
CREATED = "2026-01-02T00:00:00Z"
"""When the Service was created."""


@pytest.mark.parametrize(
    ("node", "taken"),
    [
        (make_node("node1", "192.0.2.21", created=BEFORE), True),
        (make_node("node1", "192.0.2.21", created=CREATED), True),
        (make_node("node1", "192.0.2.21", created=AFTER), False),
        # An ExternalIP, and a second InternalIP.
        (make_node("node1", "192.0.2.9", "192.0.2.21", created=BEFORE), False),
        (make_node("node1", "192.0.2.9", "192.0.2.8", "192.0.2.21", created=BEFORE), False),
    ],
)
def test_a_node_does_not_take_an_address_that_a_service_had_first(node: Node, taken: bool) -> None:
    """A kubelet can write any address into the status of its Node. Gateways reach a node only at
    its first InternalIP, so the others are no reason to leave a Service."""
    site = Site("192.0.2.20-192.0.2.29")
    site.put(make_service(A, held=["192.0.2.21"], created=CREATED))
    site.put_nodes(make_node("node2", "192.0.2.99", created=BEFORE))
    before = plan_gateway(site.state, site.config, [A])[A]
    with site.state.subscribers.subscription() as dirty:
        site.put_nodes(node)
        assert A in dirty
    served = plan_gateway(site.state, site.config, [A])[A]
    assert isinstance(served, LoadBalancer)
    assert served.addresses == (() if taken else ("192.0.2.21",))
    assert taken or served == before
    assert site.state.belongs_to_host("192.0.2.21") == taken
    planned = site.plan(A)[A]
    assert isinstance(planned, LoadBalancer)
    assert planned.addresses == ("192.0.2.21",)
    found = {each.code: each for each in planned.notes if each.code.startswith("Address")}
    assert found.keys() == {"AddressExcluded" if taken else "AddressClaimed"}
    (finding,) = found.values()
    assert "192.0.2.21 is an address of Node node1" in finding.message
    assert finding.blocks == ("Ready" if taken else "")
    # No other Service gets the address, also when this one is gone.
    site.put(make_service(B, requested="192.0.2.21", created=AFTER))
    assert isinstance(site.plan(B)[B], Refused)
    site.state.update_services({ObjectKey(*A): None})
    assert site.state.belongs_to_host("192.0.2.21")
    assert isinstance(site.plan(A, B)[B], Refused)


def test_one_kubelet_takes_no_address_that_services_have() -> None:
    site = Site("192.0.2.0/24")
    keys = [ServiceKey("default", f"s{number}") for number in range(32)]
    for number, key in enumerate(keys):
        site.put(make_service(key, held=[f"192.0.2.{number}"], created=CREATED))
    claimed = ("198.51.100.7", *(f"192.0.2.{number}" for number in range(200)))
    site.put_nodes(make_node("node1", *claimed, created=BEFORE))
    planned = plan_gateway(site.state, site.config, keys)
    assert [
        each.addresses if isinstance(each, LoadBalancer) else each for each in planned.values()
    ] == [(f"192.0.2.{number}",) for number in range(32)]


def test_an_address_that_is_excluded_while_a_service_has_it_is_not_stranded() -> None:
    site = Site("192.0.2.20-192.0.2.29")
    grant = {
        "metadata": {"name": "192.0.2.21"},
        "spec": {
            "address": "192.0.2.21",
            "pool": "lan",
            "holders": [{"namespace": "default", "name": "a", "uid": "uid-a", "ports": ["TCP/80"]}],
        },
    }
    site.state.update_grants({ObjectKey("", "192.0.2.21"): msgspec.convert(grant, AddressGrant)})
    site.put(make_service(A, held=["192.0.2.21"]))
    site.put_nodes(make_node("node1", "192.0.2.21"))
    assert site.addresses(A) == ("192.0.2.21",)
    conditions = {each.type: each.status for each in site.pool().conditions}
    assert (conditions["Stranded"], conditions["Excluded"]) == ("False", "True")
    site.state.update_pools({ObjectKey("", "lan"): make_pool("192.0.2.22")})
    conditions = {each.type: each.status for each in site.pool().conditions}
    assert (conditions["Stranded"], conditions["Excluded"]) == ("True", "False")


def test_a_gateway_does_not_serve_a_service_at_the_address_of_a_node() -> None:
    site = Site("192.0.2.20-192.0.2.29")
    site.put(make_service(A, held=["192.0.2.21", "2001:db8::1"]))
    site.put_nodes(make_node("node2", "192.0.2.99", "2001:db8::99"))
    with site.state.subscribers.subscription() as dirty:
        site.put_nodes(make_node("node1", "192.0.2.21"))
        assert A in dirty
    planned = plan_gateway(site.state, site.config, [A])[A]
    assert isinstance(planned, LoadBalancer)
    assert planned.addresses == ("2001:db8::1",)
    assert [each.family for each in planned.listeners] == ["IPv6"]
    assert "AddressExcluded" in {each.code for each in planned.notes}


def test_a_node_does_not_serve_an_external_ip_that_is_the_address_of_a_host() -> None:
    """Any tenant may write spec.externalIPs, and could answer at the health port of a node."""
    state = State((), cluster_ips=False)
    service = make_service(A, cluster_ip="10.96.0.9")
    spec = msgspec.structs.replace(
        service.spec, external_ips=("192.0.2.021", "192.0.2.11", "203.0.113.7")
    )
    state.update_services({ObjectKey(*A): msgspec.structs.replace(service, spec=spec)})

    def served() -> tuple[tuple[str, ...], list[str]]:
        planned = plan_node(state, "node1", [A])[A]
        assert isinstance(planned, NodeService)
        return planned.ports[0].external_ips, [each.code for each in planned.notes]

    everything = ("192.0.2.11", "192.0.2.21", "203.0.113.7")
    assert served() == (everything, [])
    with state.subscribers.subscription() as dirty:
        node = make_node("node2", "192.0.2.21", pods=["10.96.0.0/24", "203.0.113.0/24"])
        state.update_nodes({ObjectKey("", "node2"): node})
        assert A in dirty
    assert served() == (("192.0.2.11", "203.0.113.7"), ["ExternalIPNotServed"])
    with state.subscribers.subscription() as dirty:
        state.exclude("this host", of_hosts(["192.0.2.11"], "an address of this node"))
        assert A in dirty
    assert served() == (("203.0.113.7",), ["ExternalIPNotServed"] * 2)
    state.update_nodes({ObjectKey("", "node2"): None})
    state.exclude("this host", {})
    assert served() == (everything, [])


def test_a_free_address_is_found_without_examining_the_excluded_ones() -> None:
    exclusions = Exclusions()
    for number in range(5000):
        pods = f"10.{number >> 8}.{number & 255}.0/24"
        exclusions.update(f"Node n{number}", {pods: Use("the pods of a Node")})
    (pool,) = read_pools((PoolConfig("big", ("10.0.0.0/8",)),), (), exclusions).in_order
    examined = []

    def taken(address: str) -> bool:
        examined.append(address)
        return False

    assert pool.lowest_free("IPv4", taken) == str(ip_address("10.0.0.0") + 5000 * 256)
    assert len(examined) == 1
    assert pool.size("IPv4") == (1 << 24) - 5000 * 256
