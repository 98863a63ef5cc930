"""Build and parse the packets that show whether a router has a route. Pure.

In: MAC addresses as 6 bytes, IP addresses as text. Out: Ethernet frames, a `Heard` value, and the
socket filter that selects these frames.

A probe is a UDP datagram to the address in question, sent to the MAC address of the router. Its hop
limit is 2, so the router forwards it once, and no host forwards it again. Its source port has no
socket, so that the kernel ignores ICMP errors and redirects about it. A host that announces the
address answers the probe of another host with an ICMP error "port unreachable", whose unused field
is MAGIC. Messages that quote a probe are recognized by the first 8 bytes of its datagram, which
are all that some routers quote; its checksum and source port are hard to guess, because the payload
is random. Follows RFC 768, 792, 4443, 8200."""

import secrets
import socket
import struct
from typing import Literal, NamedTuple

PORT = 9
"""The destination port (discard, RFC 863)."""
MAGIC = b"FLrp"
HOP_LIMIT = 2
_SOURCE_PORTS = (49152, 65536)
_IPV4, _IPV6, _UDP, _ICMP, _ICMPV6 = 0x0800, 0x86DD, 17, 1, 58
_ETHERNET, _IP4, _IP6 = (
    struct.Struct("!6s6sH"),
    struct.Struct("!BBHHHBBH4s4s"),
    struct.Struct("!IHBB16s16s"),
)
_DATAGRAM, _MESSAGE = struct.Struct("!HHHH"), struct.Struct("!BBH4s")
_NONCE_BYTES = 12
_QUOTED_BYTES = 128
_ANSWER_HOPS = 64
_INITIAL_HOPS = (64, 128, 255)
_NO_PORT = {4: (3, 3), 6: (1, 4)}
_TIME_EXCEEDED = {4: 11, 6: 3}
_NO_ROUTE = {
    4: {
        0: "network unreachable",
        1: "host unreachable",
        6: "network unknown",
        7: "host unknown",
        9: "network prohibited",
        10: "host prohibited",
        13: "prohibited",
    },
    6: {
        0: "no route",
        1: "prohibited",
        3: "address unreachable",
        5: "refused by policy",
        6: "route rejected",
    },
}
"""Codes of "destination unreachable" by which a router tells that it has no route it may use."""
_STEP = struct.Struct("=HBBI")
_HALF, _BYTE, _WORD, _EQUAL, _RETURN = 0x28, 0x30, 0x20, 0x15, 0x06

Kind = Literal["probe", "announced", "refused", "other"]
"""`probe`: the probe itself. `announced`: a host that announces the address got it. `refused`: a
router has no route. `other`: another message about the probe."""


class Probe(NamedTuple):
    """A probe that was sent. `mark`: the first bytes of its datagram."""

    frame: bytes
    mark: bytes


class Heard(NamedTuple):
    """A frame about a probe. `source` and `destination`: the addresses of the probe. `by`: the
    sender of the message; empty for the probe itself. `text`: what a router says. `mac`: the sender
    of the frame. `datagram`: the IP packet of the probe. `forwarded`: a router has forwarded the
    message, as its hop limit shows."""

    kind: Kind
    source: str
    destination: str
    mark: bytes
    by: str = ""
    text: str = ""
    mac: bytes = b""
    datagram: bytes = b""
    forwarded: bool = False


def probe(mac: bytes, router: bytes, source: str, address: str) -> Probe:
    """Return a probe of the route to the address through the router with this MAC address."""
    low, high = _SOURCE_PORTS
    port = low + secrets.randbelow(high - low)
    payload = MAGIC + secrets.token_bytes(_NONCE_BYTES)
    datagram = _DATAGRAM.pack(port, PORT, _DATAGRAM.size + len(payload), 0) + payload
    sum_ = _checksum(_pseudo(source, address, len(datagram), _UDP) + datagram) or 0xFFFF
    datagram = datagram[:6] + sum_.to_bytes(2, "big") + payload
    frame = _frame(mac, router, source, address, _UDP, HOP_LIMIT, datagram)
    return Probe(frame, datagram[: _DATAGRAM.size])


