"""Build and parse the messages of IPv6 neighbor discovery. Pure.

In: MAC addresses as 6 bytes, IPv6 addresses as text. Out: Ethernet frames, or a `Message`.
Follows RFC 4861, and RFC 4862 for the probes of duplicate address detection."""

import socket
import struct
from typing import NamedTuple

ETHERTYPE = 0x86DD
SOLICITATION, ADVERTISEMENT = 135, 136
ALL_NODES = "ff02::1"
UNSPECIFIED = "::"
_SOURCE_LINK_ADDRESS, _TARGET_LINK_ADDRESS = 1, 2
_SOLICITED, _OVERRIDE = 1 << 30, 1 << 29
_ICMPV6, _UNFORWARDED = 58, 255
_ETHERNET = struct.Struct("!6s6sH")
_IP = struct.Struct("!IHBB16s16s")
_BODY = struct.Struct("!BBHI16s")
_LINK_ADDRESS = struct.Struct("!BB6s")
_PSEUDO = struct.Struct("!16s16sII")
_OPTION_UNIT = 8


class Message(NamedTuple):
    """A neighbor solicitation or advertisement. `mac`: the link-layer address in its options; empty
    if there is none."""

    type: int
    source: str
    destination: str
    target: str
    mac: bytes
    solicited: bool
    override: bool
    source_mac: bytes

    @property
    def announces(self) -> bool:
        """Whether the sender announces the target as its own address, without having been asked."""
        return self.type == ADVERTISEMENT and self.override and not self.solicited


def solicited_node(address: str) -> str:
    """Return the multicast group in which the owner of the address is asked (RFC 4291, 2.7.1)."""
    packed = socket.inet_pton(socket.AF_INET6, address)
    prefix = socket.inet_pton(socket.AF_INET6, "ff02::1:ff00:0")
    return socket.inet_ntop(socket.AF_INET6, prefix[:13] + packed[13:])


def multicast_mac(group: str) -> bytes:
    """Return the MAC address of an IPv6 multicast group (RFC 2464, 7)."""
    return b"\x33\x33" + socket.inet_pton(socket.AF_INET6, group)[12:]


def announcement(mac: bytes, address: str) -> bytes:
    """Return an unsolicited advertisement to all nodes, which overrides the entries that neighbors
    have (RFC 4861, 7.2.6)."""
    return _frame(
        mac,
        multicast_mac(ALL_NODES),
        address,
        ALL_NODES,
        _BODY.pack(ADVERTISEMENT, 0, 0, _OVERRIDE, _packed(address))
        + _LINK_ADDRESS.pack(_TARGET_LINK_ADDRESS, 1, mac),
    )


def probe(mac: bytes, address: str) -> bytes:
    """Return a solicitation from the unspecified address, which asks whether any station uses the
    address, and changes no entry of a neighbor (RFC 4862, 5.4.2)."""
    group = solicited_node(address)
    return _frame(
        mac,
        multicast_mac(group),
        UNSPECIFIED,
        group,
        _BODY.pack(SOLICITATION, 0, 0, 0, _packed(address)),
    )


def solicitation(mac: bytes, source: str, address: str, *, to: bytes = b"") -> bytes:
    """Return a solicitation of the MAC address of `address`. `to`: the MAC address of a station
    whose reachability is verified; empty: ask the multicast group."""
    group = solicited_node(address)
    return _frame(
        mac,
        to or multicast_mac(group),
        source,
        address if to else group,
        _BODY.pack(SOLICITATION, 0, 0, 0, _packed(address))
        + _LINK_ADDRESS.pack(_SOURCE_LINK_ADDRESS, 1, mac),
    )


def parse(frame: bytes) -> Message | None:
    """Return the content of a frame; None if it is not a valid neighbor solicitation or
    advertisement (RFC 4861, 7.1), except for the addresses, which are not checked."""
    if len(frame) < _ETHERNET.size + _IP.size + _BODY.size:
        return None
    _, source_mac, ethertype = _ETHERNET.unpack_from(frame)
    first, length, protocol, hops, source, destination = _IP.unpack_from(frame, _ETHERNET.size)
    body = frame[_ETHERNET.size + _IP.size :][:length]
    if (ethertype, first >> 28, protocol, hops) != (ETHERTYPE, 6, _ICMPV6, _UNFORWARDED):
        return None
    if len(body) != length or length < _BODY.size or _checksum(source, destination, body):
        return None
    kind, code, _, flags, target = _BODY.unpack_from(body)
    if code or kind not in (SOLICITATION, ADVERTISEMENT):
        return None
    wanted = _SOURCE_LINK_ADDRESS if kind == SOLICITATION else _TARGET_LINK_ADDRESS
    mac, at = b"", _BODY.size
    while at < length:
        if at + 2 > length or not body[at + 1] or at + body[at + 1] * _OPTION_UNIT > length:
            return None
        if (body[at], body[at + 1]) == (wanted, 1):
            mac = body[at + 2 : at + _OPTION_UNIT]
        at += body[at + 1] * _OPTION_UNIT
    return Message(
        kind,
        _text(source),
        _text(destination),
        _text(target),
        mac,
        bool(flags & _SOLICITED),
        bool(flags & _OVERRIDE),
        source_mac,
    )


def _frame(mac: bytes, to: bytes, source: str, destination: str, body: bytes) -> bytes:
    addresses = _packed(source), _packed(destination)
    checksum = _checksum(*addresses, body)
    return (
        _ETHERNET.pack(to, mac, ETHERTYPE)
        + _IP.pack(6 << 28, len(body), _ICMPV6, _UNFORWARDED, *addresses)
        + body[:2]
        + checksum.to_bytes(2, "big")
        + body[4:]
    )


def _checksum(source: bytes, destination: bytes, body: bytes) -> int:
    """Return the checksum of a message whose checksum is 0; 0 for a message with a valid one."""
    data = _PSEUDO.pack(source, destination, len(body), _ICMPV6) + body + bytes(len(body) % 2)
    total = int(sum(struct.unpack(f"!{len(data) // 2}H", data)))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, address)


def _text(packed: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6, packed)
