"""The terms on which a class serves one Service: everything in which classes differ.

In: a Service as it asks for a load balancer, with what surrounds it (`Asked`). Out: `Terms`, from
which `plan.balancer` makes the LoadBalancer in the same way for every class. Each class has a
function of this type, in a module of its own (`direct`, `proxying`, `octavia_terms`); the table of
classes names it (`plan.classes`). Pure."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from fairlead.config import Config
from fairlead.kube.objects import Node, Service, ServicePort
from fairlead.model import (
    Family,
    IPMode,
    Listener,
    Note,
    OctaviaStanding,
    Protocol,
    Settings,
    UnservedPort,
)
from fairlead.plan.service import CLASS_PREFIX

NODE_PORT_MISSING = "NodePortMissing"
"""Why a class that reaches nodes by node ports does not serve a port: reason of a Note, and, with
our domain before it, error of a port in the status."""


class Asked(msgspec.Struct, frozen=True):
    """A Service that asks for a load balancer, and what surrounds it."""

    service: Service
    config: Config
    nodes: Mapping[str, Node]
    addresses: Sequence[str]
    """The addresses that are given to it; of a class whose addresses come from a cloud those that
    it shows."""
    standing: OctaviaStanding | None = None
    """The load balancer that it has in the cloud, as far as is known."""


def no_remarks(_listeners: Sequence[Listener]) -> Sequence[Note]:
    return ()


class Terms(msgspec.Struct, frozen=True):
    """How a class serves a Service."""

    settings: Settings
    notes: Sequence[Note] = ()
    unserved: Sequence[UnservedPort] = ()
    """The ports that the class cannot serve."""
    families: Sequence[Family] | None = None
    """The address families in which it listens. None: those of its addresses."""
    ip_mode: IPMode = "VIP"
    hostname_suffix: str = ""
    hostname: str = ""
    nodes: Mapping[str, Node] | None = None
    """The nodes that may be members. None: all."""
    all_nodes: Sequence[Protocol] = ()
    """The protocols of which every node is a member, with ready pods or without."""
    remarks: Callable[[Sequence[Listener]], Sequence[Note]] = no_remarks
    """The Notes that depend on who the members are."""


TermsOf = Callable[[Asked], Terms]
"""Raises Refused for a Service that the class cannot serve at all."""


def without_node_port(
    class_name: str, ports: Sequence[ServicePort]
) -> tuple[list[UnservedPort], list[Note]]:
    """What is told of ports that have no node port, by a class that reaches nodes by it."""
    if not ports:
        return [], []
    message = (
        f"not served: {listed(ports)}: class {class_name} reaches nodes by node ports, and there "
        "are none; set spec.allocateLoadBalancerNodePorts to true"
    )
    return unserved(ports, NODE_PORT_MISSING), [Note(NODE_PORT_MISSING, message, "Programmed")]


def unserved(ports: Sequence[ServicePort], reason: str) -> list[UnservedPort]:
    return [UnservedPort(port.port, port.protocol, CLASS_PREFIX + reason) for port in ports]


def listed(ports: Sequence[ServicePort]) -> str:
    return ", ".join(f"{port.port}/{port.protocol}" for port in ports)