def answer(mac: bytes, source: str, heard: Heard) -> bytes:
    """Return the frame by which a host tells the sender of the probe that it announces the
    address. It takes the way back by which the probe came."""
    version = 6 if ":" in heard.source else 4
    message = _MESSAGE.pack(*_NO_PORT[version], 0, MAGIC) + heard.datagram[:_QUOTED_BYTES]
    protocol = _ICMPV6 if version == 6 else _ICMP
    pseudo = _pseudo(source, heard.source, len(message), protocol) if version == 6 else b""
    message = message[:2] + _checksum(pseudo + message).to_bytes(2, "big") + message[4:]
    return _frame(mac, heard.mac, source, heard.source, protocol, _ANSWER_HOPS, message)


def parse(frame: bytes) -> Heard | None:
    """Return what a frame tells about a probe; None if it is about none."""
    if len(frame) < _ETHERNET.size:
        return None
    _, mac, _ = _ETHERNET.unpack_from(frame)
    packet = frame[_ETHERNET.size :]
    if (outer := _packet(packet)) is None:
        return None
    version, protocol, source, destination, body = outer
    if protocol == _UDP:
        if not (_is_probe(body) and body[_DATAGRAM.size :].startswith(MAGIC)):
            return None
        mark = body[: _DATAGRAM.size]
        return Heard("probe", source, destination, mark, mac=mac, datagram=packet)
    if protocol != (_ICMPV6 if version == 6 else _ICMP) or len(body) < _MESSAGE.size:
        return None
    type_, code, _, rest = _MESSAGE.unpack_from(body)
    if type_ not in (_NO_PORT[version][0], _TIME_EXCEEDED[version]):
        return None
    quoted = _packet(body[_MESSAGE.size :])
    if quoted is None or quoted[0] != version or quoted[1] != _UDP or not _is_probe(quoted[4]):
        return None
    kind, text = _meaning(version, type_, code, rest)
    mark = quoted[4][: _DATAGRAM.size]
    forwarded = packet[7 if version == 6 else 8] not in _INITIAL_HOPS
    return Heard(kind, quoted[2], quoted[3], mark, source, text, mac, forwarded=forwarded)


def _meaning(version: int, type_: int, code: int, rest: bytes) -> tuple[Kind, str]:
    if (type_, code) == _NO_PORT[version]:
        return ("announced", "") if rest == MAGIC else ("other", "port unreachable")
    if type_ == _NO_PORT[version][0]:
        text = _NO_ROUTE[version].get(code)
        return ("refused", text) if text else ("other", f"unreachable, code {code}")
    return "other", "time exceeded"


def _packet(data: bytes) -> tuple[int, int, str, str, bytes] | None:
    """Return version, protocol, source, destination and content of an IP packet without options."""
    if len(data) >= _IP4.size and data[0] == 0x45:
        _, _, length, _, _, _, protocol, _, source, destination = _IP4.unpack_from(data)
        family, body = socket.AF_INET, data[_IP4.size : max(length, _IP4.size)]
    elif len(data) >= _IP6.size and data[0] >> 4 == 6:
        _, length, protocol, _, source, destination = _IP6.unpack_from(data)
        family, body = socket.AF_INET6, data[_IP6.size : _IP6.size + length]
    else:
        return None
    texts = socket.inet_ntop(family, source), socket.inet_ntop(family, destination)
    return (4 if family == socket.AF_INET else 6), protocol, *texts, body


def _is_probe(datagram: bytes) -> bool:
    return len(datagram) >= _DATAGRAM.size and _DATAGRAM.unpack_from(datagram)[1] == PORT


