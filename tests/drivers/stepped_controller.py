"""Controllers whose calls to the API server arrive in any order, and of which each may fail before
or after it took effect.

In: an embedded API server. Out: `SteppedController`s: the real planner and drivers of a controller.
A stepped controller stops before every call until the test decides how the call ends, and receives
changes of the server only when the test delivers them. Nothing here waits for time to pass."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from fairlead.config import Config
from fairlead.drivers import Driver
from fairlead.drivers.claim import ClaimDriver
from fairlead.drivers.grant_cache import GrantCache
from fairlead.drivers.grants import GrantDriver
from fairlead.drivers.kept_addresses import KeptAddresses
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.publish import PublishDriver
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import FairleadError, Refused
from fairlead.kube.access import Access
from fairlead.kube.answers import ServerUnavailable
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.object_cache import ObjectCache
from fairlead.kube.objects import NAMESPACES, SERVICES, Resource
from fairlead.kube.watch_events import Item, read_item
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.kinds import Kind
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.keeping import limits_of
from fairlead.roles.controller import Planner
from fairlead.state import State

Ending = Literal["well", "lost before", "lost after"]

CONFIG = Config(default_class="fairlead.io/direct")


class StoppingClient(Client):
    """A client that stops before each call until `continue_call` decides how the call ends."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self.stopped = asyncio.Event()
        self.pending_call = ""
        """The call before which the client has stopped: `apply fairlead-publish`, `delete
        AddressGrant`."""
        self._ending: asyncio.Future[Ending] | None = None

    def continue_call(self, ending: Ending) -> None:
        assert self._ending is not None
        self.stopped.clear()
        self._ending.set_result(ending)

    async def _call(self, method: str, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.pending_call = f"{method} {what}"
        self._ending = asyncio.get_running_loop().create_future()
        self.stopped.set()
        ending = await self._ending
        self.pending_call = ""
        if ending == "lost before":
            raise ServerUnavailable("the request was lost")
        answer = await call()
        if ending == "lost after":
            raise ServerUnavailable("the answer was lost")
        return answer

    async def get(self, resource: Resource[Any], *arguments: Any, **named: Any) -> Any:
        call = super().get
        return await self._call("get", resource.kind, lambda: call(resource, *arguments, **named))

    async def create(self, resource: Resource[Any], *arguments: Any, **named: Any) -> Any:
        call = super().create
        return await self._call(
            "create", resource.kind, lambda: call(resource, *arguments, **named)
        )

    async def replace(self, resource: Resource[Any], *arguments: Any, **named: Any) -> Any:
        call = super().replace
        return await self._call(
            "replace", resource.kind, lambda: call(resource, *arguments, **named)
        )

    async def apply(self, *arguments: Any, field_manager: str, **named: Any) -> Any:
        call = super().apply
        return await self._call(
            "apply", field_manager, lambda: call(*arguments, field_manager=field_manager, **named)
        )

    async def delete(self, resource: Resource[Any], *arguments: Any, **named: Any) -> Any:
        call = super().delete
        return await self._call(
            "delete", resource.kind, lambda: call(resource, *arguments, **named)
        )


class Watch:
    """The objects of one kind that a controller has received: a mirror, up to a version."""

    def __init__(
        self, server: ApiServer, kind: Kind, resource: Resource[Any], update: Callable[[Any], None]
    ) -> None:
        self._server = server
        self._decoder = msgspec.json.Decoder(resource.type)
        self._update = update
        self._cache: ObjectCache[Any] = ObjectCache()
        self._kind = kind
        self._version = server.store.version
        self._cache.begin_list()
        for stored in server.store.all_of(kind):
            self._process(stored.encoded, gone=False)
        self._cache.complete_list()
        update(self._cache.take())

    def receive(self, limit: int) -> None:
        """Receive the next changes, at most `limit`."""
        for change in self._server.store.since(self._kind, self._version)[:limit]:
            self._process(change.stored.encoded, gone=change.event == "DELETED")
            self._version = change.version
        self._update(self._cache.take())

    def _process(self, encoded: bytes, *, gone: bool) -> None:
        item = read_item(self._decoder, msgspec.Raw(encoded), gone=gone)
        assert isinstance(item, Item), item
        self._cache.process(item)


class SteppedController:
    """A controller. It begins with the present objects of the server."""

    def __init__(self, server: ApiServer, config: Config = CONFIG) -> None:
        self.client = StoppingClient(Access(server.url))
        self.state = State(())
        self.dirty: set[ServiceKey] = set()
        self.refused: set[ServiceKey] = set()
        self.events: list[tuple[ServiceKey, str, str]] = []
        self._ready: dict[ServiceKey, LoadBalancer | Refused | None] = {}
        sources: list[tuple[Resource[Any], Callable[[Any], None]]] = [
            (ADDRESS_POOLS, self.state.update_pools),
            (ADDRESS_GRANTS, self.state.update_grants),
            (SERVICES, self.state.update_services),
            (NAMESPACES, self.state.update_namespaces),
        ]
        self.watches: dict[str, Watch] = {}
        for resource, update in sources:
            kind = server.registry.kinds.find(resource.group_version, resource.plural)
            if kind is None:
                self.state.mark_absent(resource.plural)
            else:
                self.watches[resource.plural] = Watch(server, kind, resource, update)
        newest = ServiceCache(self.state)
        writer = ServiceWriter(self.client, newest)
        grant_cache = GrantCache(self.state)
        self.now = datetime.now(UTC)
        keeping = KeptAddresses(
            self.client, self.state, grant_cache, self, limits_of(config), now=lambda: self.now
        )
        grants = GrantDriver(self.client, writer, newest, grant_cache, keeping)
        self.grants = grants
        self.drivers: list[Driver[ServiceKey, LoadBalancer, Any, Any, Any]] = [
            ClaimDriver(writer, newest, self),
            grants,
            PublishDriver(writer, newest, self, grants.publish_precondition, grants.granted),
        ]
        self.planner = Planner(self.state, config)
        self._task: asyncio.Task[None] | None = None
        self._subscription = self.state.subscribers.subscription()
        self._dirty_keys = self._subscription.__enter__()
        self.audit()

    def audit(self) -> None:
        """Mark all Services and grants as dirty."""
        self.dirty |= {*self.state.services, *self.state.granted}

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        self.events.append((key, reason, message))

    async def receive(
        self,
        limit: int,
        kinds: Collection[str] = ("services", "addressgrants", "addresspools", "namespaces"),
    ) -> None:
        for kind in self.watches.keys() & kinds:
            self.watches[kind].receive(limit)
        self._dirty_keys.mark([ServiceKey("", "")])
        self.dirty |= await self._dirty_keys.take(0) - {ServiceKey("", "")}

    @property
    def has_work(self) -> bool:
        """Return whether there is a dirty Service, or one that waits for its pass."""
        return bool(self.dirty or self._ready)

    def _plan(self) -> None:
        """Plan all dirty Services at once, like the loop. A Service that waits for its pass gets
        the newest intent."""
        while self.dirty:
            keys, self.dirty = self.dirty, set()
            planned = self.planner(keys)
            self.dirty |= planned.keys() - keys
            self._ready |= {key: planned.get(key) for key in keys}

    @property
    def is_before_call(self) -> bool:
        """Return whether the controller has stopped before a call."""
        return self._task is not None

    async def step(self, ending: Ending, choice: int = 0) -> None:
        """Run until the next call. `ending`: how the call ends before which the controller has
        stopped."""
        if self._task is None:
            if not self.has_work:
                return
            self._plan()
            key = sorted(self._ready)[choice % len(self._ready)]
            self._task = asyncio.ensure_future(self._serve(key, self._ready.pop(key)))
        else:
            self.client.continue_call(ending)
        stopped = asyncio.ensure_future(self.client.stopped.wait())
        await asyncio.wait({self._task, stopped}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        stopped.cancel()
        if self._task.done():
            self._task.result()
            self._task = None

    async def run_until(self, pending_call: str, key: ServiceKey, limit: int = 50) -> None:
        """Serve this Service until the call `pending_call`; if it is empty, until the end of one
        pass."""
        if self._task is None:
            self.dirty, self._ready = {key}, {}
        for _ in range(limit):
            await self.step("well")
            if self._task is None or (pending_call and self.client.pending_call == pending_call):
                break
        assert self.client.pending_call == pending_call, (
            f"it has stopped before {self.client.pending_call!r}"
        )

    async def run_until_idle(self, limit: int = 500) -> None:
        """Run until there is no more work, and receive every change."""
        for _ in range(limit):
            await self.receive(1_000)
            if self._task is None and not self.has_work:
                return
            await self.step("well")
        raise AssertionError("the controller does not become idle")

    async def stop(self) -> None:
        """Kill the controller where it has stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=10)
            self._task = None

    async def _serve(self, key: ServiceKey, intent: LoadBalancer | Refused | None) -> None:
        """Run one pass of the loop for this Service."""
        self.refused.discard(key)
        if isinstance(intent, Refused):
            self.refused.add(key)
            return
        wanted = {key: intent} if intent is not None else {}
        try:
            for driver in self.drivers if wanted else self.drivers[::-1]:
                changes = driver.diff(driver.render(wanted), await driver.read([key]))
                if (
                    changes
                    and (outcome := (await driver.apply(changes)).get(key)) is not None
                    and outcome.state != "done"
                ):
                    self.dirty.add(key)
                    return
        except FairleadError:
            self.dirty.add(key)
