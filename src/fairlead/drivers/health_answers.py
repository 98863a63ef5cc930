"""What the health ports of a node answer, and the messages from the role to the answering process.

In: Updates. Out: answers as kube-proxy gives them (pkg/proxy/healthcheck): 200 while there are
ready local endpoints and the node proxy is in step, else 503, with the number in the header
`X-Load-Balancing-Endpoint-Weight`. Invariant: a message of the role is valid for VALID_S; a role
that has sent nothing for longer counts as not in step."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from fairlead.model import ServiceKey
from fairlead.net.httprequest import Answer, Request

VALID_S = 15.0
"""Longer than the role needs for any piece of work, so that a busy node stays a member; short
enough that the health port of a role that hangs does not report old rules as current for long."""


class Opened(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A port to open. `service`: None for the health of the node proxy itself."""

    number: int
    addresses: tuple[str, ...]
    service: ServiceKey | None
    endpoints: int = 0


class Update(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From the role: ports to close, then ports to open; then numbers of ready endpoints by port.
    Each Update is answered."""

    healthy: bool
    eligible: bool
    closed: tuple[int, ...] = ()
    opened: tuple[Opened, ...] = ()
    endpoints: dict[int, int] = {}


class Done(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To the role: an Update is carried out. `heard`: the number of Updates so far. `problems`: the
    error numbers of the ports that could not be opened, by their index in `opened`."""

    heard: int
    problems: dict[int, int] = {}


class Health:
    """What is known, and the answers that follow from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = clock()
        self._healthy = self._eligible = False
        self._in_step = datetime.now(UTC)
        """When the node proxy was last known to be in step."""
        self._ports: dict[int, Opened] = {}

    def hear(self, update: Update) -> None:
        """Store what the role says about the node."""
        self._told_s = self._clock()
        self._healthy, self._eligible = update.healthy, update.eligible
        for number, endpoints in update.endpoints.items():
            self._ports[number] = msgspec.structs.replace(self._ports[number], endpoints=endpoints)

    def opened(self, port: Opened) -> None:
        """A port is open."""
        self._ports[port.number] = port

    def closed(self, number: int) -> None:
        """A port is no longer open."""
        del self._ports[number]

    def answer(self, number: int, request: Request) -> Answer:
        """What this port answers now."""
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
        return self._healthy and self._clock() - self._told_s <= VALID_S

    def _of_proxy(self, request: Request) -> Answer:
        healthy, eligible = self._is_healthy(), self._eligible
        now = datetime.now(UTC)
        if healthy:
            self._in_step = now
        state = {"lastUpdated": self._in_step, "healthy": healthy}
        # The rules of both families are in one table, and so have the same age.
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
