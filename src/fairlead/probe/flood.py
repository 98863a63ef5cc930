"""Packets that open flows, each from another forged source: a flood, or a million flows whose
shares are counted.

In: a destination, how many, how fast. Out: raw packets, TCP SYNs or UDP datagrams, with correct
checksums. Answers are not read. Sources are forged addresses, with a range of ports each; equal
arguments give equal packets. Needs CAP_NET_RAW. Follows RFC 1071 (checksums), RFC 9293, RFC 768,
raw(7) and IPV6_HDRINCL of linux/in6.h."""

import itertools
import socket
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Literal

from fairlead.net.address import is_ipv6

Kind = Literal["tcp", "udp"]

FIRST_PORT, PORTS = 1024, 60000
_IPV6_HDRINCL = 36
_SYN = 2
_PROTOCOL = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}


def packets(
    kind: Kind, source: str, destination: str, port: int, count: int
) -> Iterator[bytearray]:
    """Yield `count` packets, each of another flow: first all ports of `source`, then all ports of
    the next address. The buffer of a packet is reused for the next one."""
    first = ip_address(source)
    template, at = _template(kind, first, ip_address(destination), port)
    packet = bytearray(template)
    # The checksum is in the transport header: at offset 16 in TCP, at offset 6 in UDP. The source
    # port is at offset 0.
    checksum_at = at + (16 if kind == "tcp" else 6)
    address_at = (16 if first.version == 4 else 24) - 4
    low = int(first) & 0xFFFFFFFF
    base = (
        _sum(template[address_at + 4 - len(first.packed) :])
        - _words(low)
        + _PROTOCOL[kind]
        + len(template)
        - at
    )
    for number in range(count):
        address, own_port = low + number // PORTS, FIRST_PORT + number % PORTS
        total = base + _words(address) + own_port
        total = (total & 0xFFFF) + (total >> 16)
        total = (total & 0xFFFF) + (total >> 16)
        struct.pack_into("!I", packet, address_at, address)
        struct.pack_into("!H", packet, at, own_port)
        # In UDP a checksum of zero means "no checksum" (RFC 768); all ones is the equivalent value.
        struct.pack_into("!H", packet, checksum_at, ~total & 0xFFFF or 0xFFFF)
        yield packet


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
    kind: Kind, source: IPv4Address | IPv6Address, destination: IPv4Address | IPv6Address, port: int
) -> tuple[bytes, int]:
    """Return a packet whose checksum and source port are zero, and the offset of its transport
    header."""
    if kind == "tcp":
        upper = struct.pack("!HHIIBBHHH", 0, port, 1, 0, 5 << 4, _SYN, 64240, 0, 0)
    else:
        upper = struct.pack("!HHHH", 0, port, 8 + 4, 0) + b"who?"
    if source.version == 4:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(upper), 0, 0, 64, _PROTOCOL[kind], 0)
    else:
        head = struct.pack("!IHBB", 6 << 28, len(upper), _PROTOCOL[kind], 64)
    head += source.packed + destination.packed
    return head + upper, len(head)


def _words(address: int) -> int:
    return (address >> 16) + (address & 0xFFFF)


def _sum(data: bytes) -> int:
    return sum(struct.unpack(f"!{len(data) // 2}H", data))
