"""Send and receive whole Ethernet frames on one interface.

In: an interface's name, frames. Out: frames, with their Ethernet header, as they arrive; in the
network namespace of the thread that created the socket. Follows packet(7)."""

import errno
import select
import socket
import time
from typing import Self

from fairlead.errors import FairleadError, Refused, Unavailable

_MAX_FRAME = 65536
_SO_RCVBUFFORCE = 33  # include/uapi/asm-generic/socket.h


class PacketSocket:
    """A socket for the frames of one interface. Close it after use.

    `protocol`: the EtherType of the frames that it receives; 0: it only sends. Raise Unavailable if
    there is no such interface, and Refused without CAP_NET_RAW."""

    def __init__(self, interface: str, protocol: int = 0) -> None:
        self.interface = interface
        try:
            # With a protocol, the socket would receive from every interface until it is bound.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        except OSError as error:
            raise _failure(error, f"opening a packet socket on {interface}") from error
        try:
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
        """Return the next frame, in either direction; None if none arrives in this time. Raise
        Unavailable if the interface is down or gone."""
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


def _failure(error: OSError, tried: str) -> FairleadError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return Refused(f"{tried}: {error.strerror}", fix="run as root, or with CAP_NET_RAW")
    return Unavailable(f"{tried}: {error.strerror}")
