"""The plan of a lab's network: addresses, names, limits."""

from ipaddress import ip_address, ip_network
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.errors import Refused
from fairlead.lab.topology import (
    LAN,
    PODS,
    PODS_PER_NODE,
    POOL,
    VIPS,
    plan_topology,
    pod_network,
    prefix,
)

SIZES = st.tuples(st.integers(0, 120), st.integers(0, 9), st.integers(0, 200), st.integers(0, 80))


@given(SIZES)
def test_no_two_hosts_share_an_address_a_name_or_a_hardware_address(
    size: tuple[int, int, int, int],
) -> None:
    hosts = plan_topology("lab", *size[:3], far_nodes=size[3]).hosts
    addresses = list(chain.from_iterable(host.addresses for host in hosts))
    for values in (addresses, [host.name for host in hosts], [host.mac for host in hosts]):
        assert len(values) == len(set(values))
    reserved = set(chain.from_iterable(host.routers for host in hosts))
    assert not reserved & set(addresses)


@given(SIZES)
def test_pod_ranges_are_disjoint_and_inside_the_range_of_the_cluster(
    size: tuple[int, int, int, int],
) -> None:
    nodes = plan_topology("lab", *size[:3], far_nodes=size[3]).of("node")
    for family, length in ((0, 16), (1, 48)):
        ranges = [ip_network(node.pod_cidrs[family]) for node in nodes]
        assert len(ranges) == len(set(ranges))
        assert {part.supernet(new_prefix=length) for part in ranges} <= {PODS[family]}


def test_the_hosts_of_a_small_lab() -> None:
    topology = plan_topology("x", 2, 1, 1)
    assert {host.name: host.addresses for host in topology.hosts} == {
        "control": ("192.0.2.5", "2001:db8:1::5"),
        "gw1": ("192.0.2.11", "2001:db8:1::b"),
        "node1": ("192.0.2.21", "2001:db8:1::15"),
        "node2": ("192.0.2.22", "2001:db8:1::16"),
        "client1": ("198.51.100.11", "2001:db8:2::b"),
    }
    assert topology.host("node2").pod_cidrs == ("10.244.2.0/24", "2001:db8:244:2::/64")
    assert topology.host("client1").routers == ("198.51.100.1", "2001:db8:2::1")
    assert topology.namespace("node1") == "fl-x-node1"


@pytest.mark.parametrize("index", [0, 1, PODS_PER_NODE - 1])
def test_a_pod_is_inside_its_nodes_ranges(index: int) -> None:
    host = plan_topology("x", 200, 0, 0).of("node")[-1]
    place = pod_network(host, index)
    for address, cidr in zip(place.addresses, host.pod_cidrs, strict=True):
        assert ip_address(address) in ip_network(cidr)
    assert len(place.device) <= 15
    assert place.mac != place.node_mac


@pytest.mark.parametrize("name", ["", "A", "a-b", "1a", "a" * 21, "a/b", "ä"])
def test_an_ambiguous_name_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="not a valid lab name"):
        plan_topology(name, 1, 1, 1)


@pytest.mark.parametrize("size", [(201, 0, 0), (0, 10, 0), (0, 0, 201), (-1, 0, 0)])
def test_a_size_that_exceeds_the_addresses_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(Refused, match="cannot have"):
        plan_topology("x", *size)


def test_the_error_about_an_unknown_host_lists_the_hosts() -> None:
    with pytest.raises(Refused, match="router, control, gw1, node1"):
        plan_topology("x", 1, 1, 0).host("node2")


@given(
    st.from_regex(r"[a-z][a-z0-9]{0,19}", fullmatch=True),
    st.from_regex(r"[a-z][a-z0-9]{0,19}", fullmatch=True),
)
def test_no_lab_owns_the_namespaces_of_another(one: str, other: str) -> None:
    topology = plan_topology(other, 1, 1, 1)
    names = [topology.namespace("router"), topology.pod_namespace("default", "web-1")]
    assert any(name.startswith(prefix(one)) for name in names) == (one == other)


def test_vips_are_not_addresses_of_hosts() -> None:
    hosts = plan_topology("x", 200, 9, 200).hosts
    addresses = [ip_address(address) for host in hosts for address in host.addresses]
    assert not any(address in vips for address in addresses for vips in VIPS)


def test_far_nodes_come_after_the_others_and_are_on_another_network() -> None:
    topology = plan_topology("x", 1, 1, 1, far_nodes=1)
    assert [(node.name, node.network, node.addresses) for node in topology.of("node")] == [
        ("node1", "lan", ("192.0.2.21", "2001:db8:1::15")),
        ("node2", "far", ("198.18.0.22", "2001:db8:3::16")),
    ]
    assert topology.host("node2").routers == ("198.18.0.1", "2001:db8:3::1")
    assert topology.networks == ("lan", "wan", "far")
    assert plan_topology("x", 1, 1, 1).networks == ("lan", "wan")


def test_announced_addresses_are_of_the_lan_and_belong_to_no_host() -> None:
    topology = plan_topology("x", 200, 9, 1, announce="l2")
    for pool, text, family in zip(topology.pool, map(str, LAN), (0, 1), strict=True):
        network = ip_network(text)
        first, last = map(ip_address, pool.split("-"))
        assert first in network
        assert last in network
        assert int(last) < int(network.broadcast_address)
        assert all(
            int(ip_address(host.addresses[family])) < int(first)
            for host in topology.hosts
            if host.network == "lan"
        )
    assert plan_topology("x", 1, 1, 1).pool == POOL


def test_with_gateways_on_nodes_there_are_no_other_gateways() -> None:
    topology = plan_topology("x", 2, 1, 1, gateways_on_nodes=True)
    assert [host.name for host in topology.gateways] == ["node1", "node2"]
    assert topology.of("gateway") == ()