def _frame(
    mac: bytes, to: bytes, source: str, address: str, protocol: int, hops: int, body: bytes
) -> bytes:
    ends = _packed(source), _packed(address)
    if ":" in address:
        header = _IP6.pack(6 << 28, len(body), protocol, hops, *ends)
        return _ETHERNET.pack(to, mac, _IPV6) + header + body
    length, number = _IP4.size + len(body), secrets.randbelow(1 << 16)
    sum_ = _checksum(_IP4.pack(0x45, 0, length, number, 0, hops, protocol, 0, *ends))
    header = _IP4.pack(0x45, 0, length, number, 0, hops, protocol, sum_, *ends)
    return _ETHERNET.pack(to, mac, _IPV4) + header + body


def _pseudo(source: str, address: str, length: int, protocol: int) -> bytes:
    """Return what the checksum covers besides the message (RFC 768; RFC 8200, 8.1)."""
    numbers = (
        struct.pack("!II", length, protocol)
        if ":" in address
        else struct.pack("!HH", protocol, length)
    )
    return _packed(source) + _packed(address) + numbers


def _checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = int(sum(struct.unpack(f"!{len(data) // 2}H", data)))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def filter_program() -> bytes:
    """Return the socket filter (classic BPF) that passes probes and the messages about them, and
    drops every other frame before it is copied."""
    ip4, ip6 = _ETHERNET.size, _ETHERNET.size
    body4, body6 = ip4 + _IP4.size, ip6 + _IP6.size
    quoted4, quoted6 = body4 + _MESSAGE.size, body6 + _MESSAGE.size
    magic = int.from_bytes(MAGIC, "big")
    steps: list[tuple[int, int | str, int | str, int] | str] = [
        (_HALF, 0, 0, 12),
        (_EQUAL, "ipv4", 0, _IPV4),
        (_EQUAL, "ipv6", "drop", _IPV6),
        "ipv4",
        (_BYTE, 0, 0, ip4),
        (_EQUAL, 0, "drop", 0x45),
        (_BYTE, 0, 0, ip4 + 9),
        (_EQUAL, "udp4", 0, _UDP),
        (_EQUAL, 0, "drop", _ICMP),
        (_BYTE, 0, 0, body4),
        (_EQUAL, "quoted4", 0, 3),
        (_EQUAL, 0, "drop", 11),
        "quoted4",
        (_BYTE, 0, 0, quoted4 + 9),
        (_EQUAL, 0, "drop", _UDP),
        (_HALF, 0, 0, quoted4 + _IP4.size + 2),
        (_EQUAL, "pass", "drop", PORT),
        "udp4",
        (_HALF, 0, 0, body4 + 2),
        (_EQUAL, 0, "drop", PORT),
        (_WORD, 0, 0, body4 + _DATAGRAM.size),
        (_EQUAL, "pass", "drop", magic),
        "ipv6",
        (_BYTE, 0, 0, ip6 + 6),
        (_EQUAL, "udp6", 0, _UDP),
        (_EQUAL, 0, "drop", _ICMPV6),
        (_BYTE, 0, 0, body6),
        (_EQUAL, "quoted6", 0, 1),
        (_EQUAL, 0, "drop", 3),
        "quoted6",
        (_BYTE, 0, 0, quoted6 + 6),
        (_EQUAL, 0, "drop", _UDP),
        (_HALF, 0, 0, quoted6 + _IP6.size + 2),
        (_EQUAL, "pass", "drop", PORT),
        "udp6",
        (_HALF, 0, 0, body6 + 2),
        (_EQUAL, 0, "drop", PORT),
        (_WORD, 0, 0, body6 + _DATAGRAM.size),
        (_EQUAL, "pass", "drop", magic),
        "pass",
        (_RETURN, 0, 0, 0xFFFF),
        "drop",
        (_RETURN, 0, 0, 0),
    ]
    labels: dict[str, int] = {}
    plain: list[tuple[int, int | str, int | str, int]] = []
    for each in steps:
        if isinstance(each, str):
            labels[each] = len(plain)
        else:
            plain.append(each)

    def distance(target: int | str, at: int) -> int:
        return labels[target] - at - 1 if isinstance(target, str) else target

    return b"".join(
        _STEP.pack(code, distance(yes, at), distance(no, at), value)
        for at, (code, yes, no, value) in enumerate(plain)
    )
