"""Which other gateways a gateway finds in the cluster."""

from collections.abc import Sequence

from fairlead.kube.objects import Node, NodeAddress, NodeStatus, ObjectMeta
from fairlead.plan.gateway_peers import GatewayPeers, gateway_peers


def nodes(**addresses: Sequence[str]) -> dict[str, Node]:
    return {
        name: Node(
            ObjectMeta(name),
            status=NodeStatus(
                (
                    *(NodeAddress("InternalIP", each) for each in found),
                    NodeAddress("ExternalIP", "198.51.100.1"),
                )
            ),
        )
        for name, found in addresses.items()
    }


def test_the_others_are_found_at_the_addresses_of_their_nodes() -> None:
    known = nodes(
        own=["192.0.2.1", "2001:db8::1"],
        one=["2001:db8::2", "192.0.2.2"],
        two=["2001:db8::3"],
        worker=["192.0.2.9"],
    )
    found = gateway_peers(["two", "own", "one", "one"], known, "own", 9445)
    assert found == GatewayPeers(
        ("192.0.2.2:9445", "[2001:db8::3]:9445"),
        frozenset({"192.0.2.2", "2001:db8::2", "2001:db8::3"}),
    )
    ipv6 = gateway_peers(["own", "one"], known, "two", 9446)
    assert ipv6.targets == ("[2001:db8::2]:9446", "[2001:db8::1]:9446")


def test_a_lease_names_no_address_of_its_own() -> None:
    """A gateway without a Node, or whose Node shows no address, cannot be a peer."""
    known = nodes(own=["192.0.2.1"], bare=[])
    assert gateway_peers(["bare", "outside", "192.0.2.66"], known, "own", 9445) == GatewayPeers()


def test_a_node_that_shows_the_address_of_this_host_adds_no_address() -> None:
    known = nodes(own=["192.0.2.1"], twin=["192.0.2.1"])
    assert gateway_peers(["twin"], known, "own", 9445).addresses == frozenset()
