"""A role's eye on the settings of its host, again and again: interfaces and nodes come and go."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import structlog

from fairlead.drivers.host import Host, Need
from fairlead.errors import FairleadError
from fairlead.web import View

log = structlog.get_logger()

LOOK_S = 60.0
"""So often the settings are looked at."""


async def watch_host(
    host: Host, needs: Callable[[], Awaitable[Collection[Need]]], view: View
) -> None:
    """Find what does harm, show it, and put it right where that is wanted, until cancelled."""
    view.host = lambda: host.findings
    while True:
        try:
            host.look(await needs())
        except FairleadError as problem:
            log.warning("the host's settings cannot be seen to", problem=str(problem))
        await asyncio.sleep(LOOK_S)
