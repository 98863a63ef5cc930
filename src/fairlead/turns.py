"""Long work of an event loop in parts, between which others have their turn.

In: the parts. Out: the same, one after another. `in_turns` is for work that others wait for;
`gently` for work that nobody waits for, such as an audit. Neither makes a thread: a thread takes
the interpreter from the event loop for as long, and at moments that the event loop does not choose.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

REST = 2.0
"""Others have so many times as long as a part has taken: what is done gently takes a third of the
time at most."""


def parts(everything: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """So many at a time."""
    return (everything[at : at + size] for at in range(0, len(everything), size))


async def in_turns(work: Iterable[T]) -> AsyncIterator[T]:
    """After each part but the last those have their turn who are waiting for it."""
    first = True
    for part in work:
        if not first:
            await asyncio.sleep(0)
        first = False
        yield part


async def gently(work: Iterable[T]) -> AsyncIterator[T]:
    """After each part all others have longer than it took to make it and to use it. By CPU time:
    where other processes keep this one waiting, it does not rest for that."""
    begun_s = time.thread_time()
    for part in work:
        yield part
        await asyncio.sleep(REST * (time.thread_time() - begun_s))
        begun_s = time.thread_time()
