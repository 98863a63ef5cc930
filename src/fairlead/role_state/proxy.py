"""The parts of `/state` about HAProxy: the Services, and the API servers. Pure."""

from collections.abc import Iterator, Mapping

from msgspec.structs import astuple

from fairlead.model import Value
from fairlead.role_state.part import Part, Table


class ProxiedTraffic(Value, frozen=True):
    """The counters of HAProxy for one Service. `open`: open connections. `refused`: clients outside
    of the source ranges. `failed`: connections that no member accepted. `over_share`: connections
    that were closed at once, because the Service or its namespace had reached its share."""

    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    failed: int = 0
    over_share: int = 0


class WorkerState(Value, frozen=True):
    """The newest worker process of HAProxy, which accepts connections: its open connections, and
    their maximum. `in_old_workers`: the connections that continue in older workers. All values are
    0 if no worker runs."""

    pid: int = 0
    connections: int = 0
    limit: int = 0
    in_old_workers: int = 0


class ProxyState(Part, frozen=True):
    """The part of `/state` about the HAProxy process that serves Services."""

    services: Mapping[str, ProxiedTraffic] = {}
    worker: WorkerState = WorkerState()

    def shown(self) -> Iterator[Table | str]:
        if not self.services:
            return
        counters = "CONNECTIONS", "OPEN", "BYTES IN", "BYTES OUT", "REFUSED", "FAILED", "OVER SHARE"
        yield Table(
            ("PROXIED SERVICE", *counters),
            [(name, *map(str, astuple(each))) for name, each in self.services.items()],
        )
        if self.worker.limit:
            yield self._connections()

    def _connections(self) -> str:
        newest, limit, old = (
            self.worker.connections,
            self.worker.limit,
            self.worker.in_old_workers,
        )
        if not old:
            return f"HAProxy has {newest} open connections, of at most {limit}"
        return (
            f"HAProxy has {newest + old} open connections: {newest}, of at most {limit}, in its "
            f"newest worker, and {old} in older workers"
        )


class ApiServerState(Value, frozen=True):
    """The state of one API server, as HAProxy sees it. `state`: ready, not ready, down. `open`:
    open connections. `connections`: the total of the present HAProxy worker."""

    state: str
    open: int = 0
    connections: int = 0


class ApiServersState(Part, frozen=True):
    """The part of `/state` about the load balancer for the API server: the addresses where it
    accepts connections, and the API servers behind it, by `address:port`."""

    addresses: tuple[str, ...] = ()
    servers: Mapping[str, ApiServerState] = {}

    def shown(self) -> Iterator[Table]:
        if self.addresses:
            yield Table(
                ("API SERVER", "STATE", "OPEN", "CONNECTIONS"),
                [
                    (name, each.state, str(each.open), str(each.connections))
                    for name, each in self.servers.items()
                ],
                title=f"API servers behind {', '.join(self.addresses)}:",
            )
