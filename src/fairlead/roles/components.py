"""The lifecycle of every role: a list of components that are opened in order, run concurrently, and
are closed in the reverse order.

In: components. Out: their effects, until the role is cancelled or one of them fails. Their metrics
and their parts of `/state` are shown while they are open. Invariants: a component runs as soon as
it is open, so it works even while a later component takes long to open. Nothing is closed before
all work has ended. Every component that began to open is closed, also after an error or a signal
during the start."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import structlog

from fairlead.drivers import Component
from fairlead.errors import FairleadError
from fairlead.web import View

log = structlog.get_logger()


class Task(Component):
    """A component that consists of one coroutine."""

    def __init__(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self._run = run

    async def run(self) -> None:
        await self._run()


class Context(Component):
    """A component that consists of a context manager, for example a server."""

    def __init__(self, name: str, context: AbstractAsyncContextManager[object]) -> None:
        self.name = name
        self._context = context
        self._entered = AsyncExitStack()

    async def open(self) -> None:
        await self._entered.enter_async_context(self._context)

    async def close(self) -> None:
        await self._entered.aclose()


class Until(Component):
    """A component that delays the start of the components after it until `happened` returns."""

    def __init__(self, name: str, happened: Callable[[], Awaitable[object]]) -> None:
        self.name = name
        self._happened = happened

    async def open(self) -> None:
        await self._happened()


async def run_components(components: Sequence[Component], view: View) -> None:
    """Open and run these components until cancelled, and show them in `view`. If one fails, stop
    all of them and raise its error."""
    async with AsyncExitStack() as opened:
        try:
            async with asyncio.TaskGroup() as group:
                for component in components:
                    opened.push_async_callback(component.close)
                    await component.open()
                    opened.enter_context(view.showing(component))
                    group.create_task(component.run(), name=component.name)
                await asyncio.get_running_loop().create_future()  # until cancelled
        except BaseExceptionGroup as failed:
            raise root_error(failed) from None


def root_error(failed: BaseException) -> BaseException:
    """Return the single FairleadError in nested groups. Return the group itself if it has several
    errors, or an error that is a bug."""
    found = failed
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found if isinstance(found, FairleadError) else failed


async def remove_components(components: Sequence[Component]) -> None:
    """Remove everything that these components, in this or an earlier process, left on this host."""
    removed: list[str] = []
    for component in reversed(components):
        found = await component.remove()
        removed += found
        for what in found:
            log.info("removed", what=what)
    if not removed:
        log.info("nothing to remove: this role has left nothing on this host")
