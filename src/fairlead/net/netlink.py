"""Encode and decode netlink messages. Pure.

In: kinds, flags, attributes. Out: messages to send; received messages, decoded as far as all kinds
have in common. The caller interprets the attributes. Follows netlink(7), Linux
include/uapi/linux/netlink.h."""

import struct
from collections.abc import Iterator

REQUEST, ACK, DUMP_INTERRUPTED, EXCLUSIVE, DUMP, CREATE, APPEND = (
    0x1,
    0x4,
    0x10,
    0x200,
    0x300,
    0x400,
    0x800,
)
ERROR, DONE = 2, 3
SOL_NETLINK = 270
RECEIVE_BYTES = 1 << 20
_HEADER = struct.Struct("=IHHII")
HEADER_BYTES = _HEADER.size
_ATTRIBUTE, _ATTRIBUTE_BYTES = struct.Struct("=HH"), 4
_CODE = struct.Struct("=i")
_KIND = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER


def message(kind: int, flags: int, body: bytes, *, sequence: int = 0) -> bytes:
    """Return one request message."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags | REQUEST, sequence, 0) + body


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield kind, flags, sequence number and body of each received message, up to the first invalid
    one."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, flags, sequence, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def code_of(body: bytes) -> int:
    """Return the error number in a response of kind ERROR; 0 for an acknowledgement."""
    (code,) = _CODE.unpack_from(body)
    return -int(code)


def attribute(kind: int, value: bytes) -> bytes:
    """Return one attribute, padded to 4 bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE_BYTES + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield kind and value of each attribute from offset `at` on, up to the first invalid one."""
    last = len(data) - _ATTRIBUTE_BYTES
    while at <= last:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE_BYTES:
            return
        yield kind & _KIND, data[at + _ATTRIBUTE_BYTES : at + length]
        at += (length + 3) & ~3
