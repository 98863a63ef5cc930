"""Before a new leader works: see all that the leader before it may have written.

In: what the API server has now, and the state, which the watch keeps. Out: nothing; it ends when
the state is no older. Invariants: an address that was given a moment ago is known before any is
given; what cannot be read, which the watch passes over as well, and what changed in nothing that is
kept, which it does not tell, keep nobody waiting; a server that fails is asked ever more rarely. A
list without a version is what the API server has now; versions of one kind grow (KEP-5504)."""

import asyncio
from collections.abc import Callable

import structlog

from fairlead.backoff import Backoff
from fairlead.errors import FairleadError, Unavailable
from fairlead.kube.client import Client, decoder
from fairlead.kube.objects import SERVICES, Service
from fairlead.kube.watch_events import Item, read_item, same_but_version
from fairlead.state import State

log = structlog.get_logger()

WATCH_S = 1.0
"""So long the watch may need for what is in the list, before another list is taken: a Service may
be gone meanwhile."""
LOOK_S = WATCH_S / 50
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0


async def catch_up(client: Client, state: State, keep: Callable[[Service], Service | None]) -> None:
    """Wait until the state shows all Services as they are now, or later. `keep`: what the state
    keeps of them."""
    await state.whole.wait()
    backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
    while True:
        wait_s = 0.0
        try:
            fresh = await readable(client, keep)
            async with asyncio.timeout(WATCH_S):
                while fresh := [service for service in fresh if behind(state, service)]:
                    await asyncio.sleep(LOOK_S)
            return
        except TimeoutError:
            log.info(
                "catching up",
                why="the watch is behind, or a Service was deleted meanwhile",
                services=len(fresh),
            )
        except FairleadError as problem:
            log.info("catching up", why=str(problem))
            wait_s = problem.retry_after_s if isinstance(problem, Unavailable) else 0.0
        await asyncio.sleep(backoff.next_s(wait_s))


async def readable(client: Client, keep: Callable[[Service], Service | None]) -> list[Service]:
    """All Services that the API server has now, but for those that nobody can read."""
    found = []
    async for page in client.pages(SERVICES):
        for data in page.items or ():
            told = read_item(decoder(SERVICES.type), data)
            if (
                isinstance(told, Item)
                and told.object is not None
                and (kept := keep(told.object)) is not None
            ):
                found.append(kept)
    return found


def behind(state: State, fresh: Service) -> bool:
    """Whether the state has an older version of this Service that differs in what is kept, or
    none."""
    known = state.services.get(fresh.key)
    if known is None:
        return True
    return known.metadata.version < fresh.metadata.version and not same_but_version(known, fresh)
