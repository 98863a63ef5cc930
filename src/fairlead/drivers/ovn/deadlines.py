"""The times at which rows need a further step: the connections of a backend end, or the row is
deleted.

In: the time that the marks of each row name. Out: calls with the rows whose time has come.
The rows tell these times themselves, so a restart, a failed pass or another pass of the Service
loses none."""

import asyncio
import heapq
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

LOOK_S = 60.0
"""The clock is looked at after this time at the latest, because it may be set."""


class Deadlines:
    """The next time of each row. Run `run` in one task."""

    def __init__(
        self, clock: Callable[[], float], passed: Callable[[Collection[str]], None]
    ) -> None:
        """`clock` returns Unix time. `passed` is called once with the UUIDs of the rows whose time
        has come."""
        self._clock = clock
        self._passed = passed
        self._due: dict[str, int] = {}
        self._order: list[tuple[int, str]] = []
        """A heap of the times. An entry that `_due` does not have is outdated."""
        self._changed = asyncio.Event()

    def note(self, row: str, due: int | None) -> None:
        """Record the time of a row; None: it needs no further step."""
        if due is None:
            self._due.pop(row, None)
        elif self._due.get(row) != due:
            self._due[row] = due
            heapq.heappush(self._order, (due, row))
            self._changed.set()

    async def run(self) -> NoReturn:
        """Call `passed` at the times, until cancelled."""
        while True:
            self._changed.clear()
            if passed := self._take():
                self._passed(passed)
            left_s = self._order[0][0] - self._clock() if self._order else LOOK_S
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await self._changed.wait()

    def _take(self) -> set[str]:
        found = set()
        while self._order and self._order[0][0] <= self._clock():
            due, row = heapq.heappop(self._order)
            if self._due.get(row) == due:
                del self._due[row]
                found.add(row)
        return found
