"""The server in each of the lab's pods: reports the client's address over HTTP, raw TCP and UDP.

In: any number of `--tcp PORT` and `--udp PORT`. Out: one JSON object per request, line or datagram,
with the pod, the node, the peer's address and port *as this pod's kernel saw them*, and the client
address that a PROXY header or X-Forwarded-For claims.

After SIGTERM it shuts down gracefully: it still accepts connections, because load balancers need a
moment to notice; it answers requests on open connections and closes each connection with its
answer; it exits when no connection is open and none has arrived for a second. Datagrams delay the
exit only of a pod without a TCP port, because a client cannot be told to use another pod, and may
send datagrams forever. The process that sent SIGTERM sets the deadline.

It runs by `python -I -S` with the standard library only, because there is one per pod and it has to
be cheap. Follows RFC 9112 (HTTP/1.1) and HAProxy's doc/proxy-protocol.txt, versions 1 and 2.
"""

import argparse
import json
import os
import resource
import selectors
import signal
import socket
import struct
import time
from types import FrameType

METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ")
PROXY_V1 = b"PROXY "
PROXY_V2 = b"\r\n\r\n\x00\r\nQUIT\n"
QUIET_S = 1.0
KEPT_TEXT = 200
"""Number of bytes of a line that are sent back. The rest of a longer line is only counted."""
HEAD_LIMIT = 65536
UDP_ROOM = 1 << 23
SO_RCVBUFFORCE = 33
"""A Linux socket option that Python's socket module does not define."""


class ServerState:
    """State shared by all connections: the pod's identity, the open connections, whether it is
    draining."""

    def __init__(self, pod: str, node: str) -> None:
        self.identity = {"pod": pod, "node": node}
        self.selector = selectors.DefaultSelector()
        self.connections: set[Connection] = set()
        self.draining = False
        self.last_arrival = time.monotonic()

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Start draining. Signal handler of SIGTERM."""
        self.draining = True
        self.last_arrival = time.monotonic()

    @property
    def done(self) -> bool:
        return (
            self.draining
            and not self.connections
            and time.monotonic() - self.last_arrival > QUIET_S
        )


class Connection:
    """An accepted TCP connection: detects the peer's protocol, answers, closes."""

    def __init__(self, state: ServerState, sock: socket.socket, peer: tuple[str, int]) -> None:
        self.state = state
        self.socket = sock
        self.facts = state.identity | {
            "peer": peer[0],
            "peer_port": peer[1],
            "local": sock.getsockname()[0],
        }
        self.speaks = ""
        self.received = b""
        self.counted = 0  # bytes already discarded of a line longer than KEPT_TEXT
        self.unsent = b""
        self.closing = False
        state.connections.add(self)
        state.selector.register(sock, selectors.EVENT_READ, self.on_event)

    def on_event(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self.flush()
            if mask & selectors.EVENT_READ:
                data = self.socket.recv(262144)
                if not data:
                    self.close()
                    return
                self.received += data
                self.advance()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError):  # reset by the peer, or malformed input
            self.close()

    def advance(self) -> None:
        """Answer every request that has arrived completely."""
        if not self.speaks and not self.recognise():
            return
        answers = []
        step = self.answer_http if self.speaks == "http" else self.answer_line
        while not self.closing and (answer := step()) is not None:
            answers.append(answer)
        if answers:
            self.unsent += b"".join(answers)
            self.flush()

    def recognise(self) -> bool:
        """Consume a PROXY header, then detect whether the peer speaks HTTP. Return False while too
        little has arrived to decide."""
        while any(
            self.received.startswith(mark[: len(self.received)]) for mark in (PROXY_V1, PROXY_V2)
        ):
            if not self.take_proxy_header():
                return False
        start = self.received
        if not start:
            return False
        if any(start.startswith(method) for method in METHODS):
            self.speaks = "http"
        elif any(method.startswith(start) for method in METHODS):
            return False
        else:
            self.speaks = "lines"
        return True

    def take_proxy_header(self) -> bool:
        if self.received.startswith(PROXY_V2[:1]):
            if len(self.received) < 16:
                return False
            family, length = struct.unpack_from("!xBH", self.received, 12)
            if len(self.received) < 16 + length:
                return False
            body, self.received = self.received[16 : 16 + length], self.received[16 + length :]
            size = {0x11: 4, 0x21: 16}.get(family)
            if size:
                address = socket.inet_ntop(
                    socket.AF_INET if size == 4 else socket.AF_INET6, body[:size]
                )
                port = struct.unpack_from("!H", body, 2 * size)[0]
                self.facts |= {"proxy": "v2", "proxy_peer": address, "proxy_peer_port": port}
            return True
        head, found, rest = self.received.partition(b"\r\n")
        if not found:
            return False
        words = head.decode("ascii").split(" ")
        if len(words) == 6:
            self.facts |= {"proxy": "v1", "proxy_peer": words[2], "proxy_peer_port": int(words[4])}
        self.received = rest
        return True

    def answer_http(self) -> bytes | None:
        head, found, rest = self.received.partition(b"\r\n\r\n")
        if not found:
            if len(self.received) > HEAD_LIMIT:
                raise ValueError("the request head is too long")
            return None
        request, *lines = head.decode("latin-1").split("\r\n")
        method, path, version = request.split(" ")
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        length = int(fields.get("content-length", "0"))
        if len(rest) < length:
            return None
        self.received = rest[length:]
        default = "keep-alive" if version == "HTTP/1.1" else "close"
        requested = fields.get("connection", default).lower()
        self.closing = self.state.draining or requested == "close"
        facts = self.facts | {"path": path, "length": length}
        if "x-forwarded-for" in fields:
            facts["forwarded_for"] = fields["x-forwarded-for"]
        body = json.dumps(facts).encode() + b"\n"
        answer = (
            f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Connection: {'close' if self.closing else 'keep-alive'}\r\n\r\n"
        ).encode()
        return answer if method == "HEAD" else answer + body

    def answer_line(self) -> bytes | None:
        line, found, rest = self.received.partition(b"\n")
        if not found:
            self.counted += max(0, len(line) - KEPT_TEXT)
            self.received = line[:KEPT_TEXT]
            return None
        length, self.counted, self.received = self.counted + len(line), 0, rest
        text = line[:KEPT_TEXT].rstrip(b"\r").decode("latin-1")
        return json.dumps(self.facts | {"length": length, "text": text}).encode() + b"\n"

    def flush(self) -> None:
        if self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except BlockingIOError:
                sent = 0
            self.unsent = self.unsent[sent:]
        if self.unsent:
            # Stop reading until the answers are sent, so that a peer that does not read them cannot
            # exhaust memory.
            self.state.selector.modify(self.socket, selectors.EVENT_WRITE, self.on_event)
        elif self.closing:
            self.close()
        else:
            self.state.selector.modify(self.socket, selectors.EVENT_READ, self.on_event)

    def close(self) -> None:
        if self in self.state.connections:
            self.state.connections.remove(self)
            self.state.selector.unregister(self.socket)
            self.socket.close()


