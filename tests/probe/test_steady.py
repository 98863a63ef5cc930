"""The steady load states why requests failed: the connection was not accepted, it was not answered,
or the load itself did not run."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from fairlead.probe.steady import Period, Steady

DEADLINE_S = 60.0


async def periods(
    port: int, until: Callable[[Period], bool], event: Callable[[], object] = lambda: None
) -> Period:
    """Return the period of a load with one client, as soon as it satisfies the condition."""
    load = Steady("127.0.0.1", port, callers=1, timeout_s=0.1, open_connections=0)
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


async def test_a_stall_of_the_load_itself_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        await periods(
            server.getsockname()[1], lambda period: period.stalled_ms > 300, lambda: time.sleep(0.5)
        )
