"""/healthz, /readyz, /metrics and /state of one role.

In: a View that the role keeps up to date. Out: HTTP on one address. /healthz says that the process
lives, /readyz that its first whole pass is done, /metrics is Prometheus text, /state is JSON
(`role_state`): each Service with what was planned and what became of it, what each component shows,
and the age of each watch. Read-only. /readyz/CHECK answers for one check, as kube-apiserver's does:
`synced` is what /readyz itself says, `current` fails while a watch is stale. `current` does not
affect /readyz: a gateway that has lost the API server forwards as well as before. Both are made in
a thread, from copies: of 10,000 Services they take a second, during which the role goes on with its
work. Callers that come while one is being made share it. Each connection is for one request, and
`connections` bounds their number. Invariants: /state, which names every node and its address, is
for callers on the host itself (or, in a pod, inside the pod), whichever address the server listens
on; /metrics is for these callers, and for the networks that the configuration names."""

import asyncio
import ipaddress
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)

from fairlead.drivers import Component
from fairlead.errors import Refused
from fairlead.kube.freshness import Freshness
from fairlead.model import Finding, LoadBalancer, NodeService, Outcome, ServiceKey
from fairlead.net.address import split_host_port
from fairlead.role_state import (
    PART_FIELDS,
    STATES,
    VERSION,
    ApiServerContact,
    Role,
    RoleState,
    ServiceState,
    WatchState,
)
from fairlead.web.connections import serving
from fairlead.web.metrics import FreshnessCollector, RoleCollector, ServicesCollector

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Steps(Protocol):
    """A loop, as far as it is shown."""

    @property
    def settled(self) -> asyncio.Event: ...

    @property
    def drift(self) -> int: ...


class View:
    """The latest of everything, for showing only."""

    def __init__(self, role: Role, node_name: str) -> None:
        self.role = role
        self.node_name = node_name
        self.registry = CollectorRegistry()
        self.standing_by: Callable[[], bool] = lambda: False
        """Whether a role that follows no loop is ready to take over from one that does."""
        self.components: list[Component] = []
        """Those that are open, in the order in which they were opened."""
        self.host: Callable[[], Sequence[Finding]] = tuple
        """What is wrong with the host, see `drivers.host`."""
        self.intents: dict[ServiceKey, LoadBalancer | NodeService] = {}
        self._loop: Steps | None = None
        self.outcomes: dict[ServiceKey, Outcome] = {}
        self.freshness: Freshness | None = None
        """The ages of the role's watches; None: it has none."""
        self.registry.register(RoleCollector(self, role))
        self.registry.register(ServicesCollector(self))
        # CPU seconds, memory, open files, start time, under the names that all clients of
        # Prometheus use.
        ProcessCollector(registry=self.registry)

    @contextmanager
    def showing(self, component: Component) -> Iterator[None]:
        """Show the status and the metrics of a component inside the block."""
        collectors = component.collectors()
        with ExitStack() as shown:
            for each in collectors:
                self.registry.register(each)
                shown.callback(self.registry.unregister, each)
            self.components.append(component)
            shown.callback(self.components.remove, component)
            yield

    def follow(self, loop: "Steps | None") -> None:
        """Show whether this loop is in step; None: there is none to follow, and nothing is known
        that could be shown. A loop begins with nothing as well: it does not hear of what went while
        nobody looked."""
        self._loop = loop
        self.intents.clear()
        self.outcomes.clear()

    @property
    def ready(self) -> bool:
        return self._loop.settled.is_set() if self._loop is not None else self.standing_by()

    @property
    def working(self) -> bool:
        """Whether there is a loop to follow."""
        return self._loop is not None

    @property
    def drift(self) -> int:
        return self._loop.drift if self._loop is not None else 0

    def record(
        self,
        intents: Mapping[ServiceKey, LoadBalancer | NodeService],
        outcomes: Mapping[ServiceKey, Outcome],
    ) -> None:
        """Take in a report of the loop."""
        for key, outcome in outcomes.items():
            if key in intents:
                self.intents[key] = intents[key]
            else:
                self.intents.pop(key, None)
            if key in intents or outcome.state != "done":
                # What happened once is told by an Event; it is no part of the state.
                self.outcomes[key] = msgspec.structs.replace(outcome, notes=())
            else:
                self.outcomes.pop(key, None)

    def watch(self, freshness: Freshness) -> None:
        """Set the watches whose ages are shown."""
        self.freshness = freshness
        self.registry.register(FreshnessCollector(freshness))

    def checks(self) -> Mapping[str, str]:
        """What is wrong with each check of /readyz/CHECK; an empty text: nothing."""
        stale = self.freshness.stale() if self.freshness is not None else {}
        return {
            "synced": "" if self.ready else "not in step with the cluster yet",
            "current": f"stale: {', '.join(f'{name} {age_s:.0f} s' for name, age_s in stale.items())}"
            if stale
            else "",
        }

    def state(self) -> RoleState:
        """For `/state`. May be called from any thread."""
        intents, outcomes = self.intents.copy(), self.outcomes.copy()
        # Which fields there are, and what their types are, depends on the role.
        fields: dict[str, Any] = {
            "services": {
                str(key): ServiceState(intents.get(key), outcomes.get(key))
                for key in sorted(intents.keys() | outcomes.keys())
            }
        }
        for component in self.components.copy():
            if (part := component.status()) is not None:
                fields[PART_FIELDS[type(part)]] = part
        if self.freshness is not None:
            stale = self.freshness.stale()
            fields |= {
                "current": not stale,
                "api_server": ApiServerContact(round(self.freshness.answer_age_s, 1)),
                "watches": {
                    name: WatchState(round(age_s, 1), name in stale)
                    for name, age_s in self.freshness.ages().items()
                },
            }
        return STATES[self.role](
            version=VERSION,
            node=self.node_name,
            ready=self.ready,
            host=tuple(self.host()),
            **fields,
        )


