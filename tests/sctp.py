"""SCTP without kernel support, because the test machine's kernel has no SCTP sockets: the first two
packets of an association, on raw sockets.

In: sockets of kind SOCK_RAW and protocol 132. Out: `Answering`, which answers every INIT with an
INIT ACK whose cookie names the answering pod and the source that it saw; `ask`, which sends an INIT
and reads the answer. Follows RFC 9260, 3.3.2 and 3.3.3, and appendix A for the checksum. Conntrack
and NAT see the first packets of any association; the association is never completed."""

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


class Told(NamedTuple):
    """The content of an INIT ACK: the pod that sent it, and the source address of the INIT."""

    pod: str
    peer: str


class Answering:
    """Answers at these sockets, by name, as an SCTP server would. A context manager with a
    thread."""

    def __init__(self, sockets: Mapping[str, socket.socket]) -> None:
        self._sockets = sockets
        self._thread = threading.Thread(target=self._serve, name="sctp", daemon=True)
        self._end, self._ended = os.pipe()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # a child process that was forked meanwhile may have it open, too
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
                    with suppress(
                        OSError
                        # an answer that cannot be sent must not keep other clients from theirs
                    ):
                        _answer(key.fileobj, str(key.data))


def ask(
    sock: socket.socket, address: str, port: int, *, source_port: int, timeout_s: float
) -> Told | None:
    """Send one INIT from this raw socket and return its INIT ACK; None without an answer. Raise
    ConnectionRefusedError for an ICMP error that means that no server listens, PermissionError for
    a packet that the host's own rules reject. The kernel reports an error to all raw sockets of a
    host that are connected to the address, whatever the port."""
    with nobody_listens():
        start(sock, address, port, source_port=source_port)
        return _awaited(sock, source_port, timeout_s)


@contextmanager
def nobody_listens() -> Iterator[None]:
    """Convert the error that a host does not support SCTP into ConnectionRefusedError, as a client
    sees it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOPROTOOPT, errno.EPROTO):
            raise ConnectionRefusedError(str(error)) from error
        raise


def _awaited(sock: socket.socket, source_port: int, timeout_s: float) -> Told | None:
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        sock.settimeout(left_s)
        with suppress(TimeoutError):
            if (told := read(sock.recv(4096), sock.family, source_port)) is not None:
                return told
    return None


def start(sock: socket.socket, address: str, port: int, *, source_port: int) -> None:
    """Connect, so that this socket receives errors, and send one INIT."""
    sock.connect((address, 0))
    tag = int.from_bytes(os.urandom(4), "big") | 1
    sock.send(packet(source_port, port, 0, chunk(_INIT, tag)))


def read(received: bytes, family: int, source_port: int) -> Told | None:
    """Return the content of an INIT ACK to this port; None for another packet. A raw socket
    receives the packets of all ports."""
    found = _parsed(received, family)
    if found is None or found[1] != source_port or found[2] != _INIT_ACK:
        return None
    content = found[3]
    kind, length = struct.unpack_from("!HH", content, 16)
    assert kind == _COOKIE
    told = json.loads(content[20 : 16 + length])
    return Told(told["pod"], told["peer"])


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


def _answer(sock: socket.socket, name: str) -> None:
    received, (peer, *_) = sock.recvfrom(4096)
    found = _parsed(received, sock.family)
    if found is None or found[2] != _INIT:
        return
    source, port, _, content = found
    cookie = json.dumps({"pod": name, "peer": peer}).encode()
    tag = int.from_bytes(content[:4], "big")
    sock.sendto(packet(port, source, tag, chunk(_INIT_ACK, tag, cookie)), (peer, 0))
