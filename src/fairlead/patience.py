"""Calls with a limited waiting time, because the other side may hang.

In: calls, each for some keys. Out: the results by key; None for a call that takes too long. Such a
call continues. When it ends, `late` is called with the keys whose callers did not wait for it, and
`unread` contains its results. Invariants: one call runs at a time. After a call has taken too long,
callers do not wait until a call has ended in time again, so a side that hangs delays only one
caller. Every exception of a call ends the TaskGroup."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Generic, TypeVar

import structlog

log = structlog.get_logger()

KeyT = TypeVar("KeyT")
ResultT = TypeVar("ResultT")


class Patience(Generic[KeyT, ResultT]):
    """The calls of one side. `name`: in logs. `late`: called with the keys whose callers did not
    wait, when the call that they did not wait for has ended."""

    def __init__(
        self, name: str, group: asyncio.TaskGroup, late: Callable[[Collection[KeyT]], None]
    ) -> None:
        self.unread: Mapping[KeyT, ResultT] = {}
        """The results of the last call, if its caller has not waited for them."""
        self._name = name
        self._group = group
        self._late = late
        self._running: asyncio.Task[Mapping[KeyT, ResultT]] | None = None
        self._until_s = 0.0
        """When the running call is late."""
        self._left: set[KeyT] = set()
        """The keys whose callers did not wait for the running call."""
        self._slow = False
        """Whether the last call has taken too long, or the running one does."""

    async def call(
        self,
        keys: Collection[KeyT],
        work: Callable[[], Coroutine[Any, Any, Mapping[KeyT, ResultT]]],
        wait_s: float,
    ) -> Mapping[KeyT, ResultT] | None:
        """Start the work for these keys, and wait for it at most `wait_s`. Return None if it takes
        longer, or if another call takes too long."""
        while (running := self._running) is not None:
            if not await self._ends(running):
                self._left.update(keys)
                return None
        task = self._group.create_task(work())
        self._running = task
        self._until_s = asyncio.get_running_loop().time() + wait_s
        task.add_done_callback(self._ended)
        if await self._ends(task):
            return task.result()
        self._left.update(keys)
        return None

    async def _ends(self, task: asyncio.Task[Mapping[KeyT, ResultT]]) -> bool:
        """Return whether the call ends while its callers wait."""
        left_s = 0.0 if self._slow else self._until_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({task}, timeout=max(left_s, 0.0))
        if not done and not self._slow:
            self._slow = True
            log.warning("a driver takes long, and nothing waits for it", driver=self._name)
        return bool(done)

    def _ended(self, task: asyncio.Task[Mapping[KeyT, ResultT]]) -> None:
        self._running = None
        left, self._left = self._left, set()
        if task.cancelled() or task.exception() is not None:
            return  # so is the group
        if self._slow and asyncio.get_running_loop().time() <= self._until_s:
            self._slow = False
            log.info("a driver answers in time again", driver=self._name)
        self.unread = {key: each for key, each in task.result().items() if key in left}
        if left:
            self._late(left)
