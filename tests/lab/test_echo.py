"""The pods' echo server: its answers over each protocol, and its shutdown. It runs as in a pod, on
loopback."""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fairlead.lab

ECHO = Path(fairlead.lab.__file__).with_name("echo.py")
DEADLINE_S = 60


class Echo(NamedTuple):
    """A running server."""

    process: asyncio.subprocess.Process
    tcp: int
    udp: int


def free_port(kind: socket.SocketKind) -> int:
    """Return a port that is free in both families. It is below the ports of clients: a client that
    was closed occupies its port for a minute, and other tests leave thousands of them."""
    while True:
        port = random.randrange(10_000, 32_768)
        with (
            suppress(OSError),
            socket.socket(socket.AF_INET, kind) as ipv4,
            socket.socket(socket.AF_INET6, kind) as ipv6,
        ):
            ipv6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            ipv4.bind(("", port))
            ipv6.bind(("", port))
            return port


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    ports = [free_port(kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    reader, writer = os.pipe()
    options = [
        "--pod",
        "web-1",
        "--node",
        "node1",
        "--address",
        "127.0.0.1",
        "--address",
        "::1",
        "--ready-fd",
        str(writer),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(ECHO),
        *options,
        "--tcp",
        str(ports[0]),
        "--udp",
        str(ports[1]),
        pass_fds=(writer,),
    )
    os.close(writer)
    assert await asyncio.to_thread(os.read, reader, 1) == b"1"
    os.close(reader)
    yield Echo(process, *ports)
    if process.returncode is None:
        process.kill()
        await process.wait()


class Caller:
    """A TCP connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.name = writer.get_extra_info("sockname")

    async def get(
        self, path: str = "/", head: str = "", body: bytes = b""
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Send an HTTP request; return the header fields and the JSON of the response."""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{length}{head}\r\n".encode() + body)
        async with asyncio.timeout(DEADLINE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            assert lines[0] == "HTTP/1.1 200 OK"
            fields = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in lines[1:] if line)
            }
            return fields, json.loads(await self.reader.readexactly(int(fields["content-length"])))

    async def line(self, data: bytes) -> dict[str, Any]:
        self.writer.write(data)
        async with asyncio.timeout(DEADLINE_S):
            answer: dict[str, Any] = json.loads(await self.reader.readline())
            return answer

    async def at_end(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read(1) == b""


async def call(echo: Echo, address: str = "127.0.0.1") -> Caller:
    async with asyncio.timeout(DEADLINE_S):
        return Caller(*await asyncio.open_connection(address, echo.tcp))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_http_reports_the_address_of_the_client(echo: Echo, address: str) -> None:
    caller = await call(echo, address)
    for path in ("/", "/again?x=1"):
        fields, said = await caller.get(path)
        assert fields["connection"] == "keep-alive"
        assert said == {
            "pod": "web-1",
            "node": "node1",
            "peer": address,
            "peer_port": caller.name[1],
            "local": address,
            "path": path,
            "length": 0,
        }


async def test_http_with_a_body_and_a_forwarded_address(echo: Echo) -> None:
    caller = await call(echo)
    _, said = await caller.get(head="X-Forwarded-For: 198.51.100.7\r\n", body=b"x" * 100_000)
    assert (said["length"], said["forwarded_for"]) == (100_000, "198.51.100.7")
    fields, _ = await caller.get(head="Connection: close\r\n")
    assert fields["connection"] == "close"
    assert await caller.at_end()


async def test_requests_sent_at_once_are_answered_in_order(echo: Echo) -> None:
    caller = await call(echo)
    caller.writer.write(b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n")
    assert (await caller.get("/c"))[1]["path"] == "/a"
    answers = [await caller.reader.readuntil(b"}\n") for _ in range(2)]
    assert [b'"/b"' in answers[0], b'"/c"' in answers[1]] == [True, True]


async def test_lines_are_answered_one_by_one(echo: Echo) -> None:
    caller = await call(echo)
    said = await caller.line(b"hello\r\n")
    assert (said["text"], said["length"], said["peer_port"]) == ("hello", 6, caller.name[1])
    said = await caller.line(b"y" * 900_000 + b"\n")
    assert (said["length"], said["text"]) == (900_000, "y" * 200)
    assert (await caller.line(b"\n"))["length"] == 0


@pytest.mark.parametrize(
    ("header", "peer", "port"),
    [
        (b"PROXY TCP4 198.51.100.7 203.0.113.1 4321 80\r\n", "198.51.100.7", 4321),
        (b"PROXY TCP6 2001:db8::7 2001:db8::1 4321 80\r\n", "2001:db8::7", 4321),
        (
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11"
            + struct.pack("!H4s4sHH", 12, bytes((198, 51, 100, 7)), b"\xcb\0\x71\x01", 4321, 80),
            "198.51.100.7",
            4321,
        ),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_proxy_header_is_read_and_reported(
    echo: Echo, header: bytes, peer: str, port: int, at_once: bool
) -> None:
    caller = await call(echo)
    if at_once:
        caller.writer.write(header)
    else:
        for index in range(len(header)):
            caller.writer.write(header[index : index + 1])
            await caller.writer.drain()
            await asyncio.sleep(0)
    _, said = await caller.get()
    assert (said["proxy_peer"], said["proxy_peer_port"], said["peer"]) == (peer, port, "127.0.0.1")


async def test_invalid_input_affects_no_other_connection(echo: Echo) -> None:
    bad = await call(echo)
    bad.writer.write(b"GET nonsense\r\n\r\n")
    assert await bad.at_end()
    worse = await call(echo)
    worse.writer.write(b"PROXY \xff\xff\r\n")
    assert await worse.at_end()
    assert (await (await call(echo)).get())[1]["pod"] == "web-1"


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
async def test_udp_reports_the_address_of_the_client(echo: Echo, family: int, address: str) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S):
            await loop.sock_sendto(sock, b"q" * 3000, (address, echo.udp))
            answer, sender = await loop.sock_recvfrom(sock, 65535)
        assert sender[:2] == (address, echo.udp)
        said = json.loads(answer)
        assert (said["peer"], said["peer_port"], said["length"]) == (
            address,
            sock.getsockname()[1],
            3000,
        )


async def test_after_sigterm_it_serves_open_and_new_connections_for_a_while(echo: Echo) -> None:
    idle, lines = await call(echo), await call(echo)
    await idle.get()
    await lines.line(b"hello\n")
    echo.process.send_signal(signal.SIGTERM)
    # Longer than the server waits for new connections: open connections keep it running.
    await asyncio.sleep(1.5)
    late = await call(echo)
    for caller in (late, idle):
        fields, said = await caller.get()
        assert (fields["connection"], said["pod"]) == ("close", "web-1")
        assert await caller.at_end()
    assert (await lines.line(b"still here\n"))["text"] == "still here"
    assert echo.process.returncode is None
    lines.writer.close()
    async with asyncio.timeout(DEADLINE_S):
        assert await echo.process.wait() == 0


async def test_after_sigterm_without_connections_it_exits(echo: Echo) -> None:
    echo.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        assert await echo.process.wait() == 0


async def test_a_client_that_goes_on_to_send_datagrams_does_not_delay_the_exit(echo: Echo) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", echo.udp))
        await loop.sock_sendall(client, b"before")
        assert json.loads(await loop.sock_recv(client, 4096))["pod"] == "web-1"
        echo.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while echo.process.returncode is None:
                with suppress(ConnectionRefusedError):
                    await loop.sock_sendall(client, b"after")
                await asyncio.sleep(0.1)
    assert echo.process.returncode == 0
