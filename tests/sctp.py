"""The first two packets of an SCTP association on raw sockets, because the kernel of a test machine
may not support SCTP.

In: sockets of type SOCK_RAW and protocol 132. Out: `InitResponder`, which answers every INIT with
an INIT ACK, whose cookie contains the name of the responding pod and the source address of the
INIT; `send_init`, which sends an INIT and reads the INIT ACK. Follows RFC 9260, 3.3.2 and 3.3.3,
and appendix A for the checksum. Conntrack and NAT process these packets as those of any
association; the association is never completed."""

import errno
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

PROTOCOL = 132
_INIT, _INIT_ACK, _COOKIE = 1, 2, 7
_WINDOW = 65_535


class InitAck(NamedTuple):
    """The content of an INIT ACK: the pod that sent it, and the source address of the INIT."""

    pod: str
    peer: str


class InitResponder:
    """Responds at these sockets, whose keys are the names of pods, like an SCTP server. A context
    manager with a thread."""

    def __init__(self, sockets: Mapping[str, socket.socket]) -> None:
        self._sockets = sockets
        self._thread = threading.Thread(target=self._serve, name="sctp", daemon=True)
        self._end, self._ended = os.pipe()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing the pipe is not enough: a child process may have inherited it.
        os.write(self._ended, b".")
        self._thread.join()
        os.close(self._ended)
        os.close(self._end)
        for each in self._sockets.values():
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            for name, sock in self._sockets.items():
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, name.split()[0])
            while True:
                for key, _ in selector.select():
                    if not isinstance(key.fileobj, socket.socket):
                        return
                    # A response that cannot be sent must not affect other clients.
                    with suppress(OSError):
                        _respond(key.fileobj, str(key.data))


def send_init(
    sock: socket.socket, address: str, port: int, *, source_port: int, timeout_s: float
) -> InitAck | None:
    """Send one INIT from this raw socket, and return the INIT ACK; None if none arrives in time.
    Raise ConnectionRefusedError for an ICMP error that means that no server listens, and
    PermissionError for a packet that the host's own rules reject. The kernel reports an error to
    all raw sockets of a host that are connected to the address, whatever the port."""
    with unsupported_as_refused():
        start(sock, address, port, source_port=source_port)
        return _await_init_ack(sock, source_port, timeout_s)


@contextmanager
def unsupported_as_refused() -> Iterator[None]:
    """Convert the error that a host does not support SCTP into ConnectionRefusedError, as a client
    sees it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOPROTOOPT, errno.EPROTO):
            raise ConnectionRefusedError(str(error)) from error
        raise


def _await_init_ack(sock: socket.socket, source_port: int, timeout_s: float) -> InitAck | None:
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        sock.settimeout(left_s)
        with suppress(TimeoutError):
            if (cookie := read(sock.recv(4096), sock.family, source_port)) is not None:
                return cookie
    return None


def start(sock: socket.socket, address: str, port: int, *, source_port: int) -> None:
    """Connect, so that this socket receives errors, and send one INIT."""
    sock.connect((address, 0))
    tag = int.from_bytes(os.urandom(4), "big") | 1
    sock.send(packet(source_port, port, 0, chunk(_INIT, tag)))


def read(received: bytes, family: int, source_port: int) -> InitAck | None:
    """Return the content of an INIT ACK to this port; None for another packet. A raw socket
    receives the packets of all ports."""
    found = _parsed(received, family)
    if found is None or found[1] != source_port or found[2] != _INIT_ACK:
        return None
    content = found[3]
    kind, length = struct.unpack_from("!HH", content, 16)
    assert kind == _COOKIE
    cookie = json.loads(content[20 : 16 + length])
    return InitAck(cookie["pod"], cookie["peer"])


def packet(source_port: int, port: int, tag: int, content: bytes) -> bytes:
    """Return the packet with the common header and its checksum."""
    head = struct.pack("!HHI", source_port, port, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + content)) + content


def chunk(kind: int, tag: int, cookie: bytes = b"") -> bytes:
    """Return an INIT, or an INIT ACK with this cookie."""
    content = struct.pack("!IIHHI", tag, _WINDOW, 1, 1, tag)
    if cookie:
        content += struct.pack("!HH", _COOKIE, 4 + len(cookie)) + cookie
    return struct.pack("!BBH", kind, 0, 4 + len(content)) + content + bytes(-len(content) % 4)


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_TABLE = _table()


def _parsed(received: bytes, family: int) -> tuple[int, int, int, bytes] | None:
    """Return source and destination port, type and content of the first chunk; None if the packet
    is too short."""
    sent = received[4 * (received[0] & 15) :] if family == socket.AF_INET and received else received
    if len(sent) < 32:
        return None
    source, port, _, _, kind, _, length = struct.unpack_from("!HHIIBBH", sent)
    return source, port, kind, sent[16 : 12 + length]


def _respond(sock: socket.socket, name: str) -> None:
    received, (peer, *_) = sock.recvfrom(4096)
    found = _parsed(received, sock.family)
    if found is None or found[2] != _INIT:
        return
    source, port, _, content = found
    cookie = json.dumps({"pod": name, "peer": peer}).encode()
    tag = int.from_bytes(content[:4], "big")
    sock.sendto(packet(port, source, tag, chunk(_INIT_ACK, tag, cookie)), (peer, 0))
