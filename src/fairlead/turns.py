"""Splits long work in an event loop into parts, so that other tasks run between two parts.

In: the parts. Out: the same parts, one after another. `in_turns` is for work that other tasks wait
for; `in_background` is for work that is not urgent, such as an audit. Neither uses a thread: a
thread would hold the interpreter lock for as long, and at moments that the event loop does not
control."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

REST = 2.0
"""The pause after a part, as a multiple of the CPU time of the part. So background work takes at
most a third of the time."""


def parts(everything: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return consecutive slices of `size` elements."""
    return (everything[at : at + size] for at in range(0, len(everything), size))


async def in_turns(work: Iterable[T]) -> AsyncIterator[T]:
    """Yield the parts. Between two parts, tasks that are ready to run get their turn."""
    first = True
    for part in work:
        if not first:
            await asyncio.sleep(0)
        first = False
        yield part


async def in_background(work: Iterable[T]) -> AsyncIterator[T]:
    """Yield the parts. After each part, pause for a multiple (`REST`) of the CPU time that it took
    to create and process the part. CPU time is counted because a process that has to wait for a CPU
    need not pause longer for that."""
    begun_s = time.thread_time()
    for part in work:
        yield part
        await asyncio.sleep(REST * (time.thread_time() - begun_s))
        begun_s = time.thread_time()
