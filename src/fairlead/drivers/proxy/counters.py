"""The traffic of each Service as HAProxy counted it, summed over all workers.

In: rows of `show stat` of the current worker. Out: sums that never decrease. The counters of a
worker begin at zero, so the counts of previous workers are added. Connections that continue in an
old worker after a reload count as open; their bytes are no longer counted."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fairlead.drivers.proxy.runtime import Info
from fairlead.model import ServiceKey

COLUMNS = (
    *("pxname", "svname", "stot", "scur", "slim", "bin", "bout", "dcon", "dses", "econ", "wredis"),
)
"""The columns of `show stat` that are read here."""


class ProxyTraffic(NamedTuple):
    """The traffic of one Service.

    - `connections`: accepted connections.
    - `open`: connections that are open now.
    - `bytes_in`, `bytes_out`: bytes from and to clients.
    - `refused`: connections of clients outside of the source ranges.
    - `failed`: connections to a member that failed, also if another member then accepted the
      client.
    - `over_share`: connections that were closed at once, because the Service or its namespace had
      reached its share."""

    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    failed: int = 0
    over_share: int = 0

    def plus(self, other: "ProxyTraffic") -> "ProxyTraffic":
        return ProxyTraffic(*(one + another for one, another in zip(self, other, strict=True)))


class ProxyCounters:
    """The counters of all Services. The driver updates them."""

    def __init__(self) -> None:
        self._ended: dict[ServiceKey, ProxyTraffic] = {}
        self._now: dict[ServiceKey, ProxyTraffic] = {}
        self._in_old_workers: dict[ServiceKey, int] = {}
        self._unexpected_exits = 0
        self.worker = Info()
        """The current worker's connections and its limit."""

    def take(
        self,
        traffic: Mapping[ServiceKey, ProxyTraffic],
        worker: Info,
        in_old_workers: Mapping[ServiceKey, int] | None,
    ) -> None:
        """Store the counts of the current worker. `in_old_workers`: connections that are open in
        old workers; None: as last known."""
        self._now = dict(traffic)
        self.worker = worker
        if in_old_workers is not None:
            self._in_old_workers = dict(in_old_workers)

    def end_worker(self) -> None:
        """Add the current worker's counts to the sums: the next worker begins at zero. The open
        connections continue in the old worker."""
        for service, traffic in self._now.items():
            self._ended[service] = self._ended.get(service, ProxyTraffic()).plus(
                traffic._replace(open=0)
            )
            self._in_old_workers[service] = self._in_old_workers.get(service, 0) + traffic.open
        self._now = {}
        self.worker = Info()

    @property
    def in_old_workers(self) -> int:
        """The open connections in old workers."""
        return sum(self._in_old_workers.values())

    def over_share(self, service: ServiceKey) -> int:
        """Return the `over_share` of the current worker alone, as it was last stored."""
        return self._now.get(service, ProxyTraffic()).over_share

    def record_unexpected_exit(self) -> None:
        """Record that HAProxy ended unexpectedly, with all its connections."""
        self._unexpected_exits += 1
        self.end_worker()
        self._in_old_workers = {}

    def unexpected_exits(self) -> int:
        """Return how often HAProxy ended unexpectedly."""
        return self._unexpected_exits

    def keep(self, services: Iterable[ServiceKey]) -> None:
        """Delete the counts of all other Services."""
        kept = set(services)
        self._ended = {
            service: traffic for service, traffic in self._ended.items() if service in kept
        }
        self._now = {service: traffic for service, traffic in self._now.items() if service in kept}
        self._in_old_workers = {
            service: count for service, count in self._in_old_workers.items() if service in kept
        }

    def services(self) -> Mapping[ServiceKey, ProxyTraffic]:
        """Return the sums by Service."""
        nothing = ProxyTraffic()
        return {
            service: self._ended.get(service, nothing)
            .plus(self._now.get(service, nothing))
            .plus(ProxyTraffic(open=self._in_old_workers.get(service, 0)))
            for service in sorted(
                self._ended.keys() | self._now.keys() | self._in_old_workers.keys()
            )
        }


def traffic_of(
    rows: Iterable[Mapping[str, str]], sections: Mapping[str, ServiceKey]
) -> dict[ServiceKey, ProxyTraffic]:
    """Sum the rows of `show stat` by Service. `sections`: the Service of each section of the
    configuration."""
    found: dict[ServiceKey, ProxyTraffic] = {}
    for row in rows:
        service = sections.get(row["pxname"])
        if service is None:
            continue
        if row["svname"] == "FRONTEND":
            numbers = (_number(row, name) for name in ("stot", "scur", "bin", "bout", "dcon"))
            counted = ProxyTraffic(*numbers)._replace(over_share=_number(row, "dses"))
            found[service] = found.get(service, ProxyTraffic()).plus(counted)
        elif row["svname"] == "BACKEND":
            failed = _number(row, "econ") + _number(row, "wredis")
            found[service] = found.get(service, ProxyTraffic()).plus(ProxyTraffic(failed=failed))
    return found


def full_of(
    rows: Iterable[Mapping[str, str]], sections: Mapping[str, ServiceKey]
) -> set[ServiceKey]:
    """Return the Services with a listener that has as many open connections as it may."""
    return {
        sections[row["pxname"]]
        for row in rows
        if row["svname"] == "FRONTEND"
        and row["pxname"] in sections
        and _number(row, "scur") >= _number(row, "slim") > 0
    }


def _number(row: Mapping[str, str], name: str) -> int:
    return int(row.get(name) or 0)
