"""The parts that the processes of all roles share: signals, the reflectors that update the state,
the garbage collector.

SIGTERM and SIGINT cancel the role's task, its `finally` blocks release resources, and the process
ends with exit code 0."""

import asyncio
import ctypes
import gc
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import structlog

from fairlead.backoff import Backoff
from fairlead.config import Config
from fairlead.drivers import Component
from fairlead.errors import plain
from fairlead.kube.access import Access
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
from fairlead.plan.exclusions import API_SERVER, of_config, of_hosts
from fairlead.plan.projection import Projection
from fairlead.roles.components import root_error
from fairlead.state import State

log = structlog.get_logger()

RESOLVE_S = 2.0
"""How long a start waits for the addresses of a name. The process may not need them: a start must
not depend on the resolver."""
START_S = 60.0
"""The garbage collector stays disabled for at most this time during a start."""
SECOND_GENERATION_THRESHOLD = 2
"""The threshold of the second generation of the garbage collector: its collection follows after
more than this number of collections of the youngest generation. The number does not change how
often each object is traversed, but a small number means fewer objects at a time: with ten, all
tasks waited for more than 10 ms."""
FULL_THRESHOLD = 4000
"""The threshold of a full collection: it follows after this number of collections of the second
generation. A thousand events cause about fifteen of these."""
SOURCES = ("services", "endpointslices", "nodes")
WITHOUT_SLICES = ("services", "nodes")
"""The sources of a role that does not need endpoints."""
ADDRESS_SOURCES = ("namespaces", "addresspools", "addressgrants")
"""The additional sources of a role that assigns addresses."""
CONSEQUENCES = {
    ADDRESS_POOLS.plural: (
        "until it does, addresses are assigned only from the pools of the configuration"
    ),
    ADDRESS_GRANTS.plural: "no address is assigned until it does",
}
"""The consequence if the API server does not serve a CRD of Fairlead."""


def run_until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """Run the role until it ends or a signal stops it."""
    asyncio.run(_run(main))


