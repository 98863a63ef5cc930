"""The nftables table of a tunnel's end: TCP segments that fit, and for VXLAN who may send.

In: the tunnel, the destinations that may be reached through it, the sizes. Out: nft commands. Pure.
Invariants: one transaction makes the table whole, and replaces one that was there. Only packets of
our tunnel, of devices that are ours, and SYN-ACKs of connections to published addresses are
touched.

Segments: a client learns from the SYN-ACK how long its segments may be, and the SYN-ACK goes
straight to it, past the gateway; so it is the node that has to name what fits through the tunnel
(`tcp option maxseg size set` only ever makes it less). VXLAN: any host on the network could send
into a VXLAN device. Packets with our identifier pass only from gateways, before conntrack (their
source ports vary with the flow: each would be an entry). From our devices only packets to published
addresses are accepted, and gateways' probes: TCP from a gateway's address to a health port at the
node's own address."""

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Network, collapse_addresses, ip_network
from typing import Literal, NamedTuple

from fairlead.config import TunnelConfig
from fairlead.net.address import is_ipv6
from fairlead.net.overhead import IP_HEADER, overhead

TABLE = "inet fairlead_tunnel"
COUNTERS = ("strangers", "not_published")
"""Packets dropped: with our network identifier from others than gateways; out of our devices to no
published address."""

_TCP_HEADER = 20

NODE_PORTS = "30000-32767"
"""The range of healthCheckNodePorts, unless kube-apiserver has another --service-node-port-range. A
port of the range that no process has opened yet has to answer with a reset: silence would look as
if the whole node were dead."""

Opening = str | int
"""A destination of packets from the tunnel: a published address, or a health port (a number) at the
node's own address."""


def apart(openings: Iterable[Opening]) -> tuple[list[str], list[int]]:
    """The addresses and the ports, sorted."""
    known = tuple(openings)
    return sorted(each for each in known if isinstance(each, str)), sorted(
        each for each in known if isinstance(each, int)
    )


class SegmentSizes(NamedTuple):
    """The longest TCP segments that fit, over IPv4 and IPv6."""

    ipv4: int
    ipv6: int


def segment_sizes(
    kind: Literal["ipip", "vxlan"], mtu: int, node_addresses: Collection[str]
) -> SegmentSizes:
    """What fits through the tunnel over a path of this MTU. Packets travel in envelopes of their
    own family where the node has an address of it, else in those of the other."""
    has = {is_ipv6(address) for address in node_addresses}
    sizes = []
    for ipv6 in (False, True):
        outer_ipv6 = ipv6 if ipv6 in has else not ipv6
        sizes.append(
            mtu
            - overhead(vxlan=kind == "vxlan", outer_ipv6=outer_ipv6)
            - IP_HEADER[ipv6]
            - _TCP_HEADER
        )
    return SegmentSizes(*sizes)


def table(
    tunnel: TunnelConfig,
    devices: Sequence[str],
    sizes: SegmentSizes,
    openings: Iterable[Opening],
    node_addresses: Collection[str] = (),
) -> str:
    """The commands that make the table, and replace an existing one. `devices`: our VXLAN devices.
    `node_addresses`: the addresses at which gateways' probes are answered."""
    lines = [f"add table {TABLE}", f"delete table {TABLE}", f"add table {TABLE}"]
    for number, name in (("4", "ipv4_addr"), ("6", "ipv6_addr")):
        lines.append(f"add set {TABLE} addresses{number} {{ type {name}; }}")
    lines.append(f"add set {TABLE} health_ports {{ type inet_service; }}")
    lines += elements("add", openings)
    lines += [
        f"add chain {TABLE} segments {{ type filter hook postrouting priority mangle; }}",
        *(f"add rule {TABLE} segments {rule}" for rule in _segments(sizes)),
    ]
    if tunnel.kind == "vxlan":
        lines += _arrivals(tunnel, devices, node_addresses)
    return "\n".join(lines) + "\n"


def elements(verb: Literal["add", "delete"], openings: Iterable[Opening]) -> list[str]:
    """The commands that admit packets for these destinations, or stop admitting them."""
    addresses, ports = apart(openings)
    sets: dict[str, list[str]] = {
        "addresses4": [],
        "addresses6": [],
        "health_ports": [str(port) for port in ports],
    }
    for address in addresses:
        sets["addresses6" if is_ipv6(address) else "addresses4"].append(address)
    return [
        f"{verb} element {TABLE} {name} {{ {', '.join(each)} }}"
        for name, each in sets.items()
        if each
    ]


def _segments(sizes: SegmentSizes) -> list[str]:
    opened = "ct direction reply tcp flags & (syn | ack) == syn | ack"
    return [
        f"meta nfproto ipv4 {opened} ct original ip daddr @addresses4 tcp option maxseg size set "
        f"{sizes.ipv4}",
        f"meta nfproto ipv6 {opened} ct original ip6 daddr @addresses6 tcp option maxseg size "
        f"set {sizes.ipv6}",
    ]


def _arrivals(
    tunnel: TunnelConfig, devices: Sequence[str], node_addresses: Collection[str]
) -> list[str]:
    # The identifier is the fifth to seventh byte of the VXLAN header, which follows eight bytes of
    # UDP.
    ours = f"fib daddr type local udp dport {tunnel.port} @th,96,24 {tunnel.vni}"
    names = ", ".join(f'"{device}"' for device in devices)
    rules = [
        f"{ours} {ip} saddr {{ {', '.join(ranges)} }} notrack accept"
        for ip, ranges in _by_family(tunnel.gateways)
    ]
    rules.append(f"{ours} counter name strangers drop")
    if devices:
        rules += [
            f"iifname {{ {names} }} {ip} saddr {{ {', '.join(ranges)} }} {ip} daddr {{ "
            f"{', '.join(own)} }}"
            f" tcp dport {ports} accept"
            for ip, ranges in _by_family(tunnel.gateways)
            for ports in (NODE_PORTS, "@health_ports")
            if (own := sorted(each for each in node_addresses if is_ipv6(each) == (ip == "ip6")))
        ]
        rules += [
            f"iifname {{ {names} }} ip daddr != @addresses4 counter name not_published drop",
            f"iifname {{ {names} }} ip6 daddr != @addresses6 counter name not_published drop",
        ]
    return [
        *(f"add counter {TABLE} {name}" for name in COUNTERS),
        f"add chain {TABLE} arrivals {{ type filter hook prerouting priority raw; }}",
        *(f"add rule {TABLE} arrivals {rule}" for rule in rules),
    ]


def _by_family(cidrs: Iterable[str]) -> list[tuple[str, list[str]]]:
    networks = [ip_network(cidr) for cidr in cidrs]
    four = [network for network in networks if isinstance(network, IPv4Network)]
    six = [network for network in networks if not isinstance(network, IPv4Network)]
    merged = (
        ("ip", [str(each) for each in collapse_addresses(four)]),
        ("ip6", [str(each) for each in collapse_addresses(six)]),
    )
    return [(ip, ranges) for ip, ranges in merged if ranges]
