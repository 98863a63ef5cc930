"""Subscribe to events of rtnetlink.

In: multicast groups, and a filter for events that are not needed. Out: events as they arrive.
Follows netlink(7)."""

import asyncio
import ctypes
import errno
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from fairlead.net.netlink import HEADER_BYTES, RECEIVE_BYTES, SOL_NETLINK, messages

_ADD_MEMBERSHIP, _SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 1, 26, 33
_STEP, _KIND_AT = struct.Struct("=HBBI"), 4
_LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x15, 0x06


class Events(NamedTuple):
    """Kind and body of each event, in order. `lost`: the kernel dropped further events."""

    events: Sequence[tuple[int, bytes]]
    lost: bool


class EventFilter(NamedTuple):
    """Events of these kinds with the byte `value` at offset `at` of their body: they are not
    needed, or with `only` nothing else is."""

    kinds: tuple[int, ...]
    at: int
    value: int
    only: bool = False

    def program(self) -> bytes:
        """Return the filter as a socket filter (classic BPF). Its data begins with the message
        header; a result of 0 drops the message."""
        tests = [
            (_JUMP_IF_EQUAL, len(self.kinds) - 1 - number, 0, kind)
            for number, kind in enumerate(self.kinds)
        ]
        tests[-1] = (_JUMP_IF_EQUAL, 0, 2, self.kinds[-1])
        steps = [
            (_LOAD_BYTE, 0, 0, _KIND_AT),  # the low byte; kinds of rtnetlink are below 256
            *tests,
            (_LOAD_BYTE, 0, 0, HEADER_BYTES + self.at),
            (_JUMP_IF_EQUAL, 1, 0, self.value),
            (_RETURN, 0, 0, 0 if self.only else 0xFFFFFFFF),
            (_RETURN, 0, 0, 0xFFFFFFFF if self.only else 0),
        ]
        return b"".join(_STEP.pack(*each) for each in steps)


class Subscription:
    """A subscription to multicast groups of rtnetlink, in the network namespace in which it was
    created. Close it after use.

    `filtered`: events that the kernel drops, or that are the only ones which it does not drop.
    Otherwise a thousand changes made by this process could fill the socket's buffer, and other
    events would be lost."""

    def __init__(self, groups: Sequence[int], filtered: EventFilter | None = None) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        self._socket.setblocking(False)
        if filtered is not None:
            program = ctypes.create_string_buffer(filtered.program())
            filtering = struct.pack("HP", len(program.raw) // _STEP.size, ctypes.addressof(program))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtering)
        self._socket.bind((0, 0))  # an unbound socket does not receive multicasts
        for group in groups:
            self._socket.setsockopt(SOL_NETLINK, _ADD_MEMBERSHIP, group)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except PermissionError:
            # A container without CAP_NET_ADMIN gets a smaller buffer; overruns are reported anyway.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._socket.close()

    async def next(self) -> Events:
        """Wait for events. Return all that have arrived."""
        events: list[tuple[int, bytes]] = []
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, RECEIVE_BYTES)
            while True:
                events += ((kind, body) for kind, _, _, body in messages(data))
                data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return Events(events, lost=False)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return Events(events, lost=True)
            raise
