"""A new leader waits until it has seen everything that the previous leader may have written.

In: the objects that the API server has now, and the state, which the watch updates. Out: nothing;
`catch_up` returns when the state is not older than the API server. Invariants: an address that was
assigned a moment ago is known before the next address is assigned. Two types of Services delay
nothing: Services that cannot be decoded, which the watch skips too, and Services whose changes are
not stored, about which the watch reports nothing. A server that fails is called with growing
delays. A list without a resource version returns the present objects of the API server, and the
versions of one resource type grow (KEP-5504)."""

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
"""The time for the watch to deliver what is in the list. After it, a new list is read, because a
Service may have been deleted meanwhile."""
CHECK_INTERVAL_S = WATCH_S / 50
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0


async def catch_up(
    client: Client, state: State, projection: Callable[[Service], Service | None]
) -> None:
    """Wait until the state contains all Services in their present version, or a later one.
    `projection`: the projection of Services that the state stores."""
    await state.has_synced.wait()
    backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
    while True:
        wait_s = 0.0
        try:
            fresh = await readable(client, projection)
            async with asyncio.timeout(WATCH_S):
                while fresh := [service for service in fresh if behind(state, service)]:
                    await asyncio.sleep(CHECK_INTERVAL_S)
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


async def readable(
    client: Client, projection: Callable[[Service], Service | None]
) -> list[Service]:
    """Return all Services that the API server has now, without Services that cannot be decoded."""
    found = []
    async for page in client.pages(SERVICES):
        for data in page.items or ():
            item = read_item(decoder(SERVICES.type), data)
            if (
                isinstance(item, Item)
                and item.object is not None
                and (kept := projection(item.object)) is not None
            ):
                found.append(kept)
    return found


def behind(state: State, fresh: Service) -> bool:
    """Return whether the Service is missing in the state, or the state has an older version of the
    Service that differs in a stored field."""
    known = state.services.get(fresh.key)
    if known is None:
        return True
    return known.metadata.version < fresh.metadata.version and not same_but_version(known, fresh)
