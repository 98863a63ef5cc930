"""The answers of a node's health ports, and the messages between the role and the
health check server.

In: Updates. Out: answers as kube-proxy gives them (pkg/proxy/healthcheck): 200 while there are
ready local endpoints and the node proxy is in step with the plan, otherwise 503, with the number of
ready local endpoints in the header `X-Load-Balancing-Endpoint-Weight`. Invariant: an Update is
valid for VALID_S; a role that has sent no Update for longer counts as not in step."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from fairlead.model import ServiceKey
from fairlead.net.httprequest import Answer, Request

VALID_S = 15.0
"""How long an Update is valid. Longer than any single step of the role takes, so that a busy node
stays a member; short enough that a role that hangs does not make the health ports report outdated
rules as current for long."""


class Opened(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A port to open, and the number of ready local endpoints. `service` is None for the port that
    reports the health of the node proxy itself."""

    number: int
    addresses: tuple[str, ...]
    service: ServiceKey | None
    endpoints: int = 0


class Update(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Message of the role: ports to close, then ports to open, then the numbers of ready endpoints
    by port. The health check server replies to each Update with a Done."""

    healthy: bool
    eligible: bool
    closed: tuple[int, ...] = ()
    opened: tuple[Opened, ...] = ()
    endpoints: dict[int, int] = {}


class Done(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reply to the role: an Update is carried out. `updates`: the number of Updates so far.
    `problems`: the errno of each port that could not be opened, keyed by its index in `opened`."""

    updates: int
    problems: dict[int, int] = {}


class Health:
    """The state of the node as the role last sent it, and the answers that follow from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._updated_s = clock()
        self._healthy = self._eligible = False
        self._in_step = datetime.now(UTC)
        """When the node proxy was last known to be in step."""
        self._ports: dict[int, Opened] = {}

    def store(self, update: Update) -> None:
        """Store the state of the node and the numbers of endpoints from an Update."""
        self._updated_s = self._clock()
        self._healthy, self._eligible = update.healthy, update.eligible
        for number, endpoints in update.endpoints.items():
            self._ports[number] = msgspec.structs.replace(self._ports[number], endpoints=endpoints)

    def opened(self, port: Opened) -> None:
        """Record that this port is open."""
        self._ports[port.number] = port

    def closed(self, number: int) -> None:
        """Record that this port is closed."""
        del self._ports[number]

    def answer(self, number: int, request: Request) -> Answer:
        """Return the answer of this port to a request, as of now."""
        port = self._ports[number]
        if port.service is None:
            return self._of_proxy(request)
        healthy = self._is_healthy()
        return Answer(
            HTTPStatus.OK if port.endpoints and healthy else HTTPStatus.SERVICE_UNAVAILABLE,
            msgspec.json.encode(
                {
                    "service": {"namespace": port.service.namespace, "name": port.service.name},
                    "localEndpoints": port.endpoints,
                    "serviceProxyHealthy": healthy,
                }
            ),
            (("X-Load-Balancing-Endpoint-Weight", str(port.endpoints)),),
        )

    def _is_healthy(self) -> bool:
        return self._healthy and self._clock() - self._updated_s <= VALID_S

    def _of_proxy(self, request: Request) -> Answer:
        healthy, eligible = self._is_healthy(), self._eligible
        now = datetime.now(UTC)
        if healthy:
            self._in_step = now
        state = {"lastUpdated": self._in_step, "healthy": healthy}
        # The rules of both address families are in one nftables table, so they have the same age.
        body: dict[str, object] = {
            **state,
            "currentTime": now,
            "status": {"IPv4": state, "IPv6": state},
        }
        match request.path:
            case "/healthz":
                good = healthy and eligible
                body["nodeEligible"] = eligible
            case "/livez":
                good = healthy
            case _:
                return Answer(HTTPStatus.NOT_FOUND, b"{}")
        return Answer(
            HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, msgspec.json.encode(body)
        )
