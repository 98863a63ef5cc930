"""/healthz, /readyz, /metrics and /state of one role.

In: a View that the role keeps up to date. Out: a read-only HTTP server at one address.

/healthz shows that the process is alive, and /readyz that it does its work. /readyz/CHECK answers
for one check, like kube-apiserver: `synced` passes once the first complete pass is done, `host`
fails while something of the host keeps the role from its work (the interface of a gateway is down),
and `current` fails while a watch is stale. `current` does not affect /readyz,
because a gateway without contact to the API server forwards as before. /metrics is Prometheus text.
/state is JSON (`role_state`): the plan and the outcome of each Service, the parts of the
components, and the age of each watch.

/metrics and /state are computed in a thread, from copies: for 10,000 Services that takes a second,
during which the role continues its work. Callers that arrive meanwhile share the result. Each
connection is for one request, and `connections` limits their number.

Invariants: /state contains every node and its address, so it is only for callers on the host itself
(or, in a pod, inside the pod), whichever address the server listens on. /metrics is for these
callers, and for callers in the networks of the configuration."""

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
    Sized,
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
from fairlead.errors import Refused, plain
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
    """The part of a loop that is shown."""

    @property
    def settled(self) -> asyncio.Event: ...

    @property
    def drift(self) -> int: ...

    @property
    def slow(self) -> Sized: ...


class View:
    """The present state of a role, for display only."""

    def __init__(self, role: Role, node_name: str) -> None:
        self.role = role
        self.node_name = node_name
        self.registry = CollectorRegistry()
        self.standing_by: Callable[[], bool] = lambda: False
        """Returns whether a role without a loop is ready to take over from one with a loop."""
        self.components: list[Component] = []
        """The open components, in the order in which they were opened."""
        self.host: Callable[[], Sequence[Finding]] = tuple
        """Returns the findings about the settings of the host, see `drivers.host`."""
        self.intents: dict[ServiceKey, LoadBalancer | NodeService] = {}
        self._loop: Steps | None = None
        self.outcomes: dict[ServiceKey, Outcome] = {}
        self.freshness: Freshness | None = None
        """The ages of the role's watches; None: the role has no watches."""
        self.registry.register(RoleCollector(self, role))
        self.registry.register(ServicesCollector(self))
        # CPU seconds, memory, open files and start time, under the usual names of Prometheus
        # clients.
        ProcessCollector(registry=self.registry)

    @contextmanager
    def showing(self, component: Component) -> Iterator[None]:
        """Show the status and the metrics of a component during the block."""
        collectors = component.collectors()
        with ExitStack() as shown:
            for each in collectors:
                self.registry.register(each)
                shown.callback(self.registry.unregister, each)
            self.components.append(component)
            shown.callback(self.components.remove, component)
            yield

    def follow(self, loop: "Steps | None") -> None:
        """Show the reports of this loop from now on. None: there is no loop, so there is nothing to
        show. The view starts empty in both cases, because it has not received earlier reports."""
        self._loop = loop
        self.intents.clear()
        self.outcomes.clear()

    @property
    def ready(self) -> bool:
        """Whether the role does its work now."""
        return self.synced and not self.problem

    @property
    def problem(self) -> str:
        """Why the role cannot do its work on this host now; empty if it can."""
        return "; ".join(text for _, text in self._problems())

    @property
    def problem_class(self) -> str:
        """The class of Services that `problem` concerns; empty: all Services."""
        classes = {each for each, _ in self._problems()}
        return classes.pop() if len(classes) == 1 else ""

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield each problem, with the class of Services that it concerns."""
        for component in self.components.copy():
            for each in component.findings():
                if each.blocks == "Ready":
                    yield component.problem_class, str(each)

    @property
    def synced(self) -> bool:
        """Whether the first complete pass is done."""
        return self._loop.settled.is_set() if self._loop is not None else self.standing_by()

    @property
    def working(self) -> bool:
        """Whether there is a loop whose reports are shown."""
        return self._loop is not None

    @property
    def drift(self) -> int:
        return self._loop.drift if self._loop is not None else 0

    @property
    def slow(self) -> int:
        """The number of Services whose plan is slow."""
        return len(self._loop.slow) if self._loop is not None else 0

    def record(
        self,
        intents: Mapping[ServiceKey, LoadBalancer | NodeService],
        outcomes: Mapping[ServiceKey, Outcome],
    ) -> None:
        """Store a report of the loop."""
        for key, outcome in outcomes.items():
            if key in intents:
                self.intents[key] = intents[key]
            else:
                self.intents.pop(key, None)
            if key in intents or outcome.state != "done":
                # Notes about single occurrences become Events and are not part of the state.
                self.outcomes[key] = msgspec.structs.replace(outcome, notes=())
            else:
                self.outcomes.pop(key, None)

    def watch(self, freshness: Freshness) -> None:
        """Set the watches whose ages are shown."""
        self.freshness = freshness
        self.registry.register(FreshnessCollector(freshness))

    def checks(self) -> Mapping[str, str]:
        """Return the problem of each check of /readyz/CHECK; an empty text: the check passes."""
        stale = self.freshness.stale() if self.freshness is not None else {}
        ages = ", ".join(f"{name} {age_s:.0f} s" for name, age_s in stale.items())
        return {
            "synced": "" if self.synced else "not in step with the cluster yet",
            "host": self.problem,
            "current": f"stale: {ages}" if stale else "",
        }

    def state(self) -> RoleState:
        """Return the state for `/state`. May be called from any thread."""
        intents, outcomes = self.intents.copy(), self.outcomes.copy()
        # The fields and their types depend on the role.
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
            host=(
                *self.host(),
                *(each for component in self.components.copy() for each in component.findings()),
            ),
            **fields,
        )


@asynccontextmanager
async def serve(view: View, listen: str, metrics_from: Sequence[str] = ()) -> AsyncIterator[None]:
    """Serve the view on `address:port` during the block; `*:port` means all addresses of both
    families, and an empty text means no server. `metrics_from`: networks from which metrics may be
    read, in addition to the host itself. Raise Refused if the address is not available."""
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
                f"cannot listen on {listen} for health and metrics: {plain(error)}",
                fix="set --listen, or web.listen in the configuration, to a free port at an "
                "address of this host",
            ) from error
        yield


class _Shared:
    """A value that takes long to compute, and is computed once for all callers that arrive
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
    """Handle the first request of a connection. Data after it is not read, because each request is
    held in memory until it is answered."""
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
        wrong = checks["synced"] or checks["host"]
        if "verbose" not in request.query:
            return web.Response(status=503 if wrong else 200, text=f"{wrong or 'ok'}\n")
        lines = [
            f"[-]{name} failed: {problem}" if problem else f"[+]{name} ok"
            for name, problem in checks.items()
        ]
        lines.append(f"readyz check {'failed' if wrong else 'passed'} (`current` does not count)")
        return web.Response(status=503 if wrong else 200, text="\n".join(lines) + "\n")

    async def check(request: web.Request) -> web.Response:
        checks, name = view.checks(), request.match_info["check"]
        if name not in checks:
            return web.Response(
                status=404, text=f"check {name} does not exist; checks: {', '.join(checks)}\n"
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
    """Return whether a caller with this address is on the same host, or in the same pod, as the
    server."""
    return peer is not None and _address(peer).is_loopback


def is_among(peer: str | None, networks: Collection[Network]) -> bool:
    """Return whether a caller with this address is in one of the networks."""
    return peer is not None and any(_address(peer) in each for each in networks)


def _address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the caller's address. A socket for both families shows IPv4 addresses in IPv4-mapped
    form."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
