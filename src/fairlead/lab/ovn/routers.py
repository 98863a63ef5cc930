"""The routers of OVN of a lab, as values.

Pure. In: the topology of a lab with chassis. Out: its routers, and the commands of ovn-nbctl(8)
that create them. There is one distributed router in front of all nodes, whose gateway port may be
on every chassis, or a gateway router for each node, on the chassis of the same number. A router has
one port, in lan: it sends packets for pods to their nodes, and everything else to the router of the
lab. Gateway routers translate the source of load-balanced connections (lb_force_snat_ip), as those
of OVN-Kubernetes do, unless a load balancer says otherwise."""

from collections.abc import Iterator
from typing import NamedTuple

from fairlead.lab.ovn.layout import Command, connect, external
from fairlead.lab.topology import (
    LAN,
    OVN_ADDRESSES,
    Host,
    Topology,
    gateway_router_addresses,
    mac_of,
)

EDGE, SWITCH = "edge", "lan"
"""The names of the distributed router, and of the switch of the network lan."""
BFD_MULTIPLIER = 5
"""A chassis is dead after so many seconds without a packet. On a busy machine, programs stand still
for longer than OVN's default allows."""


class OvnRouter(NamedTuple):
    """A router of OVN: its addresses in lan, its switch, the nodes that it sends to, and the
    chassis on which it can be, the preferred one first."""

    name: str
    addresses: tuple[str, ...]
    switch: str
    nodes: tuple[Host, ...]
    chassis: tuple[Host, ...]

    @property
    def port(self) -> str:
        """The name of its port in lan."""
        return f"{self.name}-{self.switch}"

    @property
    def is_gateway_router(self) -> bool:
        """Whether the router is on one chassis only."""
        return self.name != EDGE

    @property
    def placed_port(self) -> str:
        """The name of the port in the southbound database that shows the chassis of the router."""
        return self.port if self.is_gateway_router else f"cr-{self.port}"


def router_name(node: str) -> str:
    """Return the name of the gateway router of a node."""
    return f"GR_{node}"


def routers_of(topology: Topology) -> tuple[OvnRouter, ...]:
    """Return the routers of a lab with chassis."""
    nodes, chassis = topology.of("node"), topology.of("chassis")
    if not topology.gateway_routers:
        return (OvnRouter(EDGE, OVN_ADDRESSES, SWITCH, nodes, chassis),)
    return tuple(
        OvnRouter(
            router_name(node.name),
            gateway_router_addresses(node),
            f"{SWITCH}-{node.name}",
            (node,),
            (place,),
        )
        for node, place in zip(nodes, chassis, strict=True)
    )


def commands(topology: Topology) -> Iterator[Command]:
    """Yield the commands that create the routers."""
    yield ("set", "nb_global", ".", f"options:bfd-mult={BFD_MULTIPLIER}")
    for router in routers_of(topology):
        yield from _router(router)


def _router(router: OvnRouter) -> Iterator[Command]:
    yield from external(router.switch)
    yield ("lr-add", router.name)
    lengths = [network.prefixlen for network in LAN]
    own = [f"{each}/{length}" for each, length in zip(router.addresses, lengths, strict=True)]
    yield from connect(router.name, router.switch, mac_of(router.addresses[0], 5), *own)
    if router.is_gateway_router:
        (chassis,) = router.chassis
        options = (f"options:chassis={chassis.name}", "options:lb_force_snat_ip=router_ip")
        yield ("set", "logical_router", router.name, *options)
    else:
        for place, host in enumerate(router.chassis):
            priority = str(len(router.chassis) - place)
            yield ("lrp-set-gateway-chassis", router.port, host.name, priority)
    for network in LAN:
        everything = "0.0.0.0/0" if network.version == 4 else "::/0"
        yield ("lr-route-add", router.name, everything, str(network[1]))
    for node in router.nodes:
        for cidr, address in zip(node.pod_cidrs, node.addresses, strict=True):
            yield ("lr-route-add", router.name, cidr, address)
