"""Scenarios that run in a network namespace, in a separate thread with its own event loop, sockets
and helpers."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from fairlead.lab import namespace

Scenario = Callable[[], Coroutine[Any, Any, None]]


def run_inside(name: str, scenario: Scenario, *, deadline_s: float | None = None) -> None:
    """Run the scenario in this namespace. Raise its error here."""
    failures: list[BaseException] = []

    async def limited() -> None:
        async with asyncio.timeout(deadline_s):
            await scenario()

    def work() -> None:
        try:
            namespace.enter(name)
            asyncio.run(limited())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
