"""The budget of one Service: how much a plan reads of it.

In: a Service and its EndpointSlices. Out: nothing, or a Refused that names what is too big. A plan
is a pure function in the event loop of its role, which nothing can interrupt: a limit on its time
could not be enforced, and it would refuse a Service on one host and not on another. So the size of
everything that a plan reads is limited instead, before it is read, and a plan takes a time that is
proportional to what it reads. An API server accepts 1.5 MiB in an object. The values of annotations
and the source ranges have limits of their own (`annotations`, `service`). Invariant: pure; the
check itself counts, and reads no text."""

from collections.abc import Sequence

from fairlead.errors import Refused
from fairlead.kube.objects import EndpointSlice, Service

BALANCER_STEPS = 250_000
"""The maximum of `steps_of` for a load balancer, whose plan then takes about half a second."""
NODE_STEPS = 2_000_000
"""The same for the rules of a node, which are planned in a thread if there are many."""
PORTS_PER_STEP = 32
"""Finding a port among the ports of a slice is so many times faster than reading an endpoint."""


def check(service: Service, slices: Sequence[EndpointSlice], max_steps: int) -> None:
    """Raise Refused if a plan of this Service would read too much."""
    if (steps := steps_of(service, slices)) > max_steps:
        raise Refused(
            f"the Service has {len(service.spec.ports):,} ports, and its EndpointSlices have "
            f"{sum(len(each.endpoints or ()) for each in slices):,} endpoints with "
            f"{sum(len(each.ports or ()) for each in slices):,} ports: {steps:,} combinations, "
            f"and at most {max_steps:,} are planned",
            fix="use several Services with fewer ports",
        )


def steps_of(service: Service, slices: Sequence[EndpointSlice]) -> int:
    """Return how many endpoints and addresses a plan reads: all of them for each port."""
    spec = service.spec
    ports = len(spec.ports) + sum(len(each.ports or ()) for each in slices)
    endpoints = sum(len(each.endpoints or ()) for each in slices)
    addresses = len(spec.external_ips) + len(service.status.load_balancer.ingress)
    return len(spec.ports) * (endpoints + addresses + len(slices) + ports // PORTS_PER_STEP)
