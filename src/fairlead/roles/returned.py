"""Tell the owner of a Service when nodes send its packets back to the gateways.

In: how many packets the data plane has dropped because they had passed a gateway already, read now and then. Out: Events.
A node that has no rule for a load-balancer address routes the packet on, to its router and so to a gateway. For a moment that
is so wherever an address is new, so a Service is named only when packets have come back for it at each of several looks.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.layout import HOPS_LEFT
from fairlead.kube.events import Recorder
from fairlead.model import ServiceKey
from fairlead.plan.members import listed
from fairlead.state import State

PACKETS_RETURNED = "PacketsReturned"
LOOK_S = 5.0
PATIENCE = 3
"""Looks in a row at each of which packets have come back."""
REMIND = 500
"""After so many looks in a row the Event is written again: the API server forgets it after an hour."""


class Returned:
    """At how many looks in a row packets have come back. `services`, `nodes`: how many had come back before the first look."""

    def __init__(self, services: Mapping[ServiceKey, int], nodes: Mapping[str, int]) -> None:
        self._services = services
        self._nodes = nodes
        self._looks: dict[ServiceKey, int] = {}

    def look(self, services: Mapping[ServiceKey, int], nodes: Mapping[str, int]) -> tuple[list[ServiceKey], list[str]]:
        """The Services whose owners are to be told, and the nodes from which packets came back since the last look. `services`,
        `nodes`: how many packets have come back so far."""
        growing = [key for key, count in services.items() if count > self._services.get(key, 0)]
        returning = [name for name, count in nodes.items() if count > self._nodes.get(name, 0)]
        self._services, self._nodes = services, nodes
        self._looks = {key: self._looks.get(key, 0) + 1 for key in growing}
        return sorted(key for key, looks in self._looks.items() if looks % REMIND == PATIENCE), sorted(returning)


def message(gateway: str, nodes: Sequence[str]) -> str:
    """The text of the Event. `nodes`: empty where no node can be named, because the Service has none any more."""
    named = listed(nodes) or "nodes"
    return (
        f"gateway {gateway}: packets that were handed to {named} came back and were dropped: the service proxy there"
        " does not serve the Service's load-balancer addresses; check the label service.kubernetes.io/service-proxy-name and"
        f" the service proxy on these nodes (traceroute, too, sends packets with a hop limit of {HOPS_LEFT} or less)"
    )


async def watch_returned(
    counters: Callable[[], Counters], state: State, recorder: Recorder, gateway: str, *, look_s: float = LOOK_S
) -> None:
    """Look until cancelled, every `look_s` seconds."""
    services, nodes = await asyncio.to_thread(_read, counters())
    returned, seen = Returned(services, nodes), -1
    while True:
        await asyncio.sleep(look_s)
        now = counters()
        if (count := now.drops()["returned"]) != seen:
            services, nodes = await asyncio.to_thread(_read, now)
            seen = count
        told, returning = returned.look(services, nodes)
        for key in told:
            if (service := state.services.get(key)) is not None:
                recorder.event(key, service.metadata.uid, "Warning", PACKETS_RETURNED, message(gateway, returning))


def _read(counters: Counters) -> tuple[dict[ServiceKey, int], dict[str, int]]:
    services = {key: traffic.drops.get("returned", 0) for key, traffic in counters.services().items()}
    return services, {name: traffic.returned for name, traffic in counters.nodes().items()}
