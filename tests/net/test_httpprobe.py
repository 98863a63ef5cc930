"""The HTTP probe, against real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.net.httpprobe import REFUSED, SILENT, Answer, probe, read_answer

KUBE_PROXY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
    b"X-Load-Balancing-Endpoint-Weight: 3\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
)


@asynccontextmanager
async def server(*pieces: bytes, hold: bool = False, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Answers each connection with `pieces`, one packet each; `hold`: then keeps it open."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            if hold:
                await done.wait()
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, host, 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]
        done.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_answer_of_kube_proxy(host: str) -> None:
    async with server(KUBE_PROXY, host=host) as port:
        assert await probe(host, port, "/healthz", timeout_s=5) == Answer("answered", 200, 3, False)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([KUBE_PROXY[:4], KUBE_PROXY[4:30], KUBE_PROXY[30:]], Answer("answered", 200, 3, False)),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], Answer("answered", 200)),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok"], Answer("answered", 200, None, False)),
        ([b"HTTP/1.0 200 OK\r\n\r\n"], Answer("answered", 200)),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], Answer("answered", 200)),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n"], Answer("answered", 503)),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], Answer("answered")),
        ([b"HTTP/1.1 banana\r\n\r\n"], Answer("answered")),
        ([b"HTTP/1.1 200 OK\r\nx-load-balancing-endpoint-WEIGHT: zwei\r\n\r\nx"], Answer("answered", 200, None, False)),
        ([b"HTTP/1.1 200 OK\r\nHalf-a-head"], REFUSED),
        ([], REFUSED),
    ],
)
async def test_answers(pieces: list[bytes], expected: Answer) -> None:
    async with server(*pieces) as port:
        assert await probe("127.0.0.1", port, "/", timeout_s=5) == expected


async def test_does_not_wait_for_the_end_of_a_connection_that_stays_open() -> None:
    async with server(KUBE_PROXY, hold=True) as port:
        assert (await probe("127.0.0.1", port, "/", timeout_s=30)).status == 200


async def test_silence_after_connecting_is_silence() -> None:
    async with server(hold=True) as port:
        assert await probe("127.0.0.1", port, "/", timeout_s=0.05) == SILENT


async def test_closed_port_refuses() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        assert await probe("127.0.0.1", reserved.getsockname()[1], "/", timeout_s=5) == REFUSED


async def test_leaves_no_descriptor_behind() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with server(KUBE_PROXY) as good, server(hold=True) as silent:
        await probe("127.0.0.1", good, "/", timeout_s=5)
        before = descriptors()
        for _ in range(20):
            await probe("127.0.0.1", good, "/", timeout_s=5)
            await probe("127.0.0.1", silent, "/", timeout_s=0.01)
        await asyncio.sleep(0.1)  # the servers' own ends
        assert descriptors() <= before + 1


def time_waits_to(port: int) -> int:
    """Sockets in TIME_WAIT whose peer has this port: state 06; the peer stands third, its port in hexadecimal."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "06" and row[2].endswith(f":{port:04X}") for row in rows)


async def test_leaves_no_time_wait_behind() -> None:
    async with server(KUBE_PROXY) as port:
        for _ in range(10):
            await probe("127.0.0.1", port, "/", timeout_s=5)
        assert time_waits_to(port) == 0


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_have_a_meaning(received: bytes, ended: bool) -> None:
    answer = read_answer(received, ended=ended)
    assert answer is None or answer.kind == "answered"


@given(st.integers(1, len(KUBE_PROXY)))
def test_a_part_of_a_good_answer_is_never_a_bad_one(length: int) -> None:
    answer = read_answer(KUBE_PROXY[:length], ended=False)
    assert answer is None or (answer.status, answer.weight) == (200, 3)
