"""What exceptions of Python and of libraries say is worded for users."""

import asyncio
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import aiohttp
import pytest
import yaml

from fairlead.errors import Refused, plain


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_url() -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{free_port()}/", timeout=5)


def open_connection() -> None:
    async def connect() -> None:
        await asyncio.open_connection("127.0.0.1", free_port())

    asyncio.run(connect())


def request() -> None:
    async def get() -> None:
        tls = ssl.create_default_context()
        async with aiohttp.ClientSession() as session:
            await session.get(f"https://127.0.0.1:{free_port()}/", ssl=tls)

    asyncio.run(get())


def bind_twice() -> None:
    async def serve() -> None:
        async with await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0) as first:
            await asyncio.start_server(lambda _r, _w: None, *first.sockets[0].getsockname())

    asyncio.run(serve())


def speak_tls_to_a_server_without() -> None:
    async def connect() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with aiohttp.ClientSession() as session:
                await session.get(f"https://127.0.0.1:{port}/")

    asyncio.run(connect())


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (open_url, "Connection refused"),
        (open_connection, "Connection refused"),
        (request, "Connection refused"),
        (bind_twice, "Address already in use"),
        (speak_tls_to_a_server_without, "TLS failed: "),
        (lambda: Path("/nonexistent").read_text(), "No such file or directory"),
        (lambda: Path("/").read_text(), "Is a directory"),
        (b"a\xff".decode, "it is not text in UTF-8, at byte 2"),
        (lambda: yaml.safe_load("a: b: c"), "line 1, column 5: mapping values are not allowed"),
        (lambda: yaml.safe_load("a\x01"), "character 2: special characters are not allowed"),
        (lambda: socket.getaddrinfo("no.such.name.invalid", 80), ""),
    ],
)
def test_exceptions_are_worded(attempt: Callable[[], object], words: str) -> None:
    with pytest.raises((OSError, ValueError, yaml.YAMLError, aiohttp.ClientError)) as caught:
        attempt()
    said = plain(caught.value)
    assert said.startswith(words)
    assert said
    for raw in ("Errno", "<", "object at", "('", "\n", "codec"):
        assert raw not in said


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (TimeoutError(), "there was no answer in time"),
        (ValueError(), "it failed without a message"),
        (urllib.error.URLError("unknown url type: x"), "unknown url type: x"),
        (urllib.error.HTTPError("http://a", 404, "Not Found", Message(), None), "404 Not Found"),
        (ssl.SSLError(524297, "[SSL] PEM lib (_ssl.c:3905)"), "PEM lib"),
        (Refused("no", fix="say yes"), "no; say yes"),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), "
                "[Errno 111] Connect call failed ('127.0.0.1', 1)"
            ),
            "Connection refused",
        ),
    ],
)
def test_texts_of_exceptions(problem: Exception, words: str) -> None:
    assert words in plain(problem)
    assert ("TLS" in plain(problem)) == ("TLS" in words)
    assert "_ssl" not in plain(problem)
