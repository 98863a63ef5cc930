"""What all roles share as processes: signals, the feed of objects into the state.

SIGTERM and SIGINT cancel the role's task; its `finally` blocks close what must be closed; the process ends with 0.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from fairlead.kube.client import Client
from fairlead.kube.objects import ENDPOINT_SLICES, NODES, SERVICES, ObjectKey, Resource
from fairlead.kube.reflector import Reflector
from fairlead.plan.projection import Projection
from fairlead.state import State

log = structlog.get_logger()

SOURCES = ("services", "endpointslices", "nodes")


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


def feed(group: asyncio.TaskGroup, client: Client, state: State, keep: Projection) -> None:
    """Start the reflectors that keep `state` equal to the cluster, as far as `keep` lets through."""
    group.create_task(_follow(client, SERVICES, state.update_services, state, keep.service))
    group.create_task(_follow(client, ENDPOINT_SLICES, state.update_slices, state, keep.slice))
    group.create_task(_follow(client, NODES, state.update_nodes, state, keep.node))


async def _follow(
    client: Client,
    resource: Resource[Any],
    update: Callable[[Mapping[ObjectKey, Any]], None],
    state: State,
    keep: Callable[[Any], Any],
) -> None:
    reflector = Reflector(client, resource, keep=keep)
    async for changed in reflector.changes():
        update(changed)
        if reflector.synced:
            state.synced(resource.plural)
