"""Events about nodes that send packets of a Service back to the gateways.

In: the numbers of packets that the data plane dropped because they had passed a gateway already,
read periodically. Out: Events, also when no packets come back any more. A node without a rule for a
load-balancer address routes the packet to its router, and so to a gateway. This happens for a
moment whenever an address is new, so an Event is written only after packets of the Service came
back at several checks in a row."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.maps.records import HOPS_LEFT
from fairlead.kube.events import RECOVERED, Recorder, rounded_duration, stamp
from fairlead.model import ServiceKey
from fairlead.plan.members import listed
from fairlead.state import State

PACKETS_RETURNED = "PacketsReturned"
CHECK_INTERVAL_S = 5.0
WARN_AFTER = 3
"""The number of checks in a row with returned packets after which the Event is written."""
RECOVER_AFTER = 2
"""The number of checks in a row without returned packets after which `Recovered` is written."""
REMIND_AFTER = 500
"""The number of checks in a row after which the Event is written again, because the API server
deletes it after an hour."""


class Returned:
    """Counts the checks in a row that found returned packets, or none. `services`, `nodes`: packets
    returned before the first check."""

    def __init__(self, services: Mapping[ServiceKey, int], nodes: Mapping[str, int]) -> None:
        self._services = services
        self._nodes = nodes
        self._checks_with_packets: dict[ServiceKey, int] = {}
        self._checks_without_packets: dict[ServiceKey, int] = {}
        """The checks in a row without returned packets, of Services with an Event."""

    def check(
        self, services: Mapping[ServiceKey, int], nodes: Mapping[str, int]
    ) -> tuple[list[ServiceKey], list[str]]:
        """Return the Services that need an Event, and the nodes from which packets came back since
        the last check. `services`, `nodes`: packets returned so far."""
        growing = [key for key, count in services.items() if count > self._services.get(key, 0)]
        returning = [name for name, count in nodes.items() if count > self._nodes.get(name, 0)]
        self._services, self._nodes = services, nodes
        self._checks_with_packets = {
            key: self._checks_with_packets.get(key, 0) + 1 for key in growing
        }
        affected = sorted(
            key
            for key, checks in self._checks_with_packets.items()
            if checks % REMIND_AFTER == WARN_AFTER
        )
        self._checks_without_packets = {
            key: 0 if key in self._checks_with_packets else checks + 1
            for key, checks in self._checks_without_packets.items()
        } | dict.fromkeys(affected, 0)
        return affected, sorted(returning)

    def over(self) -> list[ServiceKey]:
        """Return the Services with an Event from which no packets come back any more, each once."""
        over = [
            key for key, checks in self._checks_without_packets.items() if checks >= RECOVER_AFTER
        ]
        for key in over:
            del self._checks_without_packets[key]
        return sorted(over)


def message(gateway: str, nodes: Sequence[str]) -> str:
    """Return the text of the Event. `nodes`: empty if no node can be named, because the Service has
    no nodes any more."""
    named = listed(nodes) or "nodes"
    return (
        f"gateway {gateway}: packets that were sent to {named} came back and were dropped: the "
        "service proxy there"
        " does not serve the Service's load-balancer addresses; check the label "
        "service.kubernetes.io/service-proxy-name and"
        " the service proxy on these nodes (packets of traceroute with a hop limit of "
        f"{HOPS_LEFT} or less count as well)"
    )


async def watch_returned(
    counters: Callable[[], Counters],
    state: State,
    recorder: Recorder,
    gateway: str,
    *,
    check_interval_s: float = CHECK_INTERVAL_S,
) -> None:
    """Check every `check_interval_s` seconds until cancelled."""
    services, nodes = await asyncio.to_thread(_read, counters())
    returned, seen = Returned(services, nodes), -1
    since: dict[ServiceKey, str] = {}
    while True:
        await asyncio.sleep(check_interval_s)
        now = counters()
        if (count := now.drops()["returned"]) != seen:
            services, nodes = await asyncio.to_thread(_read, now)
            seen = count
        affected, returning = returned.check(services, nodes)
        for key in affected:
            if (service := state.services.get(key)) is not None:
                recorder.event(
                    key,
                    service.metadata.uid,
                    "Warning",
                    PACKETS_RETURNED,
                    message(gateway, returning),
                )
                since.setdefault(key, stamp(datetime.now(UTC)))
        for key in returned.over():
            passed = rounded_duration(since.pop(key, ""), datetime.now(UTC))
            if (service := state.services.get(key)) is not None:
                end = f"gateway {gateway}: {PACKETS_RETURNED} no longer holds, after {passed}"
                recorder.event(key, service.metadata.uid, "Normal", RECOVERED, end)


def _read(counters: Counters) -> tuple[dict[ServiceKey, int], dict[str, int]]:
    services = {
        key: traffic.drops.get("returned", 0) for key, traffic in counters.services().items()
    }
    return services, {name: traffic.returned for name, traffic in counters.nodes().items()}
