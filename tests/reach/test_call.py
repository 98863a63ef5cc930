"""Calls of real servers: what each kind of answer, silence and end counts as."""

import asyncio
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fairlead.reach.call import call, hold
from fairlead.reach.record import Outcome
from fairlead.reach.targets import Target

TIMEOUT_S = 20.0
"""Longer than any pause of a busy machine, for calls that are answered."""
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY = b'{"pod": "web-1", "peer": "127.0.0.1"}'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(BODY)


@asynccontextmanager
async def serving(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Run the server on loopback during the block; yield its port."""
    running = await asyncio.start_server(server, "127.0.0.1", 0, ssl=tls)
    try:
        yield running.sockets[0].getsockname()[1]
    finally:
        running.close()


def target(port: int, scheme: str = "http") -> Target:
    return Target("t", scheme, "127.0.0.1", port)  # type: ignore[arg-type]


def answering(answer: bytes, *, reset: bool = False) -> Server:
    """Return a server that reads a request, sends these bytes, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if reset:
            _close_with_reset(writer)
        writer.close()

    return serve


def _close_with_reset(writer: asyncio.StreamWriter) -> None:
    opened: socket.socket = writer.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def called(server: Server, timeout_s: float = TIMEOUT_S) -> Outcome:
    async with serving(server) as port:
        return await call(target(port), timeout_s, time.monotonic)


@pytest.mark.parametrize(
    ("answer", "problem", "pod"),
    [
        (OK + b"\r\n" + BODY, "", "web-1"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "", ""),
        (b"HTTP/1.0 200 OK\r\n\r\n" + BODY, "", "web-1"),
        (b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n", "answered 503", ""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "answered, but not with HTTP", ""),
        (b"", "closed without an answer", ""),
        (b"HTTP/1.1 200 OK\r\nContent-", "closed within the head of an answer", ""),
        (OK + b"\r\n" + BODY[:7], f"closed after 7 of {len(BODY)} bytes", ""),
        (
            CHUNKED + b"7\r\n" + BODY[:7] + b"\r\n1e;x\r\n" + BODY[7:] + b"\r\n0\r\n\r\n",
            "",
            "web-1",
        ),
        (CHUNKED + b"0\r\nTrailer: a\r\n\r\n", "", ""),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK + b"\r\n" + BODY, "", "web-1"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 503 No\r\n\r\n", "answered 503", ""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", "", ""),
        (CHUNKED + b"8000\r\n" + b"x" * 32000, "", ""),
        (
            CHUNKED + b"5;" + b"x" * 200_000,
            "answered with a body whose chunks have a line without end",
            "",
        ),
        (CHUNKED + b"7\r\n" + BODY[:5], "closed after 5 of 7 bytes", ""),
        (CHUNKED, "closed within a body of chunks", ""),
        (
            CHUNKED + b"x\r\n",
            "answered with a body that does not consist of chunks, as its head says",
            "",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + b"x" * 99999, "", ""),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000, "answered with a head without end", ""),
    ],
)
async def test_answers(answer: bytes, problem: str, pod: str) -> None:
    outcome = await called(answering(answer))
    assert (outcome.problem, outcome.pod) == (problem, pod)
    assert outcome.own == "127.0.0.1"
    assert outcome.client == ("127.0.0.1" if pod else "")


async def test_a_reset_is_a_failure() -> None:
    assert (await called(answering(b"", reset=True))).problem == "reset"


async def test_silence_is_a_failure_that_says_how_far_the_call_came() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    outcome = await called(silent, 0.1)
    assert outcome.problem == "no answer on the connection within 0.1 s"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    outcome = await call(target(port), TIMEOUT_S, time.monotonic)
    assert outcome.problem == "connection refused"


async def test_a_body_of_chunks_without_end_is_named() -> None:
    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"5\r\ndata\n\r\n")
        await reader.read()

    assert (await called(events, 1)).problem == "no end of the answer within 1 s"


async def test_the_request_names_a_port_that_is_not_the_default() -> None:
    asked = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with serving(serve) as port:
        await call(target(port), TIMEOUT_S, time.monotonic)
    assert f"\r\nHost: 127.0.0.1:{port}\r\n".encode() in asked


async def test_a_body_without_length_or_end_does_not_make_an_answer_late() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nHostname: web-1\n")
        await reader.read()

    outcome = await called(endless)
    assert (outcome.problem, outcome.pod) == ("", "web-1")
    assert outcome.latency_s < TIMEOUT_S


async def test_a_tcp_target_is_answered_by_its_connection() -> None:
    async with serving(answering(b"")) as port:
        assert not (await call(target(port, "tcp"), TIMEOUT_S, time.monotonic)).problem


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return a certificate for another name, and its key."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    subprocess.run(
        [*command.split(), "-subj", "/CN=other.example", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_any_certificate_is_accepted(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    async with serving(answering(OK + b"\r\n" + BODY), context) as port:
        assert (await call(target(port, "https"), TIMEOUT_S, time.monotonic)).pod == "web-1"
        plain = await call(target(port), TIMEOUT_S, time.monotonic)
    assert plain.problem
    async with serving(answering(OK + b"\r\n" + BODY)) as port:
        assert (await call(target(port, "https"), 5, time.monotonic)).problem


async def held(server: Server, scheme: str = "http") -> tuple[bool, str]:
    """Return whether a connection was open, and why it broke."""
    opened = False

    def note() -> None:
        nonlocal opened
        opened = True

    async with serving(server) as port:
        why = await hold(target(port, scheme), TIMEOUT_S, note)
    return opened, why


async def test_an_announced_end_breaks_nothing() -> None:
    assert await held(answering(OK + b"Connection: close\r\n\r\n" + BODY)) == (True, "")
    assert await held(answering(b"HTTP/1.1 200 OK\r\n\r\n")) == (True, "")


async def test_an_answer_without_a_body_leaves_a_connection_open() -> None:
    answer = b"HTTP/1.1 204 No Content\r\n\r\n"
    assert await held(answering(answer)) == (True, "closed without an answer")


async def test_a_body_of_chunks_leaves_a_connection_open() -> None:
    assert await held(answering(CHUNKED + b"0\r\n\r\n")) == (True, "closed without an answer")


@pytest.mark.parametrize(
    ("reset", "why"), [(False, "closed without an answer"), (True, "reset")], ids=["fin", "reset"]
)
async def test_another_end_breaks_an_open_connection(reset: bool, why: str) -> None:
    assert await held(answering(OK + b"\r\n" + BODY, reset=reset)) == (True, why)


async def test_a_connection_that_was_never_open_is_not_broken() -> None:
    assert await held(answering(b"", reset=True)) == (False, "")


@pytest.mark.parametrize(("reset", "why"), [(False, ""), (True, "reset")], ids=["fin", "reset"])
async def test_a_tcp_connection_breaks_by_a_reset(reset: bool, why: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        if reset:
            _close_with_reset(writer)
        writer.close()

    assert await held(serve, "tcp") == (True, why)
