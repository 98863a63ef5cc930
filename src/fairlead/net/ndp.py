"""Build and parse the messages of IPv6 neighbor discovery. Pure.

In: MAC addresses as 6 bytes, IPv6 addresses as text. Out: Ethernet frames, or a `Message`. Follows
RFC 4861, and RFC 4862 for the probes of duplicate address detection."""

import socket
import struct
from typing import NamedTuple

ETHERTYPE = 0x86DD
SOLICITATION, ADVERTISEMENT = 135, 136
ALL_NODES = "ff02::1"
UNSPECIFIED = "::"
ADVERTISES = ((20, 58), (21, 255), (54, ADVERTISEMENT))
"""Bytes that the frame of each advertisement has, each with its offset: the next header, the hop
limit and the type of the message."""
_SOURCE_LINK_ADDRESS, _TARGET_LINK_ADDRESS = 1, 2
_SOLICITED, _OVERRIDE = 1 << 30, 1 << 29
_ICMPV6, _UNFORWARDED = 58, 255
"""The hop limit 255 proves that no router has forwarded the message."""
_ETHERNET, _IP = struct.Struct("!6s6sH"), struct.Struct("!IHBB16s16s")
_BODY, _LINK_ADDRESS = struct.Struct("!BBHI16s"), struct.Struct("!BB6s")
_PSEUDO_HEADER = struct.Struct("!16s16sII")
_OPTION_UNIT = 8
_MULTICAST = 0xFF
_GROUPS = socket.inet_pton(socket.AF_INET6, "ff02::1:ff00:0")[:13]
"""The prefix of the solicited-node multicast groups."""


class Message(NamedTuple):
    """A neighbor solicitation or advertisement. `mac`: the link-layer address in its options; empty
    if there is none. `from_mac` and `to_mac`: the addresses of the Ethernet header."""

    type: int
    source: str
    destination: str
    target: str
    mac: bytes
    solicited: bool
    override: bool
    from_mac: bytes
    to_mac: bytes

    @property
    def announces(self) -> bool:
        """Whether the sender announces the target as its own address, without having been asked."""
        return self.type == ADVERTISEMENT and self.override and not self.solicited


def solicited_node(address: str) -> str:
    """Return the multicast group in which the owner of the address is asked (RFC 4291, 2.7.1)."""
    return _text(_GROUPS + _packed(address)[13:])


def multicast_mac(group: str) -> bytes:
    """Return the MAC address of an IPv6 multicast group (RFC 2464, 7)."""
    return b"\x33\x33" + _packed(group)[12:]


def announcement(mac: bytes, address: str) -> bytes:
    """Return an advertisement to all nodes that nobody has solicited. Neighbors replace the MAC
    address that they know (RFC 4861, 7.2.6)."""
    return _advertisement(mac, address, multicast_mac(ALL_NODES), ALL_NODES, _OVERRIDE)


def advertisement(mac: bytes, address: str, to: bytes, target: str) -> bytes:
    """Return the answer that `address` is at this MAC address, to the station with the MAC address
    `to` and the address `target` (RFC 4861, 7.2.4)."""
    return _advertisement(mac, address, to, target, _SOLICITED | _OVERRIDE)


def probe(mac: bytes, address: str) -> bytes:
    """Return a solicitation from the unspecified address, which asks whether any station uses the
    address, and changes no entry of a neighbor (RFC 4862, 5.4.2)."""
    group = solicited_node(address)
    body = _BODY.pack(SOLICITATION, 0, 0, 0, _packed(address))
    return _frame(mac, multicast_mac(group), UNSPECIFIED, group, body)


def solicitation(mac: bytes, source: str, address: str, *, to: bytes = b"") -> bytes:
    """Return a solicitation of the MAC address of `address`. `to`: the MAC address of the station
    to ask whether it still has the address; empty: ask the multicast group."""
    group = solicited_node(address)
    body = _BODY.pack(SOLICITATION, 0, 0, 0, _packed(address))
    body += _LINK_ADDRESS.pack(_SOURCE_LINK_ADDRESS, 1, mac)
    return _frame(mac, to or multicast_mac(group), source, address if to else group, body)


