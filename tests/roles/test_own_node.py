"""A role knows whether this host is the Node of its name."""

from ipaddress import ip_address

import pytest

from fairlead.kube.objects import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from fairlead.roles.own_node import judge


def node(name: str, *addresses: tuple[str, str], pods: str = "") -> Node:
    status = NodeStatus(tuple(NodeAddress(*each) for each in addresses))
    return Node(ObjectMeta(name), NodeSpec(pod_cidrs=(pods,) if pods else ()), status)


NODES = {
    each.metadata.name: each
    for each in (
        node("node1", ("InternalIP", "192.0.2.21"), ("InternalIP", "2001:db8:1::21")),
        node("node2", ("InternalIP", "192.0.2.22"), ("ExternalIP", "198.51.100.22")),
        node("behind-nat", ("InternalIP", "203.0.113.7"), pods="10.244.7.0/24"),
        node("hostname", ("InternalIP", "not an address")),
    )
}
CASES: dict[str, tuple[str, list[str], str]] = {
    "its InternalIP": ("node1", ["127.0.0.1", "192.0.2.21"], ""),
    "its second InternalIP": ("node1", ["2001:db8:1::21"], ""),
    "its ExternalIP": ("node2", ["198.51.100.22"], ""),
    "its own and another's, as after a registration under another name": (
        "node1",
        ["192.0.2.21", "192.0.2.22"],
        "",
    ),
    "behind NAT, with the bridge of its pods": ("behind-nat", ["172.16.0.7", "10.244.7.1"], ""),
    "no Node has the name, as of a gateway outside of the cluster": ("gw1", ["192.0.2.11"], ""),
    "the InternalIP of another Node": ("node1", ["192.0.2.22"], "NameOfAnotherNode"),
    "the InternalIP of another Node, the own one behind NAT": (
        "behind-nat",
        ["192.0.2.21"],
        "NameOfAnotherNode",
    ),
    "only the ExternalIP of another Node": ("node1", ["198.51.100.22"], "NodeAddressNotHere"),
    "behind NAT, without pods": ("behind-nat", ["172.16.0.7"], "NodeAddressNotHere"),
    "the bridge of another Node's pods": ("node1", ["10.244.7.1"], "NodeAddressNotHere"),
    "no address yet": ("node1", ["127.0.0.1", "::1"], "NodeAddressNotHere"),
    "an address that is none": ("hostname", ["172.16.0.7"], "NodeAddressNotHere"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_addresses_of_the_host_show_whether_the_name_is_right(case: str) -> None:
    name, assigned, code = CASES[case]
    found = judge("node", name, NODES, {ip_address(each) for each in assigned})
    assert (found.code if found is not None else "") == code
    if found is not None:
        assert found.remedy
        assert found.blocks == ("Ready" if code == "NameOfAnotherNode" else "")
