"""A copy of tables of OVN's northbound database, and waits for conditions on them, for `bench.ovn`.

In: the tables. Out: the time at which a condition holds. A wait that takes too long ends with
Unavailable."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from fairlead.errors import Unavailable
from fairlead.lab.ovn.central import Central
from fairlead.net.ovsdb import Database, Table

WITHIN_S = 600.0


@asynccontextmanager
async def within(what: str) -> AsyncIterator[None]:
    """Raise Unavailable if the block does not end in time. `what`: the end of its text."""
    try:
        async with asyncio.timeout(WITHIN_S):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{WITHIN_S:.0f} s have passed before {what}") from error


@asynccontextmanager
async def watched(central: Central, tables: Mapping[str, Table]) -> AsyncIterator["Watched"]:
    """Keep a copy of these tables up to date during the block."""
    made = Watched(central, tables)
    task = asyncio.create_task(made.north.run())
    try:
        await made.north.wait_synced(WITHIN_S)
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Watched:
    """A copy of tables of the northbound database."""

    def __init__(self, central: Central, tables: Mapping[str, Table]) -> None:
        self._changed = asyncio.Event()
        self.north = Database(
            "OVN_Northbound", [central.remote("nb")], tables, on_change=self._wake
        )

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait until the condition holds, and return the time (CLOCK_MONOTONIC)."""
        async with within(what):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
        return time.monotonic()

    def _wake(self, _: object) -> None:
        self._changed.set()
