"""A front for an OpenStack service: it forwards and counts calls, and can simulate a broken
connection or a failing server.

In: the service's URL, the project of all calls, and a `fate`, which is evaluated at each call
before it is forwarded. Out: `calls`, every call with its answer, in order of arrival. It runs in
threads of its own, so that clients may block. The client's Host header is forwarded, so that links
in answers lead through the front, too."""

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
    """The status of the service's answer; 0 until it has answered, or if the call was not
    forwarded."""

    @property
    def writes(self) -> bool:
        return self.method not in READS

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Answer:
    """The front answers, and does not forward the call."""

    status: int
    message: str = "the test's answer"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """The connection breaks: before the service receives the call, or after it has answered and
    before the client receives the answer."""

    after: bool
    first: Callable[[], None] = lambda: None
    """A function that is called before the connection breaks: for example, it ends the calling
    process."""


@dataclass(frozen=True)
class Held:
    """The call is forwarded when the function returns; other calls are not delayed."""

    until: Callable[[], object]


@dataclass(frozen=True)
class Said:
    """The service's answer is replaced by another success."""

    body: object


Fate = Answer | Said | Cut | Held | None
"""None: the call is forwarded."""


class Front:
    """The front. Use as `with Front(url).listen() as front`."""

    def __init__(self, service: str, *, project: str = "") -> None:
        """Create the front. `project`: the project of all callers, as a token would name it, for a
        service without authentication."""
        self.url = ""
        self.calls: list[Call] = []
        self.project = project
        self.fate: Callable[[Call], Fate] = lambda _: None
        """Called in a thread for each call; one at a time."""
        self.before: Callable[[Call], None] = lambda _: None
        """Called in a thread for each call, before all else."""
        address = urlsplit(service)
        self._service = (address.hostname or "", address.port or 80)
        self._turn = threading.Lock()
        self._lines: set[socket.socket] = set()

    @contextmanager
    def listen(self) -> Iterator["Front"]:
        front = self

        class Handler(_Handler):
            def setup(self) -> None:
                front._lines.add(self.request)
                super().setup()

            def finish(self) -> None:
                super().finish()
                front._lines.discard(self.request)

            def handle_call(self, call: Call) -> None:
                front._handle(self, call)

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
            # their threads would wait until the process ends
            for line in list(self._lines):
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    @property
    def writes(self) -> list[Call]:
        """The calls that change something."""
        return [call for call in self.calls if call.writes]

    def at(
        self, number: int, fate: Fate, counts: Callable[[Call], bool] = lambda call: call.writes
    ) -> None:
        """Apply this fate to the `number`th call (from 1) of the calls that count from now on;
        forward all others."""
        left = number

        def meet(call: Call) -> Fate:
            nonlocal left
            left -= counts(call)
            if left or not counts(call):
                return None
            left = -1
            return fate

        self.fate = meet

    def pass_on(self) -> None:
        """Forward every call (again)."""
        self.fate = lambda _: None

    def _handle(self, handler: "_Handler", call: Call) -> None:
        self.before(call)
        with self._turn:
            self.calls.append(call)
            fate = self.fate(call)
        match fate:
            case Answer(status, message, headers):
                call.status = status
                text = json.dumps(
                    {"faultcode": "Server", "faultstring": message, "debuginfo": None}
                ).encode()
                handler.answer(
                    status, [("Content-Type", "application/json"), *headers.items()], text
                )
            case Said(body):
                call.status = 200
                handler.answer(
                    200, [("Content-Type", "application/json")], json.dumps(body).encode()
                )
            case Cut(after, first):
                if after:
                    call.status, *_ = self._ask(handler, call)
                first()
                handler.cut()
            case Held() | None:
                if fate is not None:
                    fate.until()
                call.status, headers_back, body = self._ask(handler, call)
                handler.answer(call.status, headers_back, body)

    def _ask(self, handler: "_Handler", call: Call) -> tuple[int, list[tuple[str, str]], bytes]:
        line = http.client.HTTPConnection(*self._service, timeout=TIMEOUT_S)
        headers = {
            name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP
        }
        if self.project:
            headers["X-Project-Id"] = self.project
        try:
            line.request(call.method, call.path, call.body or None, headers)
            response = line.getresponse()
            back = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in HOP_BY_HOP
            ]
            return response.status, back, response.read()
        finally:
            line.close()


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
        except OSError:  # the service or the client is gone, and so is the line
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
