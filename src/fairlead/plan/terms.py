"""The terms of a class for one Service: everything in which classes differ.

In: `ServiceContext`, a Service with its context. Out: `Terms`. Each class has a function that
computes its terms, in a module of its own, and its row in `plan.classes` names the function.
`plan.balancer` makes the LoadBalancer of every class from its terms in the same way. Pure."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from fairlead.config import Config
from fairlead.kube.objects import Node, Service, ServicePort
from fairlead.model import (
    ExistingLoadBalancer,
    Family,
    Finding,
    IPMode,
    Listener,
    Protocol,
    Settings,
    UnservedPort,
)
from fairlead.plan.service import CLASS_PREFIX

NODE_PORT_MISSING = "NodePortMissing"
"""Code of a Finding: ports have no node port, and the class reaches nodes by node ports. With the
domain as prefix, it is also the error of such a port in the status."""


class ServiceContext(msgspec.Struct, frozen=True):
    """A Service that requests a load balancer, with its context."""

    service: Service
    config: Config
    nodes: Mapping[str, Node]
    addresses: Sequence[str]
    """The addresses that are assigned to the Service. If the cloud assigns them, they are the
    addresses in the status of the Service."""
    existing: ExistingLoadBalancer | None = None
    """The load balancer that the Service has in the cloud; None if none is known."""


def no_remarks(_listeners: Sequence[Listener]) -> Sequence[Finding]:
    """Return no Finding: the class has no remarks about its members."""
    return ()


class Terms(msgspec.Struct, frozen=True):
    """How a class serves one Service."""

    settings: Settings
    notes: Sequence[Finding] = ()
    unserved: Sequence[UnservedPort] = ()
    """The ports that the class cannot serve."""
    families: Sequence[Family] | None = None
    """The address families in which the load balancer listens. None: the families of its
    addresses."""
    ip_mode: IPMode = "VIP"
    hostname_suffix: str = ""
    hostname: str = ""
    nodes: Mapping[str, Node] | None = None
    """The nodes that may be members. None: all."""
    pods: bool = False
    """The load balancer sends to pods itself, so each listener lists them."""
    all_nodes: Sequence[Protocol] = ()
    """Every node is a member of the listeners of these protocols, with ready pods or without."""
    remarks: Callable[[Sequence[Listener]], Sequence[Finding]] = no_remarks
    """Return the Findings that depend on the members of the listeners."""


TermsOf = Callable[[ServiceContext], Terms]
"""Computes the terms of a class. Raises Refused for a Service that the class cannot serve at
all."""


def without_node_port(
    class_name: str, ports: Sequence[ServicePort]
) -> tuple[list[UnservedPort], list[Finding]]:
    """Return the ports as unserved, and a Finding about them: they have no node port, and this
    class reaches nodes by node ports."""
    if not ports:
        return [], []
    message = (
        f"not served: {listed(ports)}: class {class_name} reaches nodes by node ports, and these "
        "ports have none"
    )
    finding = Finding(
        NODE_PORT_MISSING,
        message,
        severity="error",
        remedy="set spec.allocateLoadBalancerNodePorts to true",
        blocks="Programmed",
    )
    return unserved(ports, NODE_PORT_MISSING), [finding]


def unserved(ports: Sequence[ServicePort], reason: str) -> list[UnservedPort]:
    """Return the ports as unserved, each for this reason."""
    return [UnservedPort(port.port, port.protocol, CLASS_PREFIX + reason) for port in ports]


def listed(ports: Sequence[ServicePort]) -> str:
    """Format the ports for a message: `80/TCP, 53/UDP`."""
    return ", ".join(f"{port.port}/{port.protocol}" for port in ports)
