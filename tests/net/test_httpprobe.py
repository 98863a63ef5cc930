"""The HTTP probe with real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.errors import Unavailable
from fairlead.net.httpanswer import REFUSED, SILENT, Answer
from fairlead.net.httpprobe import ProbeConnection, is_reusable, probe, read_answer

KUBE_PROXY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
    b"X-Load-Balancing-Endpoint-Weight: 3\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
)


@asynccontextmanager
async def server(
    *pieces: bytes, hold: bool = False, host: str = "127.0.0.1", ended: set[int] | None = None
) -> AsyncIterator[int]:
    """Answer each connection with `pieces`, one packet each; `hold`: then keep it open. `ended`
    receives the client ports of the connections that the server has closed."""
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
            if ended is not None:
                ended.add(writer.get_extra_info("peername")[1])

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
        (
            [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok"],
            Answer("answered", 200, None, False),
        ),
        ([b"HTTP/1.0 200 OK\r\n\r\n"], Answer("answered", 200)),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
            Answer("answered", 200),
        ),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n"], Answer("answered", 503)),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], Answer("answered")),
        ([b"HTTP/1.1 banana\r\n\r\n"], Answer("answered")),
        ([b"HTTP/1.1 " + b"9" * 5000 + b"\r\n\r\n"], Answer("answered")),
        (
            [b"HTTP/1.1 200 OK\r\nX-Load-Balancing-Endpoint-Weight: " + b"9" * 5000 + b"\r\n\r\n"],
            Answer("answered", 200),
        ),
        (
            [b"HTTP/1.1 200 OK\r\nx-load-balancing-endpoint-WEIGHT: zwei\r\n\r\nx"],
            Answer("answered", 200, None, False),
        ),
        ([b"HTTP/1.1 200 OK\r\nHalf-a-head"], REFUSED),
        ([], REFUSED),
    ],
)
async def test_responses_are_parsed(pieces: list[bytes], expected: Answer) -> None:
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


async def test_no_descriptor_is_left_open() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with server(KUBE_PROXY) as good, server(hold=True) as silent:
        await probe("127.0.0.1", good, "/", timeout_s=5)
        before = descriptors()
        for _ in range(20):
            await probe("127.0.0.1", good, "/", timeout_s=5)
            await probe("127.0.0.1", silent, "/", timeout_s=0.01)
        # The servers close their own ends.
        await asyncio.sleep(0.1)
        assert descriptors() <= before + 1


def time_waits(port: int, callers: set[int]) -> int:
    """Return the sockets in TIME_WAIT (state 06) from one of these ports to `port`.

    The second and third columns hold the address of either end, with its port in hexadecimal. Other
    sockets may have ended at a server that had this port before, so only the given ports count."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [
        (int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16))
        for row in rows
        if row[3] == "06"
    ]
    return sum(peer == port and own in callers for own, peer in ends)


async def test_no_socket_is_left_in_time_wait() -> None:
    callers: set[int] = set()
    async with server(KUBE_PROXY, ended=callers) as port, asyncio.timeout(30):
        for _ in range(10):
            await probe("127.0.0.1", port, "/", timeout_s=5)
        while len(callers) < 10:  # TIME_WAIT begins when both ends have closed
            await asyncio.sleep(0.01)
        assert time_waits(port, callers) == 0


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_give_an_answer_or_none(received: bytes, ended: bool) -> None:
    answer = read_answer(received, ended=ended)
    assert answer is None or answer.kind == "answered"


@given(st.integers(1, len(KUBE_PROXY)))
def test_a_part_of_a_good_response_is_never_a_bad_one(length: int) -> None:
    answer = read_answer(KUBE_PROXY[:length], ended=False)
    assert answer is None or (answer.status, answer.weight) == (200, 3)


class ProbeClient:
    """A probe connection to a server, and the result of each request."""

    def __init__(self, port: int) -> None:
        self.answers: asyncio.Queue[Answer | Unavailable] = asyncio.Queue()
        self.connection = ProbeConnection(
            asyncio.get_running_loop(), "127.0.0.1", port, self.answers.put_nowait
        )

    async def request(self) -> Answer | Unavailable:
        self.connection.send_request("/healthz")
        async with asyncio.timeout(20):
            return await self.answers.get()


GOOD = Answer("answered", 200, 3, False)
KEPT = KUBE_PROXY.replace(b"Connection: close\r\n", b"")


@asynccontextmanager
async def limited_server(answers: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A server that answers this many requests on each connection and closes it at the next one.
    Yield its port and the number of requests on each connection."""
    questions: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = len(questions)
        questions.append(0)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n") and questions[mine] < answers:
                questions[mine] += 1
                writer.write(KEPT)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1], questions


async def test_a_connection_is_reused() -> None:
    async with limited_server(100) as (port, questions):
        client = ProbeClient(port)
        assert [await client.request() for _ in range(10)] == [GOOD] * 10
        assert questions == [10]
        client.connection.close()


async def test_a_closed_connection_is_replaced() -> None:
    async with limited_server(3) as (port, questions):
        client = ProbeClient(port)
        assert [await client.request() for _ in range(9)] == [GOOD] * 9
        assert questions == [3, 3, 3]
        client.connection.close()


async def test_a_server_that_closes_a_new_connection_refuses() -> None:
    async with limited_server(0) as (port, questions):
        client = ProbeClient(port)
        assert await client.request() == REFUSED
        assert not client.connection.open
        assert await client.request() == REFUSED
        assert len(questions) == 2


@pytest.mark.parametrize(
    "answer",
    [
        KUBE_PROXY,
        KEPT + b"more",
        KEPT[:-1],
        b"HTTP/1.0" + KEPT[8:],
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_a_connection_is_reused_after_complete_responses_only(answer: bytes) -> None:
    assert is_reusable(KEPT)
    assert not is_reusable(answer)