def listen_tcp(state: ServerState, family: socket.AddressFamily, port: int) -> None:
    listener = _socket(family, socket.SOCK_STREAM)
    listener.bind(("", port))
    listener.listen(16384)

    def accept(mask: int) -> None:
        for _ in range(256):
            try:
                sock, peer = listener.accept()
            except OSError:  # the queue is empty, or a client gave up while it waited in it
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            state.last_arrival = time.monotonic()
            try:
                Connection(state, sock, peer[:2])
            except OSError:  # reset before getsockname
                sock.close()

    state.selector.register(listener, selectors.EVENT_READ, accept)


def listen_udp(state: ServerState, address: str, port: int, *, delays_exit: bool) -> None:
    # One socket per address, not a wildcard: an answer must come from the address that was queried.
    sock = _socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    # Buffer datagrams that arrive while others are answered: a datagram that this server drops
    # would look like packet loss in the network.
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, UDP_ROOM)
    sock.bind((address, port))
    identity = state.identity | {"local": address}

    def receive(mask: int) -> None:
        for _ in range(256):
            try:
                data, peer = sock.recvfrom(65535)
                text = data[:KEPT_TEXT].decode("latin-1")
                facts = identity | {
                    "peer": peer[0],
                    "peer_port": peer[1],
                    "length": len(data),
                    "text": text,
                }
                sock.sendto(json.dumps(facts).encode() + b"\n", peer)
            except OSError:  # the queue is empty, or the peer of an earlier answer rejected it
                return
            if delays_exit:
                state.last_arrival = time.monotonic()

    state.selector.register(sock, selectors.EVENT_READ, receive)


def serve(state: ServerState) -> None:
    """Answer requests until SIGTERM has arrived and every client is served."""
    while not state.done:
        for key, mask in state.selector.select(0.1 if state.draining else None):
            key.data(mask)


def main() -> None:
    parser = argparse.ArgumentParser(description="Report the address of each client.")
    parser.add_argument("--pod", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument(
        "--address", action="append", default=[], help="an address of this pod, for UDP"
    )
    parser.add_argument("--tcp", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument("--udp", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument("--ready-fd", type=int, help="receives a byte when every port is open")
    arguments = parser.parse_args()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    state = ServerState(arguments.pod, arguments.node)
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    # Python resumes select() after a signal (PEP 475); a byte on this socket pair makes it return.
    signal.set_wakeup_fd(waker.fileno())
    state.selector.register(wake, selectors.EVENT_READ, lambda mask: wake.recv(64))
    signal.signal(signal.SIGTERM, state.terminate)
    for port in arguments.tcp:
        for family in (socket.AF_INET, socket.AF_INET6):
            listen_tcp(state, family, port)
    for port in arguments.udp:
        for address in arguments.address:
            listen_udp(state, address, port, delays_exit=not arguments.tcp)
    if arguments.ready_fd is not None:
        os.write(arguments.ready_fd, b"1")
        os.close(arguments.ready_fd)
    serve(state)


def _socket(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
    sock = socket.socket(family, kind)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


if __name__ == "__main__":
    main()