@asynccontextmanager
async def serve(view: View, listen: str, metrics_from: Sequence[str] = ()) -> AsyncIterator[None]:
    """Serve the view on `address:port` while inside, `*` for all addresses of both families; an
    empty text serves nothing. `metrics_from`: networks from which metrics may be read, in addition
    to the host itself."""
    if not listen or listen.endswith(":0"):
        yield
        return
    host, port = split_host_port(listen)
    runner = web.AppRunner(_application(view, metrics_from), access_log=None)
    await runner.setup()
    if (server := runner.server) is None:
        raise RuntimeError("a runner that is set up has a server")
    async with AsyncExitStack() as opened:
        opened.push_async_callback(runner.cleanup)
        try:
            await opened.enter_async_context(serving(server, host, port))
        except (OSError, ValueError) as error:
            raise Refused(
                f"cannot listen on {listen}: {error}", fix="set web.listen in the configuration"
            ) from error
        yield


class _Shared:
    """A value that takes long to compute, and is computed once for all callers that ask
    meanwhile."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._making: asyncio.Future[bytes] | None = None

    async def get(self) -> bytes:
        if self._making is None or self._making.done():
            self._making = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._making)


@web.middleware
async def _one_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The first request of a connection. Data after it is not read, because each request is held in
    memory until it is answered."""
    if isinstance(request.transport, asyncio.ReadTransport):
        request.transport.pause_reading()
    try:
        response = await handler(request)
    except web.HTTPException as answer:
        answer.force_close()
        raise
    response.force_close()
    return response


def _application(view: View, metrics_from: Sequence[str]) -> web.Application:
    networks = [ipaddress.ip_network(each) for each in metrics_from]
    rendered = _Shared(partial(generate_latest, view.registry))
    encoded = _Shared(lambda: msgspec.json.encode(view.state()))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        checks = view.checks()
        wrong = checks["synced"]
        if "verbose" not in request.query:
            return web.Response(status=503 if wrong else 200, text=f"{wrong or 'ok'}\n")
        lines = [
            f"[-]{name} failed: {problem}" if problem else f"[+]{name} ok"
            for name, problem in checks.items()
        ]
        lines.append(f"readyz check {'failed' if wrong else 'passed'} (only `synced` counts)")
        return web.Response(status=503 if wrong else 200, text="\n".join(lines) + "\n")

    async def check(request: web.Request) -> web.Response:
        checks, name = view.checks(), request.match_info["check"]
        if name not in checks:
            return web.Response(
                status=404, text=f"there is no check {name}; there are {', '.join(checks)}\n"
            )
        return web.Response(status=503 if checks[name] else 200, text=f"{checks[name] or 'ok'}\n")

    async def metrics(request: web.Request) -> web.Response:
        if not is_local(request.remote) and not is_among(request.remote, networks):
            return web.Response(
                status=403,
                text="metrics are only for callers on this host and in web.metricsFrom\n",
            )
        return web.Response(
            body=await rendered.get(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def state(request: web.Request) -> web.Response:
        if not is_local(request.remote):
            return web.Response(
                status=403, text="the state is shown to callers on this host only\n"
            )
        return web.Response(body=await encoded.get(), content_type="application/json")

    application = web.Application(middlewares=[_one_request])
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    application.router.add_get("/readyz/{check}", check)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/state", state)
    return application


def is_local(peer: str | None) -> bool:
    """Whether a caller with this address is on the host, or in the pod, that it asks."""
    return peer is not None and _address(peer).is_loopback


def is_among(peer: str | None, networks: Collection[Network]) -> bool:
    """Whether a caller with this address is in one of the networks."""
    return peer is not None and any(_address(peer) in each for each in networks)


def _address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The caller's address, also in the IPv4-mapped form of a socket for both families."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
