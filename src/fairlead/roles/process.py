"""What all roles share as processes: signals, the feed of objects into the state.

SIGTERM and SIGINT cancel the role's task; its `finally` blocks close what must be closed; the
process ends with 0."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import structlog

from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.freshness import Freshness, stale_after_s
from fairlead.kube.objects import (
    ENDPOINT_SLICES,
    NAMESPACES,
    NODES,
    SERVED_SLICES,
    SERVICES,
    ObjectKey,
    Resource,
)
from fairlead.kube.reflector import Reflector
from fairlead.plan.projection import Projection
from fairlead.roles.components import the_failure
from fairlead.state import State

log = structlog.get_logger()

START_S = 60.0
"""A start that takes longer is none that should be made short."""
YOUNG_SOON = 2
"""A collection of young objects comes after more than so many of the youngest. Each object is
looked at as often whatever the number, but fewer of them at a time: after ten, all else waited for
ten milliseconds and more."""
FULL_SELDOM = 4000
"""A collection of all objects comes after so many of young ones, of which there are fifteen in a
thousand events."""
SOURCES = ("services", "endpointslices", "nodes")
WITHOUT_SLICES = ("services", "nodes")
"""What a role needs that has nothing to do with endpoints."""
ADDRESS_SOURCES = ("namespaces", "addresspools", "addressgrants")
"""What addresses are given by, beside that."""
WITHOUT = {
    ADDRESS_POOLS.plural: (
        "addresses are given from the pools of the configuration only, until it does"
    ),
    ADDRESS_GRANTS.plural: "no address is given until it does",
}
"""What follows where the API server lacks a kind of ours."""


def run_until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """Run the role until it ends or a signal asks it to."""
    asyncio.run(_run(main))


async def _run(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    asked = False

    def stop(name: str) -> None:
        nonlocal asked
        asked = True
        log.info("stopping", signal=name)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    except BaseExceptionGroup as failed:
        # Of tasks that ran beside each other one failed, and the others were ended for it: that one
        # is to be told.
        raise the_failure(failed) from None


def freshness_of(client: Client, config: Config) -> Freshness:
    """The ages of the role's watches, which are stale as soon as its Lease would have expired."""
    return Freshness(
        lambda: client.answered_s, stale_s=stale_after_s(config.presence.lease_duration_s)
    )


class Feed(Component):
    """The reflectors that keep `state` equal to the cluster, as far as `keep` lets objects through;
    each is registered with `freshness`. `started`: set once the role has everything that it keeps;
    if absent, that is once the state is complete. `addresses`: of ADDRESS_SOURCES too."""

    name = "feed"

    def __init__(
        self,
        client: Client,
        state: State,
        freshness: Freshness,
        keep: Projection,
        *,
        started: asyncio.Event | None = None,
        addresses: bool = False,
    ) -> None:
        self._client = client
        self._state = state
        self._freshness = freshness
        self._keep = keep
        self._started = started or state.whole
        self._addresses = addresses

    async def run(self) -> None:
        state, keep = self._state, self._keep
        follow = partial(_follow, self._client, state=state, freshness=self._freshness)
        async with asyncio.TaskGroup() as group:
            group.create_task(follow(SERVICES, state.update_services, keep=keep.service))
            if keep.slice is not None:
                group.create_task(
                    follow(
                        ENDPOINT_SLICES,
                        state.update_slices,
                        keep=keep.slice,
                        label_selector=SERVED_SLICES,
                    )
                )
            group.create_task(follow(NODES, state.update_nodes, keep=keep.node))
            if self._addresses:
                group.create_task(follow(NAMESPACES, state.update_namespaces))
                # An API server may not have these kinds, yet or any more.
                for kind, update in (
                    (ADDRESS_POOLS, state.update_pools),
                    (ADDRESS_GRANTS, state.update_grants),
                ):
                    lacking = partial(_lack, state, kind.kind, kind.plural)
                    group.create_task(follow(kind, update, on_absent=lacking))
            group.create_task(spare_the_collector(state, self._started))


async def spare_the_collector(
    state: State, started: asyncio.Event, *, within_s: float = START_S
) -> None:
    """What there is at the start stays: hundreds of thousands of objects that the collector of
    cycles would look through again and again, a third of a second each time at 10,000 Services.
    While they come to be it would find nothing. Events put others in their place, and in the end as
    many: all of those are to be looked through seldom. What dies young is found as soon as ever."""
    gc.disable()
    try:
        async with asyncio.timeout(within_s):
            await started.wait()
        gc.freeze()  # before it is enabled: it would take all that there is for young
    except TimeoutError:
        pass  # a server that is away, say: whoever asks it again and again leaves cycles behind
    finally:
        gc.enable()
    await state.whole.wait()
    gc.freeze()
    youngest, _, _ = gc.get_threshold()
    gc.set_threshold(youngest, YOUNG_SOON, FULL_SELDOM)


def _lack(state: State, kind: str, plural: str) -> None:
    """Record, and log once, that the API server does not know one of our kinds."""
    if plural not in state.absent:
        log.error(
            f"the API server does not know {kind}: {WITHOUT[plural]}",
            fix="kubectl apply --server-side -f deploy/crds",
        )
    state.lack(plural)


async def _follow(
    client: Client,
    resource: Resource[Any],
    update: Callable[[Mapping[ObjectKey, Any]], None],
    state: State,
    freshness: Freshness,
    keep: Callable[[Any], Any] | None = None,
    *,
    label_selector: str = "",
    on_absent: Callable[[], None] | None = None,
) -> None:
    reflector = Reflector(
        client, resource, transform=keep, label_selector=label_selector, on_absent=on_absent
    )
    freshness.add(resource.plural, reflector)
    async for changed in reflector.changes():
        update(changed)
        if reflector.synced:
            state.synced(resource.plural)
