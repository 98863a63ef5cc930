"""What HAProxy has counted, by Service, over all workers that there were.

In: rows of `show stat`, each time of the worker that runs. Out: sums that never go back. A worker's
numbers begin at zero, so what its predecessor had is added. Connections that go on in an old worker
after a reload are open as before; what they move is not counted."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fairlead.drivers.proxy.runtime import Info
from fairlead.model import ServiceKey

COLUMNS = ("pxname", "svname", "stot", "scur", "bin", "bout", "dcon", "econ", "wredis")
"""Of `show stat`: those that are read here."""


class ProxyTraffic(NamedTuple):
    """`open`: connections now. `refused`: clients that no source range lets in. `failed`:
    connections to members that did not come about, be it that another member took them. Bytes are
    those from and to clients."""

    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    failed: int = 0

    def plus(self, other: "ProxyTraffic") -> "ProxyTraffic":
        return ProxyTraffic(*(one + another for one, another in zip(self, other, strict=True)))


class ProxyCounters:
    """Kept by the driver."""

    def __init__(self) -> None:
        self._ended: dict[ServiceKey, ProxyTraffic] = {}
        self._now: dict[ServiceKey, ProxyTraffic] = {}
        self._elsewhere: dict[ServiceKey, int] = {}
        self._deaths = 0
        self.worker = Info()
        """What the worker has shown of itself."""

    def take(
        self,
        traffic: Mapping[ServiceKey, ProxyTraffic],
        worker: Info,
        elsewhere: Mapping[ServiceKey, int],
    ) -> None:
        """What the worker shows that runs; `elsewhere`: connections that are open in old ones."""
        self._now = dict(traffic)
        self.worker = worker
        self._elsewhere = dict(elsewhere)

    def worker_ended(self) -> None:
        """Another one begins at zero; connections of the old one go on there."""
        for service, traffic in self._now.items():
            self._ended[service] = self._ended.get(service, ProxyTraffic()).plus(
                traffic._replace(open=0)
            )
            self._elsewhere[service] = self._elsewhere.get(service, 0) + traffic.open
        self._now = {}
        self.worker = Info()

    def died(self) -> None:
        """HAProxy has, and nobody asked it to: all connections with it."""
        self._deaths += 1
        self.worker_ended()
        self._elsewhere = {}

    def deaths(self) -> int:
        return self._deaths

    def keep(self, services: Iterable[ServiceKey]) -> None:
        """Forget all others."""
        kept = set(services)
        self._ended = {
            service: traffic for service, traffic in self._ended.items() if service in kept
        }
        self._now = {service: traffic for service, traffic in self._now.items() if service in kept}
        self._elsewhere = {
            service: count for service, count in self._elsewhere.items() if service in kept
        }

    def services(self) -> Mapping[ServiceKey, ProxyTraffic]:
        nothing = ProxyTraffic()
        return {
            service: self._ended.get(service, nothing)
            .plus(self._now.get(service, nothing))
            .plus(ProxyTraffic(open=self._elsewhere.get(service, 0)))
            for service in sorted(self._ended.keys() | self._now.keys() | self._elsewhere.keys())
        }


def traffic_of(
    rows: Iterable[Mapping[str, str]], sections: Mapping[str, ServiceKey]
) -> dict[ServiceKey, ProxyTraffic]:
    """Sums by Service. `sections`: whose a section of the configuration is."""
    found: dict[ServiceKey, ProxyTraffic] = {}
    for row in rows:
        service = sections.get(row["pxname"])
        if service is None:
            continue
        if row["svname"] == "FRONTEND":
            numbers = (_number(row, name) for name in ("stot", "scur", "bin", "bout", "dcon"))
            found[service] = found.get(service, ProxyTraffic()).plus(ProxyTraffic(*numbers))
        elif row["svname"] == "BACKEND":
            failed = _number(row, "econ") + _number(row, "wredis")
            found[service] = found.get(service, ProxyTraffic()).plus(ProxyTraffic(failed=failed))
    return found


def _number(row: Mapping[str, str], name: str) -> int:
    return int(row.get(name) or 0)