async def _run(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    signalled = False

    def stop(name: str) -> None:
        nonlocal signalled
        signalled = True
        log.info("stopping", signal=name)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
    except BaseExceptionGroup as failed:
        # One of several tasks failed, and the others were cancelled because of it: raise its error.
        raise root_error(failed) from None


def freshness_of(client: Client, config: Config) -> Freshness:
    """Return the ages of the role's watches. A watch becomes stale at the age at which the role's
    Lease would have expired."""
    return Freshness(
        lambda: client.answered_s, stale_s=stale_after_s(config.presence.lease_duration_s)
    )


class KnownHosts(Component):
    """The addresses that no Service may have and that are known without the objects of the cluster:
    those that the configuration contains, and those of the API server to which this process
    connects, and of its proxy. `api_servers`: the latter. A name that cannot be resolved is
    resolved again later; until then its addresses are not known."""

    name = "known hosts"

    def __init__(self, state: State, config: Config, access: Access) -> None:
        self.api_servers: Sequence[str] = ()
        self._state = state
        self._configured = of_config(config)
        urls = filter(None, (access.server, access.proxy))
        self._unresolved = list(dict.fromkeys(urlsplit(url).hostname or "" for url in urls))
        self._logged: set[str] = set()
        self._exclude()

    def _exclude(self) -> None:
        uses = self._configured | of_hosts(self.api_servers, API_SERVER)
        self._state.exclude("configuration", uses)

    async def resolve(self) -> None:
        """Resolve the names that are not resolved yet, each for at most `RESOLVE_S`."""
        for host in tuple(self._unresolved):
            try:
                async with asyncio.timeout(RESOLVE_S):
                    answers = await asyncio.get_running_loop().getaddrinfo(host, None)
            except OSError as problem:  # TimeoutError too
                if host not in self._logged:
                    self._logged.add(host)
                    what = plain(problem)
                    log.warning(
                        "cannot resolve the name of the API server", name=host, problem=what
                    )
                continue
            self._unresolved.remove(host)
            found = dict.fromkeys(str(address[0]) for *_, address in answers)
            self.api_servers = (*self.api_servers, *found)
        self._exclude()

    async def run(self) -> None:
        retry = Backoff()
        while self._unresolved:
            await asyncio.sleep(retry.next_s())
            await self.resolve()


class Feed(Component):
    """The reflectors that keep the Services, EndpointSlices and Nodes of `state` equal to the
    cluster, reduced by the projection; each is registered with `freshness`. `started`: set
    once the role has created all of its long-lived objects; if absent, once the state is complete.
    """

    name = "feed"

    def __init__(
        self,
        client: Client,
        state: State,
        freshness: Freshness,
        projection: Projection,
        *,
        started: asyncio.Event | None = None,
    ) -> None:
        self._client = client
        self._state = state
        self._freshness = freshness
        self._projection = projection
        self._started = started or state.has_synced

    async def run(self) -> None:
        client, state, projection, fresh = (
            self._client,
            self._state,
            self._projection,
            self._freshness,
        )
        async with asyncio.TaskGroup() as group:
            start = group.create_task
            start(
                _follow(client, SERVICES, state.update_services, state, fresh, projection.service)
            )
            if projection.slice is not None:
                slices = _follow(
                    client,
                    ENDPOINT_SLICES,
                    state.update_slices,
                    state,
                    fresh,
                    projection.slice,
                    label_selector=SERVED_SLICES,
                )
                start(slices)
            start(_follow(client, NODES, state.update_nodes, state, fresh, projection.node))
            start(tune_garbage_collector(state, self._started))


class AddressFeed(Component):
    """The reflectors that keep the ADDRESS_SOURCES of `state` equal to the cluster, for the role
    that assigns addresses. It is a component of its own because the other roles have no
    permission to list these objects."""

    name = "address feed"

    def __init__(self, client: Client, state: State, freshness: Freshness) -> None:
        self._client = client
        self._state = state
        self._freshness = freshness

    async def run(self) -> None:
        client, state, fresh = self._client, self._state, self._freshness
        # The API server may not serve these CRDs yet, or may no longer serve them.
        no_pools = partial(_record_absent, state, ADDRESS_POOLS.kind, ADDRESS_POOLS.plural)
        no_grants = partial(_record_absent, state, ADDRESS_GRANTS.kind, ADDRESS_GRANTS.plural)
        pools, grants = state.update_pools, state.update_grants
        async with asyncio.TaskGroup() as group:
            start = group.create_task
            start(_follow(client, NAMESPACES, state.update_namespaces, state, fresh))
            start(_follow(client, ADDRESS_POOLS, pools, state, fresh, on_absent=no_pools))
            start(_follow(client, ADDRESS_GRANTS, grants, state, fresh, on_absent=no_grants))


async def tune_garbage_collector(
    state: State, started: asyncio.Event, *, within_s: float = START_S
) -> None:
    """Exclude the objects of the start from garbage collection. There are hundreds of thousands of
    them, they live long, and the collector would traverse them repeatedly, for a third of a second
    each time at 10,000 Services. While they are created, a collection would find nothing, so it is
    disabled. Later events gradually replace all these objects by objects that are not excluded;
    therefore full collections also become rare. Objects that die young are still collected as early
    as before."""
    gc.disable()
    try:
        async with asyncio.timeout(within_s):
            await started.wait()
        # Freeze before the collector is enabled, because it treats all existing objects as young.
        gc.freeze()
    except TimeoutError:
        # For example, the API server does not answer. Its repeated requests leave reference cycles,
        # so the collector is needed.
        pass
    finally:
        gc.enable()
    await state.has_synced.wait()
    gc.freeze()
    return_memory()
    youngest, _, _ = gc.get_threshold()
    gc.set_threshold(youngest, SECOND_GENERATION_THRESHOLD, FULL_THRESHOLD)


def return_memory() -> None:
    """Return memory that this process has freed to the kernel (malloc_trim(3)), if the C library is
    glibc. By itself, glibc returns only what is at the end of its heap, and modules that were
    loaded later keep that in use."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _record_absent(state: State, kind: str, plural: str) -> None:
    """Record that the API server does not serve a CRD of Fairlead, and log it once."""
    if plural not in state.absent:
        log.error(
            f"the API server does not serve {kind}: {CONSEQUENCES[plural]}",
            fix="kubectl apply --server-side -f deploy/crds",
        )
    state.mark_absent(plural)


async def _follow(
    client: Client,
    resource: Resource[Any],
    update: Callable[[Mapping[ObjectKey, Any]], None],
    state: State,
    freshness: Freshness,
    projection: Callable[[Any], Any] | None = None,
    *,
    label_selector: str = "",
    on_absent: Callable[[], None] | None = None,
) -> None:
    reflector = Reflector(
        client, resource, transform=projection, label_selector=label_selector, on_absent=on_absent
    )
    freshness.add(resource.plural, reflector)
    async for changed in reflector.changes():
        update(changed)
        if reflector.synced:
            state.mark_synced(resource.plural)
