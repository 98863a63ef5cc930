"""How every role lives: a list of components, opened in its order, run side by side, and closed in
the opposite order.

In: components. Out: what they do, until the role is cancelled or one of them fails; their metrics
and their part of `/state` are shown while they are open. Invariants: each component runs from the
moment at which it is open, so whatever takes long to open has the work of the components before it
done meanwhile; nothing is closed before all work has ended; everything that began to open is
closed, also after an error or a signal half way through."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import structlog

from fairlead.drivers import Component
from fairlead.errors import FairleadError
from fairlead.web import View

log = structlog.get_logger()


class Task(Component):
    """A component that is nothing but its work."""

    def __init__(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self._run = run

    async def run(self) -> None:
        await self._run()


class Context(Component):
    """A component that is entered and left: a server, for example."""

    def __init__(self, name: str, context: AbstractAsyncContextManager[object]) -> None:
        self.name = name
        self._context = context
        self._entered = AsyncExitStack()

    async def open(self) -> None:
        await self._entered.enter_async_context(self._context)

    async def close(self) -> None:
        await self._entered.aclose()


class Until(Component):
    """Holds the components after it back until `happened` returns."""

    def __init__(self, name: str, happened: Callable[[], Awaitable[object]]) -> None:
        self.name = name
        self._happened = happened

    async def open(self) -> None:
        await self._happened()


async def run_components(components: Sequence[Component], view: View) -> None:
    """Open and run these components until cancelled, and show them in `view`. If one fails, all
    end, and its error is raised."""
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
            raise the_failure(failed) from None


def the_failure(failed: BaseException) -> BaseException:
    """The one error in nested groups; or the group, if there are several or if it is a bug."""
    found = failed
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found if isinstance(found, FairleadError) else failed


async def remove_components(components: Sequence[Component]) -> None:
    """Take away what these components, or their predecessors, left on this host, and log it."""
    removed: list[str] = []
    for component in reversed(components):
        found = await component.remove()
        removed += found
        for what in found:
            log.info("removed", what=what)
    if not removed:
        log.info("nothing to remove: nothing of this role is here")
