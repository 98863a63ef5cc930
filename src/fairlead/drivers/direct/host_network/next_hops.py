"""Which hop packets get to a node. Pure.

In: what the kernel says of the route to the node's address and of the interface there, and what is
configured. Out: a `NextHop`. Invariant: a hop to an address of this host is LOCAL, whatever is
configured; LINK only where no router is between, because the frame is addressed to the node itself.
A tunnel's outer source is the address that the kernel would send from, so that a node can tell its
gateways by their addresses."""

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
    """What is configured: `gateway.forwarding`, and of `tunnel` what gateways need. `gateways`: from whose
    addresses nodes take tunnelled packets; empty where it is not known here."""

    forwarding: ForwardingMethod = "auto"
    tunnel: TunnelKind = "none"
    vni: int = 7471
    vxlan_port: int = 4789
    gateways: Sequence[str] = ()


def next_hop_to(
    node: str, address: str, route: Route | None, interface: Interface | None, rules: Rules
) -> NextHop:
    """How packets get to the node at this address; `mac` is left open. Raises Unavailable where no
    route leads there, Refused where what is configured cannot be done."""
    if route is None or interface is None:
        raise Unavailable(
            f"there is no route to node {node} at {address}", fix="check the gateway's routes"
        )
    if route.here:
        return NextHop(LOCAL, route.interface, address)
    kind = _kind(node, address, route, rules)
    mtu = route.mtu or interface.mtu
    hop = NextHop(kind, interface.number, route.via or address, own_mac=interface.mac, mtu=mtu)
    # XDP cannot send on the device of a VLAN: it writes the tag itself, on the device below.
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
            fix="set gateway.forwarding to auto and tunnel.kind to ipip or vxlan, or put the gateway on "
            "the nodes' network",
        )
    return METHODS[wanted]


def _check_source(node: str, address: str, route: Route, rules: Rules) -> None:
    if not route.source:
        raise Unavailable(
            f"this gateway has no address to send tunnelled packets to node {node} at {address} "
            "from",
            fix="give it an address of that family",
        )
    source = ip_address(route.source)
    if rules.gateways and not any(source in ip_network(each) for each in rules.gateways):
        raise Refused(
            f"node {node} at {address} takes no tunnelled packets from {source}, which this "
            "gateway sends from",
            fix=f"add {source} to tunnel.gateways of gateways and nodes",
        )
