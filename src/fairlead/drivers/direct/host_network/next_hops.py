"""How packets get to a node. Pure.

In: the kernel's route to the node's address, the interface of the route, and the configuration.
Out: a `NextHop`. Invariant: an address of this host gives LOCAL, regardless of the configuration;
LINK is used only without a router in between, because the frame is addressed to the node itself.
The outer source address of a tunnel is the address that the kernel would send from, so that a node
can recognize its gateways by their addresses.
"""

from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from fairlead.config import ForwardingMethod, TunnelKind
from fairlead.drivers.direct.maps.records import IPIP, LINK, LOCAL, VXLAN, NextHop
from fairlead.errors import Refused, Unavailable
from fairlead.net.address import is_ipv6
from fairlead.net.overhead import overhead
from fairlead.net.routes import Interface, Route

METHODS: dict[str, int] = {"l2": LINK, "ipip": IPIP, "vxlan": VXLAN}
METHOD_NAMES = {LINK: "l2", LOCAL: "here", IPIP: "ipip", VXLAN: "vxlan"}


class Rules(NamedTuple):
    """The configuration: `gateway.forwarding`, and the parts of `tunnel` that gateways need.

    `gateways`: the sources from which nodes accept tunnelled packets; empty if they are not
    configured here.
    """

    forwarding: ForwardingMethod = "auto"
    tunnel: TunnelKind = "none"
    vni: int = 7471
    vxlan_port: int = 4789
    gateways: Sequence[str] = ()


def next_hop_to(
    node: str, address: str, route: Route | None, interface: Interface | None, rules: Rules
) -> NextHop:
    """Return how packets get to the node at this address, without `mac`. Raise Unavailable if no
    route leads there, and Refused if the configuration cannot be applied."""
    if route is None or interface is None:
        raise Unavailable(
            f"there is no route to node {node} at {address}", fix="check the gateway's routes"
        )
    if route.here:
        return NextHop(LOCAL, route.interface, address)
    kind = _kind(node, address, route, rules)
    mtu = route.mtu or interface.mtu
    hop = NextHop(kind, interface.number, route.via or address, own_mac=interface.mac, mtu=mtu)
    # XDP cannot send on a VLAN device: it writes the tag itself, and sends on the parent device.
    hop = hop._replace(lower=interface.parent, tag=interface.vlan)
    if kind == LINK:
        return hop
    _check_source(node, address, route, rules)
    mtu -= overhead(vxlan=kind == VXLAN, outer_ipv6=is_ipv6(address))
    vni = rules.vni if kind == VXLAN else 0
    return hop._replace(outer_source=route.source, outer_destination=address, mtu=mtu, vni=vni)


def _kind(node: str, address: str, route: Route, rules: Rules) -> int:
    wanted = rules.forwarding
    if wanted == "auto":
        if not route.via:
            return LINK
        if rules.tunnel == "none":
            raise Refused(
                f"node {node} at {address} is not on a link with this gateway: the route leads "
                f"through {route.via}",
                fix="put the gateway on the nodes' network, or set tunnel.kind for gateways and "
                "nodes",
            )
        return METHODS[rules.tunnel]
    if wanted == "l2" and route.via:
        raise Refused(
            f"node {node} at {address} is not on a link with this gateway: the route leads "
            f"through {route.via}",
            fix="set gateway.forwarding to auto and tunnel.kind to ipip or vxlan, or put the "
            "gateway on the nodes' network",
        )
    return METHODS[wanted]


def _check_source(node: str, address: str, route: Route, rules: Rules) -> None:
    if not route.source:
        raise Unavailable(
            f"this gateway has no source address for tunnelled packets to node {node} at {address}",
            fix="give the gateway an address of that family",
        )
    source = ip_address(route.source)
    if rules.gateways and not any(source in ip_network(each) for each in rules.gateways):
        raise Refused(
            f"node {node} at {address} does not accept tunnelled packets from {source}, the "
            "source address of this gateway",
            fix=f"add {source} to tunnel.gateways of gateways and nodes",
        )
