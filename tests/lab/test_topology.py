"""The plan of a lab's network: addresses, names, limits."""

from ipaddress import ip_address, ip_network
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.config import parse_range
from fairlead.errors import Refused
from fairlead.lab.topology import (
    LAN,
    LAN2,
    NETWORKS,
    PODS,
    PODS_PER_NODE,
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
    topology = plan_topology("lab", *size[:3], far_nodes=size[3], chassis=9)
    hosts = topology.hosts
    addresses = list(chain.from_iterable(host.addresses for host in hosts))
    for values in (addresses, [host.name for host in hosts], [host.mac for host in hosts]):
        assert len(values) == len(set(values))
    reserved = set(chain.from_iterable(topology.default_routers(host) for host in hosts))
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
    assert topology.default_routers(topology.host("client1")) == ("198.51.100.1", "2001:db8:2::1")
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
    assert topology.default_routers(topology.host("node2")) == ("198.18.0.1", "2001:db8:3::1")
    assert topology.networks == ("lan", "wan", "far")
    assert plan_topology("x", 1, 1, 1).networks == ("lan", "wan")


@given(SIZES, st.integers(0, 4), st.booleans())
def test_vips_announced_by_l2_are_addresses_of_a_lan_that_no_port_has(
    size: tuple[int, int, int, int], lan_clients: int, on_nodes: bool
) -> None:
    topology = plan_topology(
        "lab",
        *size[:3],
        far_nodes=size[3],
        gateways_on_nodes=on_nodes,
        lan_clients=lan_clients,
        second_lan=True,
        announce="l2",
    )
    ports = [port for host in topology.hosts for port in host.ports]
    for values in (
        [address for port in ports for address in port.addresses],
        [port.mac for port in ports] + [port.switch_mac for port in ports],
        [port.switch_port for port in ports],
    ):
        assert len(values) == len(set(values))
    assert all(len(port.switch_port) <= 15 for port in ports)
    for port in ports:
        ipv4, ipv6 = NETWORKS[port.network]
        assert ip_address(port.addresses[0]) in ipv4
        assert ip_address(port.addresses[1]) in ipv6
    numbers = {int(ip_address(address)) for port in ports for address in port.addresses}
    for pool, (ipv4, ipv6) in zip(topology.pools.values(), (LAN, LAN2), strict=False):
        ends = ((int(ipv4[0]), int(ipv4[-1])), (int(ipv6[0]), int(ipv6[-1])))
        for text, (lowest, highest) in zip(pool, ends, strict=True):
            _, first, last = parse_range(text)
            assert lowest < first < last < highest
            assert not any(first <= number <= last for number in numbers)


def test_gateways_have_a_second_interface_in_a_second_lan() -> None:
    topology = plan_topology("x", 1, 1, 1, lan_clients=1, second_lan=True, announce="l2")
    assert topology.networks == ("lan", "wan", "lan2")
    gateway = topology.host("gw1")
    assert [(port.device, port.switch_port, port.network) for port in gateway.ports] == [
        ("eth0", "gw1", "lan"),
        ("eth1", "gw1-eth1", "lan2"),
    ]
    assert gateway.port("lan2").addresses == ("198.19.0.11", "2001:db8:4::b")
    assert [(host.name, host.network) for host in topology.of("client")] == [
        ("client1", "wan"),
        ("host1", "lan"),
        ("host2", "lan2"),
    ]
    assert list(topology.pools) == ["lab", "lan2"]
    with pytest.raises(Refused, match="node1 is not connected to lan2"):
        topology.host("node1").port("lan2")
    with pytest.raises(Refused, match="a LAN cannot have 5 clients"):
        plan_topology("x", 1, 1, 1, lan_clients=5, second_lan=True)


def test_with_gateways_on_nodes_there_are_no_other_gateways() -> None:
    topology = plan_topology("x", 2, 1, 1, gateways_on_nodes=True)
    assert [host.name for host in topology.gateways] == ["node1", "node2"]
    assert topology.of("gateway") == ()
