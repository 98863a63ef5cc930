"""The part of `/state` about the eBPF data plane, and its tables. Pure."""

from collections.abc import Iterator, Mapping

from fairlead.model import Value
from fairlead.role_state.part import Part, Table


class ServiceTraffic(Value, frozen=True):
    """The traffic of all listeners of a Service. `flows`: new TCP and SCTP connections, and new UDP
    flows. `drops`: dropped packets by reason; only reasons that occurred."""

    packets: int
    bytes: int
    flows: int
    drops: Mapping[str, int]


class ListenerTraffic(Value, frozen=True):
    """The traffic of one listener, as in ServiceTraffic."""

    packets: int
    bytes: int
    flows: int


class NodeTraffic(Value, frozen=True):
    """The traffic that was sent to a node. `forwarding` and `next_hops`: the forwarding methods and
    the addresses of the next hops, at most one for each address family. `returned`: packets that
    came back to this gateway after they had been sent to this node."""

    forwarding: tuple[str, ...]
    next_hops: tuple[str, ...]
    packets: int
    bytes: int
    flows: int
    returned: int = 0


class ResourceState(Value, frozen=True):
    """The usage of a resource, and its limit."""

    used: int
    limit: int


class DrainState(Value, frozen=True):
    """A node that keeps its connections of a listener (`address:port/protocol`) for another
    `left_s` seconds and gets no new connections."""

    service: str
    listener: str
    node: str
    left_s: float


class InterfaceState(Value, frozen=True):
    """The hook at which the data plane is attached to an interface (`none`: it is not attached),
    and the reason. `problem`: why the interface forwards nothing now; empty if it forwards."""

    name: str
    attach: str
    why: str
    problem: str = ""


class TrafficState(Part, frozen=True):
    """The part of `/state` about the eBPF data plane. `listeners`: every listener of the data
    plane, by `address:port/protocol`. `untracked`: new flows without a flow entry, because the rate
    limit was reached. `unsent`: new entries that were not sent to peers, because there were too
    many in a short time."""

    services: Mapping[str, ServiceTraffic] = {}
    listeners: Mapping[str, ListenerTraffic] = {}
    nodes: Mapping[str, NodeTraffic] = {}
    drops: Mapping[str, int] = {}
    messages: Mapping[str, int] = {}
    untracked: int = 0
    unsent: int = 0
    resources: Mapping[str, ResourceState] = {}
    draining: tuple[DrainState, ...] = ()
    interfaces: tuple[InterfaceState, ...] = ()

    def shown(self) -> Iterator[Table]:
        yield Table(
            ("NODE", "FORWARDING", "NEXT HOP", "FLOWS", "PACKETS", "BYTES"),
            [
                (
                    name,
                    ", ".join(each.forwarding),
                    ", ".join(each.next_hops),
                    *map(str, (each.flows, each.packets, each.bytes)),
                )
                for name, each in self.nodes.items()
            ],
        )
        if self.draining:
            yield Table(
                ("SERVICE", "LISTENER", "DRAINING", "LEFT"),
                [
                    (each.service, each.listener, each.node, f"{max(0.0, each.left_s):.0f} s")
                    for each in self.draining
                ],
            )
        yield Table(
            ("INTERFACE", "ATTACHED", "WHY", "PROBLEM"),
            [(each.name, each.attach, each.why, each.problem or "-") for each in self.interfaces],
        )