def question(mac: bytes, source: str, address: str, to: bytes) -> bytes:
    """Return a solicitation that asks the station with the MAC address `to` alone whether it has
    the address. It does not contain the sender's MAC address, so it changes no entry of a neighbor;
    hosts include it (RFC 4861, 7.2.2)."""
    return _frame(mac, to, source, address, _BODY.pack(SOLICITATION, 0, 0, 0, _packed(address)))


def link_local(mac: bytes) -> str:
    """Return the link-local address that an interface with this MAC address has by default (RFC
    4291, appendix A)."""
    return _text(b"\xfe\x80" + bytes(6) + bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:])


def parse(frame: bytes) -> Message | None:
    """Return the content of a frame; None if it is not a valid neighbor solicitation or
    advertisement (RFC 4861, 7.1.1 and 7.1.2)."""
    if len(frame) < _ETHERNET.size + _IP.size + _BODY.size:
        return None
    to_mac, from_mac, ethertype = _ETHERNET.unpack_from(frame)
    first, length, protocol, hops, source, destination = _IP.unpack_from(frame, _ETHERNET.size)
    body = frame[_ETHERNET.size + _IP.size :][:length]
    if (ethertype, first >> 28, protocol, hops) != (ETHERTYPE, 6, _ICMPV6, _UNFORWARDED):
        return None
    if len(body) != length or length < _BODY.size or _checksum(source, destination, body):
        return None
    kind, code, _, flags, target = _BODY.unpack_from(body)
    options = _options(body[_BODY.size :])
    if code or kind not in (SOLICITATION, ADVERTISEMENT) or options is None:
        return None
    wanted = _SOURCE_LINK_ADDRESS if kind == SOLICITATION else _TARGET_LINK_ADDRESS
    message = Message(
        kind,
        _text(source),
        _text(destination),
        _text(target),
        options.get(wanted, b""),
        bool(flags & _SOLICITED),
        bool(flags & _OVERRIDE),
        from_mac,
        to_mac,
    )
    return message if _is_consistent(message, destination, target) else None


def _is_consistent(message: Message, destination: bytes, target: bytes) -> bool:
    """Whether the addresses of the message fit together."""
    if target[0] == _MULTICAST:
        return False
    if message.type == ADVERTISEMENT:
        return not (message.solicited and destination[0] == _MULTICAST)
    is_probe = message.source == UNSPECIFIED
    return not is_probe or (destination.startswith(_GROUPS) and not message.mac)


def _options(data: bytes) -> dict[int, bytes] | None:
    """Return the values of the options that have the length of a MAC address, by type; None if the
    options are invalid."""
    found: dict[int, bytes] = {}
    while data:
        size = data[1] * _OPTION_UNIT if len(data) > 1 else 0
        if not 0 < size <= len(data):
            return None
        if size == _LINK_ADDRESS.size:
            found[data[0]] = data[2:size]
        data = data[size:]
    return found


def _advertisement(mac: bytes, address: str, to: bytes, destination: str, flags: int) -> bytes:
    body = _BODY.pack(ADVERTISEMENT, 0, 0, flags, _packed(address))
    body += _LINK_ADDRESS.pack(_TARGET_LINK_ADDRESS, 1, mac)
    return _frame(mac, to, address, destination, body)


def _frame(mac: bytes, to: bytes, source: str, destination: str, body: bytes) -> bytes:
    addresses = _packed(source), _packed(destination)
    checksum = _checksum(*addresses, body).to_bytes(2, "big")
    return (
        _ETHERNET.pack(to, mac, ETHERTYPE)
        + _IP.pack(6 << 28, len(body), _ICMPV6, _UNFORWARDED, *addresses)
        + body[:2]
        + checksum
        + body[4:]
    )


def _checksum(source: bytes, destination: bytes, body: bytes) -> int:
    """Return the checksum of a message whose checksum is 0; 0 for a message with a valid one."""
    data = _PSEUDO_HEADER.pack(source, destination, len(body), _ICMPV6) + body
    data += bytes(len(data) % 2)
    total = int(sum(struct.unpack(f"!{len(data) // 2}H", data)))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, address)


def _text(packed: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6, packed)
