"""The other gateways of a cluster, with which a gateway exchanges flow entries.

In: the names of the gateways that have a Lease, the Nodes, the name of this gateway. Out: where to
connect to each of the others, and the addresses from which they may connect. Pure. Invariant: every
address is an InternalIP of a Node. A Lease contributes only the name of a Node, because gateways
and nodes may write each other's Leases. So a gateway outside of the cluster, which has no Node, is
not found."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fairlead.kube.objects import Node
from fairlead.net.address import is_ipv6


class GatewayPeers(NamedTuple):
    """The other gateways, sorted. `targets`: `address:port` of each. `addresses`: all addresses of
    their Nodes."""

    targets: tuple[str, ...] = ()
    addresses: frozenset[str] = frozenset()


def gateway_peers(
    names: Iterable[str], nodes: Mapping[str, Node], own: str, port: int
) -> GatewayPeers:
    """Return the gateways with these names, which are names of Nodes, without the gateway `own`. A
    gateway connects to another one at the first address of the family that its own first address
    has, or else at the first address."""
    own_addresses = _addresses(nodes.get(own))
    ipv6 = bool(own_addresses) and is_ipv6(own_addresses[0])
    found = {name: _addresses(nodes.get(name)) for name in sorted(set(names) - {own})}
    return GatewayPeers(
        tuple(
            _target(next((each for each in addresses if is_ipv6(each) == ipv6), addresses[0]), port)
            for addresses in found.values()
            if addresses
        ),
        frozenset(each for addresses in found.values() for each in addresses)
        - frozenset(own_addresses),
    )


def _addresses(node: Node | None) -> tuple[str, ...]:
    entries = node.status.addresses if node is not None else ()
    return tuple(each.address for each in entries if each.type == "InternalIP")


def _target(address: str, port: int) -> str:
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"
