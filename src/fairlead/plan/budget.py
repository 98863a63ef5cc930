"""The budget of one Service: how much a plan reads of it.

In: a Service and its EndpointSlices. Out: nothing, or a Refused that names what is too big. A plan
is a pure function in the event loop of its role, which nothing can interrupt: a limit on its time
could not be enforced, and it would refuse a Service on one host and not on another. So the size of
everything that a plan reads is limited instead, before it is read, and a plan takes a time that is
proportional to what it reads. What a node makes of the plan is limited too: one element of a map in
the kernel for each port, address and endpoint. An API server accepts 1.5 MiB in an object. The
values of annotations and the source ranges have limits of their own (`annotations`, `service`).
Invariant: pure; the checks only count."""

from collections.abc import Sequence

from fairlead.errors import Refused
from fairlead.kube.objects import SOURCE_RANGES_ANNOTATION, EndpointSlice, Service

BALANCER_STEPS = 500_000
"""The maximum of `steps_of` for a load balancer, whose plan then takes about a second, in which its
loop does nothing else. More than half a second is slow (`reconcile`): then the plans of the Service
get at most a third of the time."""
NODE_STEPS = 2_000_000
"""The same for the rules of a node, which are planned in a thread if there are many."""
NODE_ADDRESSES = 20_000
"""The maximum of ports times addresses of a Service on a node, which are 80,000 elements."""
NODE_ELEMENTS = 2_000_000
"""The maximum of `elements_of`."""
PORTS_PER_STEP = 32
"""Finding a port among the ports of a slice is so many times faster than reading an endpoint."""


def check(service: Service, slices: Sequence[EndpointSlice], max_steps: int) -> None:
    """Raise Refused if a plan of this Service would read too much."""
    if (steps := steps_of(service, slices)) > max_steps:
        raise Refused(
            f"the Service has {len(service.spec.ports):,} ports, and its EndpointSlices have "
            f"{_endpoints(slices):,} endpoints with "
            f"{sum(len(each.ports or ()) for each in slices):,} ports: {steps:,} combinations, "
            f"and at most {max_steps:,} are planned",
            fix="use several Services with fewer ports",
        )


def steps_of(service: Service, slices: Sequence[EndpointSlice]) -> int:
    """Return how many endpoints and addresses a plan reads: all of them for each port."""
    spec = service.spec
    ports = len(spec.ports) + sum(len(each.ports or ()) for each in slices)
    read = _endpoints(slices) + _addresses(service) + len(slices) + ports // PORTS_PER_STEP
    return len(spec.ports) * read


def check_elements(service: Service, slices: Sequence[EndpointSlice]) -> None:
    """Raise Refused if a node would have too many elements for this Service."""
    ports, addresses = len(service.spec.ports), _addresses(service)
    if (frontends := ports * addresses) > NODE_ADDRESSES:
        raise Refused(
            f"the Service has {ports:,} ports and {addresses:,} external IPs and load-balancer "
            f"addresses: {frontends:,} combinations, and a node serves at most {NODE_ADDRESSES:,}",
            fix="use several Services with fewer ports or addresses",
        )
    if (elements := elements_of(service, slices)) > NODE_ELEMENTS:
        raise Refused(
            f"the Service has {ports:,} ports, {addresses:,} external IPs and load-balancer "
            f"addresses, {_endpoints(slices):,} endpoints and {_ranges(service):,} source ranges: "
            f"{elements:,} combinations, and a node serves at most {NODE_ELEMENTS:,}",
            fix="use several Services with fewer ports or addresses",
        )


def elements_of(service: Service, slices: Sequence[EndpointSlice]) -> int:
    """Return about how many elements of maps a node has for this Service: one for each endpoint of
    each port at each address, and one for each source range of each port at each load-balancer
    address."""
    frontends = len(service.spec.ports) * max(1, _addresses(service))
    restricted = len(service.spec.ports) * len(service.status.load_balancer.ingress)
    return frontends * (1 + _endpoints(slices)) + restricted * _ranges(service)


def _addresses(service: Service) -> int:
    return len(service.spec.external_ips) + len(service.status.load_balancer.ingress)


def _endpoints(slices: Sequence[EndpointSlice]) -> int:
    return sum(len(each.endpoints or ()) for each in slices)


def _ranges(service: Service) -> int:
    if ranges := service.spec.load_balancer_source_ranges:
        return len(ranges)
    text = service.metadata.annotations.get(SOURCE_RANGES_ANNOTATION, "")
    return text.count(",") + 1 if text else 0
