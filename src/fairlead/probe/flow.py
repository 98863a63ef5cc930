"""One flow to an echo server: a TCP connection, a UDP flow, or datagrams that look like QUIC.

In: a target. Out: an `Answer` to each request. No function here blocks: the caller owns the event
loop and calls the flows that are ready. A QUIC flow begins with a long header of type Initial in a
datagram of 1,200 bytes; later datagrams have a short header (RFC 9000, 14.1, 17.2.2, 17.3.1); the
rest of their contents is not QUIC. A TCP flow uses HTTP/1.1, so the server can announce an orderly
end."""

import errno
import os
import socket
import struct
from typing import Literal

import msgspec

from fairlead.errors import plain
from fairlead.net.address import socket_family
from fairlead.probe.exchange import REQUEST_KEEP, Answer, Malformed, parse

Kind = Literal["tcp", "udp", "quic"]

_LINGER_NONE = struct.pack("ii", 1, 0)
"""Close with a reset: otherwise thousands of short connections would leave as many ports in
TIME_WAIT."""
_TOTAL_RETRANSMISSIONS = struct.Struct("=100xI")
"""The field tcpi_total_retrans of struct tcp_info (linux/tcp.h)."""
_DATAGRAM = msgspec.json.Decoder(Answer)
_QUIC_INITIAL = b"\xc0\x00\x00\x00\x01".ljust(1200, b".")
_QUIC_SHORT = b"\x40" + b"." * 24


class Target(msgspec.Struct, frozen=True):
    """A server, and the number of flows to keep open to it."""

    kind: Kind
    address: str
    port: int
    open: int

    def __str__(self) -> str:
        return f"{self.kind} {self.address} {self.port}"


class Flow:
    """One flow.

    `first_answer` is the first answer, None until then. `waiting_s` is when the pending request was
    sent, 0 if there is none. `requests` counts the requests. `kept_open` is whether the owner keeps
    the flow open."""

    __slots__ = (
        "_first",
        "_received",
        "begun_s",
        "first_answer",
        "kept_open",
        "requests",
        "socket",
        "target",
        "waiting_s",
    )

    def __init__(self, target: Target, now_s: float, source_port: int = 0) -> None:
        """Begin the flow, from `source_port` unless that is 0. Raise OSError if that fails
        immediately."""
        self.target = target
        self.begun_s = now_s
        self.waiting_s = now_s
        self.first_answer: Answer | None = None
        self.requests = 0
        self.kept_open = False
        self._first = 0  # bytes of the first request
        self._received = b""
        family = socket_family(target.address)
        kind = socket.SOCK_STREAM if target.kind == "tcp" else socket.SOCK_DGRAM
        self.socket = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        try:
            if target.kind == "tcp":
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            if source_port:
                self.socket.bind(("", source_port))
            code = self.socket.connect_ex((target.address, target.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            if target.kind != "tcp":
                self.send_request(now_s)
        except BaseException:
            self.socket.close()
            raise

    def connected(self, now_s: float) -> None:
        """Complete the handshake of a TCP flow and send the first request. Raise OSError if the
        handshake failed."""
        if code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        self.send_request(now_s)

    def send_request(self, now_s: float) -> None:
        """Send a request. Raise OSError."""
        self.waiting_s = now_s
        self.requests += 1
        request = self._request()
        self._first = self._first or len(request)
        self.socket.send(request)

    def _request(self) -> bytes:
        # A repeated first datagram is longer, so that the answer shows which of the datagrams
        # arrived.
        again = b"" if self.first_answer else b"." * (self.requests - 1)
        match self.target.kind:
            case "tcp":
                return REQUEST_KEEP
            case "udp":
                return b"who?" + again
            case "quic":
                return (_QUIC_SHORT if self.first_answer else _QUIC_INITIAL) + again

    def receive(self) -> Answer | None:
        """Read what has arrived. Return the answer; None while it is incomplete.

        Raise OSError, Malformed, or EOFError if the server closes the connection without announcing
        it."""
        data = self.socket.recv(4096)
        if self.target.kind != "tcp":
            try:
                answer = _DATAGRAM.decode(data)
            except msgspec.DecodeError as error:
                raise Malformed(plain(error)) from error
        else:
            if not data:
                raise EOFError
            self._received += data
            if (whole := parse(self._received)) is None:
                return None
            self._received = b""
            answer = whole
        self.waiting_s = 0.0
        if self.first_answer is None:
            self.first_answer = answer
        return answer

    def was_retransmitted(self) -> bool:
        """Return whether a packet had to be retransmitted before the first answer, because it was
        lost.

        A first datagram whose answer is late was not lost."""
        if self.target.kind != "tcp":
            return self.first_answer is not None and self.first_answer.length != self._first
        return retransmissions(self.socket) > 0


def retransmissions(connection: socket.socket) -> int:
    """Return the number of packets of the TCP connection that this side has retransmitted."""
    information = connection.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANSMISSIONS.size
    )
    count: int = _TOTAL_RETRANSMISSIONS.unpack(information)[0]
    return count
