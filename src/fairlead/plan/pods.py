"""The pods of a listener, for a load balancer that sends to pods and not to nodes.

In: a port of a Service, its EndpointSlices, the Nodes. Out: PodMembers. Follows KEP-1669
(terminating endpoints). Pods on nodes that must get no load-balancer traffic drain if other pods
can serve. Pure. Invariant: sorted."""

from collections.abc import Mapping, Sequence

from fairlead.kube.objects import EndpointSlice, Node, ServicePort
from fairlead.model import Family, PodMember
from fairlead.plan.endpoints import candidates, usable
from fairlead.plan.members import excluded


def pods_of(
    port: ServicePort,
    family: Family,
    slices: Sequence[EndpointSlice],
    nodes: Mapping[str, Node],
) -> tuple[PodMember, ...]:
    """Return every pod of the port: `active` if it gets new connections, else `draining`. A UDP
    flow must not stay at a pod that does not serve, so for UDP such a pod is left out."""
    known = candidates(slices, port_name=port.name, protocol=port.protocol, family=family)
    admitted = [each for each in known if each.node not in nodes or not excluded(nodes[each.node])]
    chosen = {(each.address, each.port) for each in usable(admitted) or usable(known)}
    return tuple(
        PodMember(each.address, each.port, each.node)
        if (each.address, each.port) in chosen
        else PodMember(
            each.address,
            each.port,
            each.node,
            "draining",
            each.ready or (each.serving and each.terminating),
        )
        for each in known
        if each.serving or port.protocol != "UDP" or (each.address, each.port) in chosen
    )
