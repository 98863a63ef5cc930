"""Targets are called all the time: a server that stops and starts leaves one gap."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from fairlead.reach.monitor import Monitor
from fairlead.reach.record import Event
from fairlead.reach.targets import Target, parse

DEADLINE_S = 60.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not happened():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(monitor: Monitor) -> AsyncIterator[None]:
    task = asyncio.create_task(monitor.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[int]:
    """Serve HTTP on loopback during the block, whose end ends every connection."""
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ANSWER)

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in open_now:
            writer.transport.abort()


def open_interest(interval_s: float = 0.02) -> tuple[Monitor, list[tuple[str, str]]]:
    """Return a monitor, and the list to which it adds the target and the kind of each event."""
    monitor = Monitor(interval_s=interval_s, timeout_s=20, held=1)
    told: list[tuple[str, str]] = []

    def tell(target: Target, event: Event) -> None:
        told.append((target.name, event.kind))

    monitor.tell = tell
    return monitor, told


async def test_a_server_that_stops_and_starts_leaves_one_gap() -> None:
    monitor, told = open_interest()
    async with serving() as steady_port:
        steady = parse(f"http://127.0.0.1:{steady_port}")
        async with serving() as port:
            target = parse(f"http://127.0.0.1:{port}")
            monitor.replace([target, steady])
            record, other = monitor.records[target], monitor.records[steady]
            task = asyncio.create_task(monitor.run())
            await until(lambda: record.answered > 5 and record.held and other.answered)
            failed_before = record.failed
        await until(lambda: record.failed > 3 and record.broken_count)
        async with serving(port):
            await until(lambda: record.gap is None and record.held)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert failed_before == 0
    assert record.gap_count >= 1
    assert record.gaps[0].calls > 3
    assert [kind for name, kind in told if name == target.name][:1] in (["gap-begun"], ["broken"])
    assert told.count((target.name, "gap-ended")) >= 1
    assert other.failed == other.broken_count == 0
    assert other.held_in_all == 1


async def test_targets_come_and_go_while_others_stay() -> None:
    monitor, _ = open_interest()
    async with serving() as first_port, serving() as second_port:
        first, second = (parse(f"http://127.0.0.1:{port}") for port in (first_port, second_port))
        monitor.replace([first])
        async with running(monitor):
            await until(lambda: monitor.records[first].answered)
            stays = monitor.records[first]
            monitor.replace([first, second])
            await until(lambda: monitor.records[second].answered)
            left = monitor.records[second]
            monitor.replace([first])
            calls, answered = left.calls, stays.answered
            await until(lambda: stays.answered > answered + 5)
            assert left.calls == calls
            assert monitor.left == {second: left}
            assert monitor.records == {first: stays}
            monitor.replace([first, second])
            await until(lambda: left.calls > calls)
    assert stays.held_in_all == 1
    assert stays.failed == 0


def stand_still() -> None:
    time.sleep(0.3)


async def test_a_failure_while_the_process_stood_still_is_unknown() -> None:
    connected = asyncio.Event()

    async def be_silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    async with server:
        target = parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        monitor = Monitor(interval_s=0.01, timeout_s=0.1, held=0)
        monitor.replace([target])
        record = monitor.records[target]
        async with running(monitor):
            async with asyncio.timeout(DEADLINE_S):
                await connected.wait()
            stand_still()
            await until(lambda: record.calls)
            assert (record.unknown > 0, record.failed) == (True, 0)
            await until(lambda: record.failed)
    assert monitor.stalled_s > 0.2
