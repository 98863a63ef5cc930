"""The steady load states why requests failed: the connection was not accepted, it was not answered,
or the load itself did not run."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fairlead.probe.steady import Period, Steady

DEADLINE_S = 60.0


async def periods(
    port: int,
    until: Callable[[Period], bool],
    event: Callable[[], object] = lambda: None,
    *,
    patience_s: float | None = None,
) -> Period:
    """Return the period of a load with one client, as soon as it satisfies the condition."""
    load = Steady(
        "127.0.0.1", port, callers=1, timeout_s=0.1, patience_s=patience_s, open_connections=0
    )
    task = asyncio.create_task(load.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.sleep(0.01)
            event()
            while not until(load._period):
                await asyncio.sleep(0.01)
        return load.take()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_requests_that_no_server_accepts_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    seen = await periods(port, lambda period: period.failed > 2)
    assert seen.unconnected == seen.failed
    assert seen.failures == {"ConnectionRefusedError": seen.failed}


async def test_requests_that_no_server_answers_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen = await periods(server.getsockname()[1], lambda period: period.failed > 2)
    assert seen.unconnected == 0
    assert seen.failures == {"TimeoutError": seen.failed}


BODY = b'{"pod": "web-1", "node": "n1", "peer": "1.2.3.4"}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.3)
    writer.write(ANSWER)
    writer.close()


async def test_a_slow_server_is_no_failure_within_the_patience() -> None:
    async with await asyncio.start_server(answer_slowly, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        seen = await periods(port, lambda period: period.nodes != {}, patience_s=DEADLINE_S)
    assert (seen.failed, seen.unconnected, seen.nodes) == (0, 0, {"n1": 1})


def is_connecting(port: int) -> bool:
    """Return whether a connection to this port has sent its first packet, and has no answer."""
    syn_sent = f":{port:04X} 02 "
    return syn_sent in Path("/proc/net/tcp").read_text()


async def test_a_late_answer_is_a_failure_if_a_packet_was_lost() -> None:
    """The queue of the server is full, so its kernel loses the first packet of the connection."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        listening.setblocking(False)
        port = listening.getsockname()[1]
        load = Steady(
            "127.0.0.1", port, callers=1, timeout_s=0.1, patience_s=DEADLINE_S, open_connections=0
        )
        task = asyncio.create_task(load.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not is_connecting(port):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # now the call is late
            await asyncio.get_running_loop().sock_accept(listening)
            # The result of the call is known only when the packet has been sent again.
            await load.settle()
            seen = load.take()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    assert (seen.failed, seen.unconnected) == (1, 1)
    assert seen.failures == {"TimeoutError": 1}


async def test_a_stall_of_the_load_itself_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        await periods(
            server.getsockname()[1], lambda period: period.stalled_ms > 300, lambda: time.sleep(0.5)
        )
