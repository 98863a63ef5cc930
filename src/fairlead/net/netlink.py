"""Netlink messages as bytes, and what the kernel tells without being asked.

In: kinds, flags, attributes; groups of events. Out: messages to send; messages received, taken
apart as far as all kinds are alike. What an attribute means is for who asks. Follows netlink(7),
Linux include/uapi/linux/netlink.h."""

import asyncio
import ctypes
import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
_ATTRIBUTE, _ATTRIBUTE_BYTES = struct.Struct("=HH"), 4
_CODE = struct.Struct("=i")
_KIND = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_ADD_MEMBERSHIP, _SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 1, 26, 33
_STEP, _KIND_AT = struct.Struct("=HBBI"), 4
_LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x15, 0x06


def message(kind: int, flags: int, body: bytes, *, sequence: int = 0) -> bytes:
    """One message that asks for something."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags | REQUEST, sequence, 0) + body


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, sequence number and body of each message that was received, up to the first that
    is none."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, flags, sequence, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def code_of(body: bytes) -> int:
    """What an answer of kind ERROR says: 0 for a plain yes, else the number of the error."""
    (code,) = _CODE.unpack_from(body)
    return -int(code)


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, filled up."""
    return _ATTRIBUTE.pack(_ATTRIBUTE_BYTES + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Kind and value of each attribute from there on, up to the first that is none."""
    last = len(data) - _ATTRIBUTE_BYTES
    while at <= last:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE_BYTES:
            return
        yield kind & _KIND, data[at + _ATTRIBUTE_BYTES : at + length]
        at += (length + 3) & ~3


class Heard(NamedTuple):
    """Kind and body of each event, in order. `lost`: there were more than could be told."""

    events: Sequence[tuple[int, bytes]]
    lost: bool


class Passed(NamedTuple):
    """Events that nobody wants to hear: of these kinds, with that byte in their body."""

    kinds: tuple[int, ...]
    at: int
    value: int

    def program(self) -> bytes:
        """As a socket filter (classic BPF), which begins at the message's header and drops what it
        answers 0 for."""
        tests = [
            (_JUMP_IF_EQUAL, len(self.kinds) - 1 - number, 0, kind)
            for number, kind in enumerate(self.kinds)
        ]
        tests[-1] = (_JUMP_IF_EQUAL, 0, 2, self.kinds[-1])
        steps = [
            (_LOAD_BYTE, 0, 0, _KIND_AT),  # the low one; kinds of rtnetlink are below 256
            *tests,
            (_LOAD_BYTE, 0, 0, _HEADER.size + self.at),
            (_JUMP_IF_EQUAL, 1, 0, self.value),
            (_RETURN, 0, 0, 0xFFFFFFFF),
            (_RETURN, 0, 0, 0),
        ]
        return b"".join(_STEP.pack(*each) for each in steps)


class Hearing:
    """What rtnetlink tells of these groups from now on, in the network namespace in which it was
    made. Close it.

    passed: what the kernel need not tell. A thousand changes of one's own would take the room of
    those that matter."""

    def __init__(self, groups: Sequence[int], passed: Passed | None = None) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        self._socket.setblocking(False)
        if passed is not None:
            program = ctypes.create_string_buffer(passed.program())
            filtering = struct.pack("HP", len(program.raw) // _STEP.size, ctypes.addressof(program))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtering)
        self._socket.bind((0, 0))  # without a port of its own it would be passed over
        for group in groups:
            self._socket.setsockopt(SOL_NETLINK, _ADD_MEMBERSHIP, group)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except (
            PermissionError
        ):  # in a container without the right; overruns are noticed all the same
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)

    def close(self) -> None:
        """Give the socket back. May be repeated."""
        self._socket.close()

    async def next(self) -> Heard:
        """Wait for the next events; all that have been told by then."""
        events: list[tuple[int, bytes]] = []
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, RECEIVE_BYTES)
            while True:
                events += ((kind, body) for kind, _, _, body in messages(data))
                data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return Heard(events, lost=False)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return Heard(events, lost=True)
            raise
