"""Send requests to the kernel's rtnetlink, one at a time.

In: a kind of message, flags, a body. Out: the bodies of the responses. A connection belongs to the
network namespace in which it was created. Follows rtnetlink(7), netlink(7)."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from fairlead.errors import Refused, Unavailable, plain
from fairlead.net.netlink import (
    DONE,
    DUMP,
    DUMP_INTERRUPTED,
    ERROR,
    RECEIVE_BYTES,
    SOL_NETLINK,
    code_of,
    message,
    messages,
)

_STRICT_CHECK = 12
ANSWER_WITHIN_S = 10.0


class RtnetlinkSocket:
    """A connection, which several threads may use at the same time. Close it after use.

    `strict`: the kernel applies the filter in the request of a dump (NETLINK_GET_STRICT_CHK)."""

    def __init__(self, *, strict: bool = False) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        self._socket.settimeout(ANSWER_WITHIN_S)
        if strict:
            self._socket.setsockopt(SOL_NETLINK, _STRICT_CHECK, 1)
        self._sequence = 0
        self._turn = threading.Lock()

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._socket.close()

    def exchange(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        """Send a request and return the bodies of the responses; a request with the flag ACK has
        none.

        A dump that a change interrupted is repeated. Raise OSError with the kernel's error."""
        while True:
            with self._turn:
                self._sequence += 1
                self._socket.send(message(kind, flags, body, sequence=self._sequence))
                found, interrupted = self._answers(dump=flags & DUMP == DUMP)
            if not interrupted:
                return found

    def _answers(self, *, dump: bool) -> tuple[list[bytes], bool]:
        found: list[bytes] = []
        interrupted = False
        while True:
            for kind, flags, sequence, body in messages(self._socket.recv(RECEIVE_BYTES)):
                if sequence != self._sequence:
                    continue
                interrupted |= bool(flags & DUMP_INTERRUPTED)
                if kind == ERROR:
                    if code := code_of(body):
                        raise OSError(code, os.strerror(code))
                    return found, interrupted
                if kind == DONE:
                    return found, interrupted
                found.append(body)
                if not dump:
                    return found, interrupted


@contextmanager
def open_rtnetlink(tried: str, *, strict: bool = False) -> Iterator[RtnetlinkSocket]:
    """Provide a connection. Raise Refused if permissions are missing, Unavailable for any other
    error of the kernel."""
    try:
        with closing(RtnetlinkSocket(strict=strict)) as connection:
            yield connection
    except OSError as error:
        message = f"{tried}: {plain(error)}"
        if error.errno in (errno.EPERM, errno.EACCES):
            raise Refused(message, fix="run as root, or with CAP_NET_ADMIN") from error
        raise Unavailable(message) from error
