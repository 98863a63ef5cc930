"""A TCP handshake, which shows whether the kernel of a host answers.

In: an address (IPv4 or IPv6, not a name), a port. Out: the state of the handshake when asked. The
kernel of the other host completes a handshake by itself, so a process there that is slow or hangs
does not matter. Invariant: the state is read from the socket at each call, so an answer that has
arrived counts even if this process was not scheduled for a while."""

import errno
import os
import select
import socket
from typing import Literal

from fairlead.errors import Unavailable
from fairlead.net.address import join_host_port, socket_family
from fairlead.net.httpprobe import LOCAL_ERRORS, RESET_ON_CLOSE

REFUSALS = frozenset((errno.ECONNREFUSED, errno.ECONNRESET))
State = Literal["waiting", "answered", "failed"]
"""`answered`: the host accepted or refused the connection. `failed`: the network reported that the
host is not reachable."""


class Handshake:
    """One attempt to connect. `mark`: the SO_MARK of its socket; 0: none. Raise Unavailable if this
    host cannot make the attempt."""

    def __init__(self, address: str, port: int, mark: int = 0) -> None:
        try:
            self._socket = socket.socket(
                socket_family(address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            )
        except OSError as problem:
            raise _not_made(address, port, problem.errno) from problem
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        try:
            if mark:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            code = self._socket.connect_ex((address, port))
        except OSError as problem:
            self.close()
            raise _not_made(address, port, problem.errno) from problem
        if code in LOCAL_ERRORS:
            self.close()
            raise _not_made(address, port, code)
        self._state: State = "waiting" if code == errno.EINPROGRESS else _state_of(code)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLOUT)

    def state(self) -> State:
        """Return the state of the handshake."""
        if self._state == "waiting" and self._poll.poll(0):
            self._state = _state_of(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        return self._state

    def close(self) -> None:
        """End the connection or the attempt."""
        self._socket.close()


def _state_of(code: int) -> State:
    return "answered" if code == 0 or code in REFUSALS else "failed"


def _not_made(address: str, port: int, code: int | None) -> Unavailable:
    reason = os.strerror(code or 0)
    return Unavailable(f"a connection to {join_host_port(address, port)} cannot be made: {reason}")
