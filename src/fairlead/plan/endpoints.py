"""The endpoints that may receive the traffic of one Service port.

In: the EndpointSlices of one Service. Out: its candidates, and the candidates that get new
connections. Follows kube-proxy: ready endpoints are used; if there are none, endpoints that serve
while they terminate (KEP-1669). Slices are joined by port *name*, because the number may differ
between slices. An address and port that several entries contain counts once: as the entry that is
the least in a total order (`_order`). So the result does not depend on the order in which slices
arrive, and every role chooses the same entry."""

from collections.abc import Iterable
from operator import itemgetter

from fairlead.kube.objects import Endpoint, EndpointHints, EndpointSlice
from fairlead.model import Family, Protocol, Value


class Candidate(Value, frozen=True):
    """An endpoint for one port of a Service. `node`: the name of its node; empty if the slice does
    not name one."""

    address: str
    port: int
    node: str
    ready: bool
    serving: bool
    terminating: bool
    hints: EndpointHints | None = None


def candidates(
    slices: Iterable[EndpointSlice], *, port_name: str, protocol: Protocol, family: Family
) -> tuple[Candidate, ...]:
    """Return every endpoint of the Service port in one family, sorted, each address and port
    once."""
    found = endpoints(slices, port_name=port_name, protocol=protocol, family=family)
    return tuple(
        [
            Candidate(*place, endpoint.node_name or "", *endpoint.state, endpoint.hints)
            for place, endpoint in sorted(found.items(), key=itemgetter(0))
        ]
    )


def endpoints(
    slices: Iterable[EndpointSlice], *, port_name: str, protocol: Protocol, family: Family
) -> dict[tuple[str, int], Endpoint]:
    """Return the endpoints of `candidates` as the slices contain them, by address and port, in no
    particular order."""
    found: dict[tuple[str, int], Endpoint] = {}
    for slice_ in slices:
        if slice_.address_type != family:
            continue
        for port in slice_.ports or ():
            number = port.port
            if (port.name or "") != port_name or port.protocol != protocol or not number:
                continue
            for endpoint in slice_.endpoints or ():
                if endpoint.addresses:
                    other = found.setdefault((endpoint.addresses[0], number), endpoint)
                    if other is not endpoint and _order(endpoint) < _order(other):
                        found[endpoint.addresses[0], number] = endpoint
    return found


def _order(endpoint: Endpoint) -> tuple[bool, bool, bool, bool, str, str]:
    """Return the sort key of an entry among those with the same address and port; the least one is
    used. An entry that names its node comes first, because nothing else tells where the pod is: a
    slice that is mirrored from Endpoints may name none. Then the better state comes first. Hints
    come last, because only the service proxy stores them."""
    ready, serving, terminating = endpoint.state
    node = endpoint.node_name or ""
    return not node, not ready, terminating, not serving, node, str(endpoint.hints)


def usable(among: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the endpoints that get new connections: the ready ones; if there are none, those that
    serve while they terminate."""
    among = tuple(among)
    ready = [candidate for candidate in among if candidate.ready]
    if len(ready) == len(among):
        return among
    return tuple(
        ready or [candidate for candidate in among if candidate.serving and candidate.terminating]
    )


def near(chosen: tuple[Candidate, ...], node: str, zone: str) -> tuple[Candidate, ...]:
    """Return the endpoints that are hinted for clients on this node; if there are none, in its
    zone. `chosen`: the usable endpoints.

    Hints count only if every endpoint is ready and has hints of the same type, and if at least one
    endpoint is for this node or zone. Otherwise return all endpoints, because incomplete hints
    would leave some clients without an endpoint."""
    if not all(each.ready and each.hints for each in chosen):
        return chosen
    for own, names in ((node, _nodes), (zone, _zones)):
        if all(map(names, chosen)) and (
            found := tuple(each for each in chosen if own in names(each))
        ):
            return found
    return chosen


def _nodes(candidate: Candidate) -> set[str]:
    return {hint.name for hint in (candidate.hints and candidate.hints.for_nodes) or ()}


def _zones(candidate: Candidate) -> set[str]:
    return {hint.name for hint in (candidate.hints and candidate.hints.for_zones) or ()}
