"""The nftables table of the node's end of a tunnel: the TCP segment size that fits, and for VXLAN
the hosts that may send.

In: the tunnel, the destinations that may be reached through it, the sizes. Out: nft commands. Pure.
Invariants: one transaction creates the whole table and replaces an existing one. Only packets of
our tunnel, packets from our devices, and SYN-ACKs of connections to published addresses are
affected.

Segments: a client learns its maximum segment size from the SYN-ACK, which goes straight to the
client, past the gateway. So the node must announce the size that fits through the tunnel (`tcp
option maxseg size set` only ever reduces it).

VXLAN: without rules, every host on the network could send into a VXLAN device. Packets with our
network identifier are accepted from gateways only, and before conntrack, because their source ports
vary with the flow and each would become an entry. From our devices two kinds of packets are
accepted: packets to published addresses, and gateways' probes, which are TCP from a gateway's
address to a health port at the node's own address."""

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Network, collapse_addresses, ip_network
from typing import Literal, NamedTuple

from fairlead.config import TunnelConfig
from fairlead.net.address import is_ipv6
from fairlead.net.overhead import IP_HEADER, overhead

TABLE = "inet fairlead_tunnel"
COUNTERS = ("unknown_sender", "not_published")
"""The names of the counters of dropped packets: packets with our network identifier that no gateway
sent; packets from our devices to an address that is not published."""

_TCP_HEADER = 20

NODE_PORTS = "30000-32767"
"""The range of healthCheckNodePorts, unless kube-apiserver has another --service-node-port-range.
Probes of the whole range are accepted, so that a port that no process has opened yet answers with a
reset: silence would look as if the whole node were dead."""

Destination = str | int
"""A permitted destination of packets from the tunnel: a published address, or a health port (a
number) at the node's own address."""


def separate(destinations: Iterable[Destination]) -> tuple[list[str], list[int]]:
    """Return the addresses and the ports separately, each sorted."""
    known = tuple(destinations)
    return sorted(each for each in known if isinstance(each, str)), sorted(
        each for each in known if isinstance(each, int)
    )


class SegmentSizes(NamedTuple):
    """The greatest TCP segment sizes that fit through the tunnel, in bytes, for IPv4 and IPv6."""

    ipv4: int
    ipv6: int


def segment_sizes(
    kind: Literal["ipip", "vxlan"], mtu: int, node_addresses: Collection[str]
) -> SegmentSizes:
    """Return the segment sizes that fit through the tunnel over a path with this MTU. The outer
    header is of the packet's own address family if the node has an address of that family,
    otherwise of the other family."""
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
    destinations: Iterable[Destination],
    node_addresses: Collection[str] = (),
) -> str:
    """Return the commands that create the table and replace an existing one. `devices`: our VXLAN
    devices. `node_addresses`: the addresses at which gateways' probes are answered."""
    lines = [f"add table {TABLE}", f"delete table {TABLE}", f"add table {TABLE}"]
    for number, name in (("4", "ipv4_addr"), ("6", "ipv6_addr")):
        lines.append(f"add set {TABLE} addresses{number} {{ type {name}; }}")
    lines.append(f"add set {TABLE} health_ports {{ type inet_service; }}")
    lines += elements("add", destinations)
    lines += [
        f"add chain {TABLE} segments {{ type filter hook postrouting priority mangle; }}",
        *(f"add rule {TABLE} segments {rule}" for rule in _segments(sizes)),
    ]
    if tunnel.kind == "vxlan":
        lines += _arrivals(tunnel, devices, node_addresses)
    return "\n".join(lines) + "\n"


def elements(verb: Literal["add", "delete"], destinations: Iterable[Destination]) -> list[str]:
    """Return the commands that add or delete these destinations."""
    addresses, ports = separate(destinations)
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
    # The identifier is bytes 5 to 7 of the VXLAN header, which follows the 8 bytes of the UDP
    # header.
    ours = f"fib daddr type local udp dport {tunnel.port} @th,96,24 {tunnel.vni}"
    names = ", ".join(f'"{device}"' for device in devices)
    rules = [
        f"{ours} {ip} saddr {{ {', '.join(ranges)} }} notrack accept"
        for ip, ranges in _by_family(tunnel.gateways)
    ]
    rules.append(f"{ours} counter name unknown_sender drop")
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
