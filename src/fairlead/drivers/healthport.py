"""Tell load balancers how many ready endpoints this node has: one HTTP port for each Service with policy Local.

In: NodeService values with a `health_check`. Out: listening ports that answer any path and method as kube-proxy does:
200 while there are ready local endpoints and the proxy is in step, else 503, with the number in the header
`X-Load-Balancing-Endpoint-Weight`. Besides, the proxy's own health on port 10256 (`/healthz`, `/livez`; KEP-3836).
Invariant: the loop applies this driver after the node proxy, so a 200 means that the packet rules are in force.
Nothing outlives the process: a successor opens the ports anew.
"""

import asyncio
import resource
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
import structlog

from fairlead.errors import Refused
from fairlead.model import HealthCheck, NodeService, Outcome, ServiceKey, Value
from fairlead.net.httpport import EVERYWHERE, Answer, Port, Request

log = structlog.get_logger()

PROXY_HEALTH_PORT = 10256
REASON = "FailedToStartServiceHealthcheck"
"""kube-proxy's reason for the Event about a port that cannot be opened; the Outcome carries its message, too."""


class Change(Value, frozen=True):
    """One Service's port from how it is to how it shall be; None: closed."""

    service: ServiceKey
    before: HealthCheck | None
    after: HealthCheck | None

    def __str__(self) -> str:
        match self.before, self.after:
            case HealthCheck(port=port), None:
                return f"close :{port} # {self.service}"
            case HealthCheck(port=old), HealthCheck(port=new, local_endpoints=count) if old == new:
                return f"answer on :{new} with {count} # {self.service}"
            case HealthCheck(port=old), HealthCheck(port=new, local_endpoints=count):
                return f"close :{old}; listen on :{new}, answer with {count} # {self.service}"
            case _, HealthCheck(port=new, local_endpoints=count):
                return f"listen on :{new}, answer with {count} # {self.service}"
        return f"nothing # {self.service}"


class _Served:
    """An open port and the number that it answers with."""

    def __init__(self, port: Port, check: HealthCheck) -> None:
        self.port = port
        self.check = check


class HealthPortDriver:
    """The health ports of this node."""

    name = "healthport"

    def __init__(
        self,
        *,
        node_name: str,
        healthy: Callable[[], bool],
        node_eligible: Callable[[], bool] = lambda: True,
        proxy_port: int = PROXY_HEALTH_PORT,
        addresses: Collection[str] = EVERYWHERE,
    ) -> None:
        """`healthy`: whether the node proxy is in step; asked at each request. `node_eligible`: whether the node may get
        new traffic (not being deleted, not tainted by the autoscaler). `proxy_port`: 0 for none. `addresses`:
        where Services' ports are open; the proxy's own is everywhere."""
        self._node_name = node_name
        self._addresses = addresses
        self._turn = asyncio.Lock()
        self._healthy = healthy
        self._node_eligible = node_eligible
        self.proxy_port = proxy_port
        self._proxy: Port | None = None
        self._in_step = datetime.now(UTC)
        """When the node proxy was last known to be."""
        self._served: dict[ServiceKey, _Served] = {}

    async def open(self) -> None:
        """Open the proxy's own health port. Raises Refused if somebody else has it."""
        # Each port takes one; the usual limit is of times when select(2) could not take more.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if self.proxy_port and self._proxy is None:
            try:
                self._proxy = await Port.open(self.proxy_port, self._answer_for_proxy)
            except OSError as error:
                raise Refused(
                    f"listening on port {self.proxy_port} for the node proxy's health failed: {error}",
                    fix="stop the other service proxy of this node",
                ) from error

    async def close(self) -> None:
        """Close every port, and the connections to them."""
        for key in list(self._served):
            await self._close(key)
        if self._proxy is not None:
            await self._proxy.close()
            self._proxy = None

    def render(self, intents: Mapping[ServiceKey, NodeService]) -> Mapping[ServiceKey, HealthCheck]:
        """Port and number of each Service that has a health check. Pure."""
        return {key: intent.health_check for key, intent in intents.items() if intent.health_check is not None}

    def diff(self, desired: Mapping[ServiceKey, HealthCheck], actual: Mapping[ServiceKey, HealthCheck]) -> Sequence[Change]:
        """One Change for each Service that differs. Pure."""
        return tuple(
            Change(key, actual.get(key), desired.get(key))
            for key in sorted(desired.keys() | actual.keys())
            if desired.get(key) != actual.get(key)
        )

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, HealthCheck]:
        """What this process answers now."""
        wanted = self._served.keys() if keys is None else keys
        return {key: self._served[key].check for key in wanted if key in self._served}

    async def move(self, addresses: Collection[str]) -> None:
        """Have the Services' ports open at these addresses instead. One that cannot be opened there is closed, and a difference
        to what is planned."""
        async with self._turn:
            self._addresses = addresses
            for key, served in tuple(self._served.items()):
                await self._close(key)
                if problem := await self._serve(key, served.check):
                    log.warning("a health port did not follow the host's addresses", problem=problem)

    async def apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        """Close first, so that a port may pass from one Service to another. A Service whose port is in use is
        unavailable, in kube-proxy's words: whoever has the port may let it go. The others are served."""
        async with self._turn:
            return await self._apply(changes)

    async def _apply(self, changes: Sequence[Change]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            served = self._served.get(change.service)
            if served is not None and (change.after is None or change.after.port != served.check.port):
                await self._close(change.service)
        outcomes: dict[ServiceKey, Outcome] = {}
        for change in changes:
            if change.after is not None:
                problem = await self._serve(change.service, change.after)
                if problem:
                    outcomes[change.service] = Outcome("unavailable", problem, reason=REASON)
        return outcomes

    async def _serve(self, key: ServiceKey, check: HealthCheck) -> str:
        """Answer with these numbers; return what is wrong, or nothing."""
        served = self._served.get(key)
        if served is not None:
            served.check = check
            return ""
        try:
            port = await Port.open(check.port, lambda request: self._answer_for_service(key), self._addresses)
        except OSError as error:
            return f'node {self._node_name} failed to start healthcheck "{key}" on port {check.port}: {error.strerror or error}'
        self._served[key] = _Served(port, check)
        return ""

    async def _close(self, key: ServiceKey) -> None:
        await self._served.pop(key).port.close()

    def _answer_for_service(self, key: ServiceKey) -> Answer:
        served = self._served.get(key)
        count = served.check.local_endpoints if served else 0
        healthy = self._healthy()
        return Answer(
            HTTPStatus.OK if count and healthy else HTTPStatus.SERVICE_UNAVAILABLE,
            msgspec.json.encode(
                {
                    "service": {"namespace": key.namespace, "name": key.name},
                    "localEndpoints": count,
                    "serviceProxyHealthy": healthy,
                }
            ),
            (("X-Load-Balancing-Endpoint-Weight", str(count)),),
        )

    def _answer_for_proxy(self, request: Request) -> Answer:
        healthy, eligible = self._healthy(), self._node_eligible()
        now = datetime.now(UTC)
        if healthy:
            self._in_step = now
        state = {"lastUpdated": self._in_step, "healthy": healthy}
        # Rules of both families are one table, and so as old as each other.
        body: dict[str, object] = {**state, "currentTime": now, "status": {"IPv4": state, "IPv6": state}}
        match request.path:
            case "/healthz":
                good = healthy and eligible
                body["nodeEligible"] = eligible
            case "/livez":
                good = healthy
            case _:
                return Answer(HTTPStatus.NOT_FOUND, b"{}")
        return Answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, msgspec.json.encode(body))
