"""Send and receive whole Ethernet frames on one interface.

In: an interface's name, frames. Out: frames, with their Ethernet header, as they arrive; in the
network namespace of the thread that created the socket. Invariant: a socket receives no frame that
has a VLAN tag, because that belongs to another link. The kernel removes the tag before the socket
gets the frame, and leaves two traces: without a VLAN device for the tag it marks the frame as one
for another host, and otherwise the frame belongs to that device. Follows packet(7) and, for the
filter, Documentation/networking/filter.rst of the kernel."""

import errno
import select
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from typing import Self

from fairlead.errors import FairleadError, Refused, Unavailable

_MAX_FRAME = 65536
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33  # include/uapi/asm-generic/socket.h
_STEP = struct.Struct("=HBBI")
_LOAD, _LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x15, 0x06
_KIND, _DEVICE = 0xFFFFF004, 0xFFFFF008  # SKF_AD_PKTTYPE, SKF_AD_IFINDEX
_OTHER_HOST = 3


class PacketSocket:
    """A socket for the frames of one interface. Close it after use.

    `protocol`: the EtherType of the frames that it receives; 0: it only sends. `only`: bytes that
    these frames must have, each with its offset; the kernel discards the others. Raise Unavailable
    if there is no such interface, and Refused without CAP_NET_RAW."""

    def __init__(
        self, interface: str, protocol: int = 0, only: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.interface = interface
        try:
            # With a protocol, the socket would receive from every interface until it is bound.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        except OSError as error:
            raise _failure(error, f"opening a packet socket on {interface}") from error
        try:
            self._socket.bind((interface, 0))
            if protocol:
                program = array("B", _filter(socket.if_nametoindex(interface), only))
                filtering = struct.pack("HP", len(program) // _STEP.size, program.buffer_info()[0])
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtering)
                self._socket.bind((interface, protocol))
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            raise _failure(error, f"opening a packet socket on {interface}") from error

    @property
    def mac(self) -> bytes:
        """The present MAC address of the interface."""
        mac: bytes = self._socket.getsockname()[4]
        return mac

    def reserve(self, size: int) -> None:
        """Let the socket keep up to this many bytes of frames that were not received yet. Without
        CAP_NET_ADMIN, the limit of the host applies."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def send(self, frame: bytes) -> None:
        """Send the frame. Raise Unavailable if the interface is down or gone, or its queue is
        full."""
        try:
            self._socket.send(frame)
        except OSError as error:
            raise _failure(error, f"sending a frame on {self.interface}") from error

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Return the next frame; None if none arrives in this time. Raise Unavailable if the
        interface is down or gone."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._socket.recv(_MAX_FRAME)
            except BlockingIOError:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                    return None
            except OSError as error:
                raise _failure(error, f"receiving frames on {self.interface}") from error

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _filter(index: int, only: Sequence[tuple[int, int]]) -> bytes:
    """Return a socket filter (classic BPF) for frames that the interface with this index has
    received itself, without a tag. A result of 0 drops the frame."""
    steps = [
        (_LOAD, 0, 0, _KIND),
        (_JUMP_IF_EQUAL, 2 * len(only) + 3, 0, _OTHER_HOST),
        (_LOAD, 0, 0, _DEVICE),
        (_JUMP_IF_EQUAL, 0, 2 * len(only) + 1, index),
    ]
    for place, (at, value) in enumerate(only):
        steps += [
            (_LOAD_BYTE, 0, 0, at),
            (_JUMP_IF_EQUAL, 0, 2 * (len(only) - place) - 1, value),
        ]
    steps += [(_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
    return b"".join(_STEP.pack(*each) for each in steps)


def _failure(error: OSError, tried: str) -> FairleadError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return Refused(f"{tried}: {error.strerror}", fix="run as root, or with CAP_NET_RAW")
    return Unavailable(f"{tried}: {error.strerror}")
