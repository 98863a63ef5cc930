"""A proxy in front of an OpenStack service: it forwards and records calls, and can simulate a
broken connection or a failing server.

In: the service's URL, the project of all calls, and a `fault`, which is evaluated at each call
before it is forwarded. Out: `calls`, every call with its status, in order of arrival. The proxy
runs in threads of its own, so that clients may block. It forwards the client's Host header, so that
links in responses lead through the proxy, too."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

READS = ("GET", "HEAD", "OPTIONS")
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")
TIMEOUT_S = 120.0


@dataclass
class Call:
    """One call and its result."""

    method: str
    path: str
    """The path with the query."""
    body: bytes
    agent: str
    """The User-Agent."""
    status: int = 0
    """The status of the response; 0 before the response, or if the client gets none and the call
    was not forwarded."""

    @property
    def writes(self) -> bool:
        return self.method not in READS

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class ErrorResponse:
    """The proxy responds itself, and does not forward the call."""

    status: int
    message: str = "the test's response"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Disconnect:
    """The connection breaks: before the service receives the call, or after it has responded and
    before the client receives the response."""

    after: bool
    first: Callable[[], None] = lambda: None
    """A function that is called before the connection breaks: for example, it ends the calling
    process."""


@dataclass(frozen=True)
class Delay:
    """The call is forwarded when the function returns; other calls are not delayed."""

    until: Callable[[], object]


@dataclass(frozen=True)
class Response:
    """The proxy responds with this body and status, and does not forward the call. A body that is
    not `bytes` is encoded as JSON."""

    body: object
    status: int = 200


Fault = ErrorResponse | Response | Disconnect | Delay | None
"""None: the call is forwarded."""


class FaultProxy:
    """The proxy. Use it as `with FaultProxy(url).listen() as proxy`."""

    def __init__(self, service: str, *, project: str = "") -> None:
        """Create the proxy. `project`: the project of all callers, as a token would name it, for a
        service without authentication."""
        self.url = ""
        self.calls: list[Call] = []
        self.project = project
        self.fault: Callable[[Call], Fault] = lambda _: None
        """Called in a thread for each call; one at a time."""
        self.before: Callable[[Call], None] = lambda _: None
        """Called in a thread for each call, before all else."""
        address = urlsplit(service)
        self._service = (address.hostname or "", address.port or 80)
        self._turn = threading.Lock()
        self._connections: set[socket.socket] = set()

    @contextmanager
    def listen(self) -> Iterator["FaultProxy"]:
        proxy = self

        class Handler(_Handler):
            def setup(self) -> None:
                proxy._connections.add(self.request)
                super().setup()

            def finish(self) -> None:
                super().finish()
                proxy._connections.discard(self.request)

            def handle_call(self, call: Call) -> None:
                proxy._handle(self, call)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            # Otherwise their threads would wait until the process ends.
            for connection in list(self._connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def writes(self) -> list[Call]:
        """The calls that change something."""
        return [call for call in self.calls if call.writes]

    def inject_at(
        self, number: int, fault: Fault, counts: Callable[[Call], bool] = lambda call: call.writes
    ) -> None:
        """Apply this fault to the `number`th call (from 1) of the calls that count from now on;
        forward all others."""
        left = number

        def fault_of(call: Call) -> Fault:
            nonlocal left
            left -= counts(call)
            if left or not counts(call):
                return None
            left = -1
            return fault

        self.fault = fault_of

    def forward_all(self) -> None:
        """Forward every call from now on."""
        self.fault = lambda _: None

    def _handle(self, handler: "_Handler", call: Call) -> None:
        self.before(call)
        with self._turn:
            self.calls.append(call)
            fault = self.fault(call)
        match fault:
            case ErrorResponse(status, message, headers):
                call.status = status
                text = json.dumps(
                    {"faultcode": "Server", "faultstring": message, "debuginfo": None}
                ).encode()
                handler.answer(
                    status, [("Content-Type", "application/json"), *headers.items()], text
                )
            case Response(body, status):
                call.status = status
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                handler.answer(status, [("Content-Type", "application/json")], data)
            case Disconnect(after, first):
                if after:
                    call.status, *_ = self._forward(handler, call)
                first()
                handler.cut()
            case Delay() | None:
                if fault is not None:
                    fault.until()
                call.status, response_headers, body = self._forward(handler, call)
                handler.answer(call.status, response_headers, body)

    def _forward(self, handler: "_Handler", call: Call) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self._service, timeout=TIMEOUT_S)
        headers = {
            name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP
        }
        if self.project:
            headers["X-Project-Id"] = self.project
        try:
            connection.request(call.method, call.path, call.body or None, headers)
            response = connection.getresponse()
            response_headers = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in HOP_BY_HOP
            ]
            return response.status, response_headers, response.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_call(self, call: Call) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.handle_call(
                Call(self.command, self.path, body, self.headers.get("User-Agent", ""))
            )
        except OSError:  # the service or the client has closed its connection
            self.cut()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def cut(self) -> None:
        """Break the connection with a reset, as a machine does that is gone."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *arguments: object) -> None:
        """Log nothing: `calls` contains the requests."""
