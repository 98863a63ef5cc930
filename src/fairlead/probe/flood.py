"""Packets that open flows, each from another forged source: a flood, or a million flows whose
shares are counted.

In: a destination, how many flows, how fast. Out: raw packets with correct checksums: for `tcp` the
SYN of each flow, for `connection` the SYN and the ACK that follows it, for `udp` a datagram.
Answers are not read. Sources are forged addresses, with a range of ports each; equal arguments give
equal packets. Needs CAP_NET_RAW. Follows RFC 1071 (checksums), RFC 9293, RFC 768, raw(7) and
IPV6_HDRINCL of linux/in6.h."""

import itertools
import socket
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Literal

from fairlead.net.address import is_ipv6

Kind = Literal["tcp", "connection", "udp"]

FIRST_PORT, PORTS = 1024, 60000
_IPV6_HDRINCL = 36
_SYN, _ACK = 2, 16
_SEGMENTS = {"tcp": (_SYN,), "connection": (_SYN, _ACK)}
"""The flags of the segments of a flow; none for UDP."""


def packets(
    kind: Kind, source: str, destination: str, port: int, count: int
) -> Iterator[bytearray]:
    """Yield the packets of `count` flows: first of all ports of `source`, then of all ports of the
    next address. The buffer of a packet is reused for the next flow."""
    first, to = ip_address(source), ip_address(destination)
    protocol = socket.IPPROTO_UDP if kind == "udp" else socket.IPPROTO_TCP
    templates = [_template(flags, first, to, port) for flags in _SEGMENTS.get(kind, (None,))]
    made = [
        (bytearray(template), at, _base(template, at, first, protocol))
        for template, at in templates
    ]
    # The checksum is in the transport header: at offset 16 in TCP, at offset 6 in UDP. The source
    # port is at offset 0.
    checksum = 6 if kind == "udp" else 16
    address_at = (16 if first.version == 4 else 24) - 4
    low = int(first) & 0xFFFFFFFF
    for number in range(count):
        address, own_port = low + number // PORTS, FIRST_PORT + number % PORTS
        for packet, at, base in made:
            total = base + _words(address) + own_port
            total = (total & 0xFFFF) + (total >> 16)
            total = (total & 0xFFFF) + (total >> 16)
            struct.pack_into("!I", packet, address_at, address)
            struct.pack_into("!H", packet, at, own_port)
            # In UDP a checksum of zero means "no checksum" (RFC 768); all ones is the equivalent
            # value.
            struct.pack_into("!H", packet, at + checksum, ~total & 0xFFFF or 0xFFFF)
            yield packet


def _base(template: bytes, at: int, first: IPv4Address | IPv6Address, protocol: int) -> int:
    """Return the sum of a packet's words that the checksum covers, without the source port and the
    lower 32 bits of the source address."""
    addresses_at = at - 2 * len(first.packed)
    low = int(first) & 0xFFFFFFFF
    return _sum(template[addresses_at:]) - _words(low) + protocol + len(template) - at


def send(made: Iterator[bytearray], destination: str, *, per_s: float) -> int:
    """Send the packets at this rate, from the caller's network namespace. Return the number of
    packets that the kernel accepted."""
    six = is_ipv6(destination)
    family = socket.AF_INET6 if six else socket.AF_INET
    with socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        if six:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_HDRINCL, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
        began_s, sent = time.monotonic(), 0
        while batch := sum(
            1 for packet in itertools.islice(made, 64) if sock.sendto(packet, (destination, 0))
        ):
            sent += batch
            ahead_s = sent / per_s - (time.monotonic() - began_s)
            if ahead_s > 0.002:
                time.sleep(ahead_s)
        return sent


def _template(
    flags: int | None,
    source: IPv4Address | IPv6Address,
    destination: IPv4Address | IPv6Address,
    port: int,
) -> tuple[bytes, int]:
    """Return a packet whose checksum and source port are zero, and the offset of its transport
    header. `flags`: of TCP; None for UDP."""
    if flags is None:
        protocol = socket.IPPROTO_UDP
        upper = struct.pack("!HHHH", 0, port, 8 + 4, 0) + b"who?"
    else:
        protocol = socket.IPPROTO_TCP
        sequence, acknowledged = (1, 0) if flags == _SYN else (2, 1)
        upper = struct.pack(
            "!HHIIBBHHH", 0, port, sequence, acknowledged, 5 << 4, flags, 64240, 0, 0
        )
    if source.version == 4:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(upper), 0, 0, 64, protocol, 0)
    else:
        head = struct.pack("!IHBB", 6 << 28, len(upper), protocol, 64)
    head += source.packed + destination.packed
    return head + upper, len(head)


def _words(address: int) -> int:
    return (address >> 16) + (address & 0xFFFF)


def _sum(data: bytes) -> int:
    return sum(struct.unpack(f"!{len(data) // 2}H", data))
