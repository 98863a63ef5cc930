"""Who may receive the traffic of one Service port.

In: the EndpointSlices of one Service. Out: its candidates, and those among them that are to be used.
Follows kube-proxy: a ready endpoint is used; if there is none, those that are serving while terminating (KEP-1669).
Slices are joined by port *name* (the number may differ between slices); an endpoint that stands in two slices for a moment
counts once, and its better state counts.
"""

from collections.abc import Iterable

from fairlead.kube.objects import EndpointSlice
from fairlead.model import Family, Protocol, Value


class Candidate(Value, frozen=True):
    """An endpoint that answers for one port of a Service. `node` is empty where the slice names none."""

    address: str
    port: int
    node: str
    ready: bool
    serving: bool
    terminating: bool


def candidates(slices: Iterable[EndpointSlice], *, port_name: str, protocol: Protocol, family: Family) -> tuple[Candidate, ...]:
    """Every endpoint of the Service port in one family, sorted, each address and port once."""
    found: dict[tuple[str, int], Candidate] = {}
    for slice_ in slices:
        if slice_.address_type != family:
            continue
        for port in slice_.ports or ():
            if (port.name or "") != port_name or port.protocol != protocol or not port.port:
                continue
            for endpoint in slice_.endpoints or ():
                if not endpoint.addresses:
                    continue
                place = endpoint.addresses[0], port.port
                candidate = Candidate(*place, endpoint.node_name or "", *endpoint.state)
                other = found.get(place)
                if other is None or _rank(candidate) > _rank(other):
                    found[place] = candidate
    return tuple([found[place] for place in sorted(found)])


def _rank(candidate: Candidate) -> tuple[bool, bool, bool]:
    return candidate.ready, not candidate.terminating, candidate.serving


def usable(among: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that get new connections: the ready ones, or else those that still serve while they terminate."""
    among = tuple(among)
    ready = [candidate for candidate in among if candidate.ready]
    if len(ready) == len(among):
        return among
    return tuple(ready or [candidate for candidate in among if candidate.serving and candidate.terminating])
