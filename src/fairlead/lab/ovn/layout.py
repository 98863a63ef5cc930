"""The logical networks of a site of OVN: one distributed router, or a gateway router on each
hypervisor.

Pure. In: the pods, the hypervisors. Out: ovn-nbctl commands; the pods with their addresses. The
second network is that of OVN-Kubernetes: each hypervisor has a switch for its pods, all of them at
one distributed router. Behind it, a join switch leads to the gateway routers, each with a switch of
its own to the external network. Replies of pods leave by the gateway router of their hypervisor,
which a route by source address does. Source translation of load-balanced connections
(lb_force_snat_ip) is on, as there."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Topology = Literal["router", "gateways"]
Command = tuple[str, ...]
PHYSICAL_NETWORK = "physnet"
"""The name by which OVN's localnet ports name the external network."""
ROUTER, PODS, OUTSIDE, JOIN = "dr", "pods", "outside", "join"
"""The distributed router, the switch of the pods, the switch of the external network, and the
switch between the distributed router and gateway routers."""
ROUTER_ADDRESS, ROUTER_ADDRESS_V6 = "192.0.2.129", "2001:db8:31::a"
"""The addresses of the distributed router in the external network."""
UPSTREAM, UPSTREAM_V6 = "192.0.2.254", "2001:db8:31::1"
"""The addresses of the client's router in the external network."""
POD_NETWORKS = ("10.244.0.0/16", "fd00::/64")
JOIN_ADDRESS, JOIN_ADDRESS_V6 = "100.64.0.1", "fd98::1"
"""The addresses of the distributed router in the network of gateway routers."""


class OvnPod(NamedTuple):
    """A pod: its hypervisor, its number there, its addresses, and its switch. `lengths`: the
    lengths of the prefixes of its networks. `gateways`: its default routers."""

    name: str
    chassis: str
    address: str
    address_v6: str
    mac: str
    switch: str
    lengths: tuple[int, int]
    gateways: tuple[str, str]


class GatewayRouter(NamedTuple):
    """The gateway router of a hypervisor, with its addresses in the external network."""

    name: str
    chassis: str
    number: int
    address: str
    address_v6: str


def pods_of(counts: Sequence[int], topology: Topology) -> tuple[OvnPod, ...]:
    """Return the pods of a site. `counts`: the number of pods of each hypervisor."""
    return tuple(
        OvnPod(
            f"n{number}p{index + 1}",
            f"ch{number}",
            f"10.244.{number}.{index + 10}",
            f"fd00::{number}:{index + 10}",
            f"02:00:0a:f4:{number:02x}:{index + 10:02x}",
            *(
                (PODS, (16, 64), ("10.244.0.1", "fd00::1"))
                if topology == "router"
                else (pod_switch(f"ch{number}"), (24, 112), _node_gateways(number))
            ),
        )
        for number, count in enumerate(counts, 1)
        for index in range(count)
    )


def gateway_routers(count: int) -> tuple[GatewayRouter, ...]:
    """Return the gateway routers of this number of hypervisors."""
    return tuple(
        GatewayRouter(
            f"GR_ch{number}",
            f"ch{number}",
            number,
            f"192.0.2.{130 + number}",
            f"2001:db8:31::a{number}",
        )
        for number in range(1, count + 1)
    )


def pod_switch(chassis: str) -> str:
    """Return the name of the switch of the pods of a hypervisor with a gateway router."""
    return f"{PODS}-{chassis}"


def pod_networks(number: int) -> tuple[str, str]:
    """Return the networks of the pods of the hypervisor with this number."""
    return f"10.244.{number}.0/24", f"fd00::{number}:0/112"


def _node_gateways(number: int) -> tuple[str, str]:
    return f"10.244.{number}.1", f"fd00::{number}:1"


def one_router(pods: Sequence[OvnPod], chassis: str) -> Iterator[Command]:
    """Yield the commands for one distributed router, whose gateway port is on this hypervisor."""
    yield ("lr-add", ROUTER)
    yield from external(OUTSIDE)
    yield ("ls-add", PODS)
    yield from connect(ROUTER, PODS, "02:00:0a:f4:00:01", "10.244.0.1/16", "fd00::1/64")
    outside = (f"{ROUTER_ADDRESS}/25", f"{ROUTER_ADDRESS_V6}/64")
    yield from connect(ROUTER, OUTSIDE, "02:00:0a:f4:ff:01", *outside)
    yield ("lrp-set-gateway-chassis", f"{ROUTER}-{OUTSIDE}", chassis)
    yield ("lr-route-add", ROUTER, "0.0.0.0/0", UPSTREAM)
    yield ("lr-route-add", ROUTER, "::/0", UPSTREAM_V6)
    yield from _ports(pods)


def router_per_chassis(
    pods: Sequence[OvnPod], routers: Sequence[GatewayRouter]
) -> Iterator[Command]:
    """Yield the commands for a gateway router on each hypervisor."""
    yield ("lr-add", ROUTER)
    yield ("ls-add", JOIN)
    join = (f"{JOIN_ADDRESS}/16", f"{JOIN_ADDRESS_V6}/64")
    yield from connect(ROUTER, JOIN, "02:00:0a:f4:fd:ff", *join)
    for router in routers:
        yield from _gateway_router(router)
    yield from _ports(pods)


def _gateway_router(router: GatewayRouter) -> Iterator[Command]:
    name, number = router.name, router.number
    options = (f"options:chassis={router.chassis}", "options:lb_force_snat_ip=router_ip")
    yield ("lr-add", name)
    yield ("set", "logical_router", name, *options)
    inside, outside = pod_switch(router.chassis), f"{OUTSIDE}-{router.chassis}"
    yield ("ls-add", inside)
    gateway, gateway_v6 = _node_gateways(number)
    mac = f"02:00:0a:f4:{number:02x}:01"
    yield from connect(ROUTER, inside, mac, f"{gateway}/24", f"{gateway_v6}/112")
    own, own_v6 = f"100.64.0.{number + 1}", f"fd98::{number + 1}"
    mac = f"02:00:0a:f4:fd:{number:02x}"
    yield from connect(name, JOIN, mac, f"{own}/16", f"{own_v6}/64")
    yield from external(outside)
    mac = f"02:00:0a:f4:fe:{number:02x}"
    yield from connect(name, outside, mac, f"{router.address}/25", f"{router.address_v6}/64")
    yield ("lr-route-add", name, "0.0.0.0/0", UPSTREAM)
    yield ("lr-route-add", name, "::/0", UPSTREAM_V6)
    networks = zip(POD_NETWORKS, (JOIN_ADDRESS, JOIN_ADDRESS_V6), strict=True)
    yield from (("lr-route-add", name, *each) for each in networks)
    for network, via in zip(pod_networks(number), (own, own_v6), strict=True):
        yield ("--policy=src-ip", "lr-route-add", ROUTER, network, via)


def external(switch: str) -> Iterator[Command]:
    """Yield the commands for a switch with a port to the external network."""
    port = f"{switch}-localnet"
    yield ("ls-add", switch)
    yield ("lsp-add", switch, port)
    yield ("lsp-set-type", port, "localnet")
    yield ("lsp-set-addresses", port, "unknown")
    yield ("lsp-set-options", port, f"network_name={PHYSICAL_NETWORK}")


def connect(router: str, switch: str, *addresses: str) -> Iterator[Command]:
    """Yield the commands for a port of the router with this MAC address and these addresses."""
    port, end = f"{router}-{switch}", f"{switch}-{router}"
    yield ("lrp-add", router, port, *addresses)
    yield ("lsp-add", switch, end)
    yield ("lsp-set-type", end, "router")
    yield ("lsp-set-addresses", end, "router")
    yield ("lsp-set-options", end, f"router-port={port}")


def _ports(pods: Sequence[OvnPod]) -> Iterator[Command]:
    for pod in pods:
        yield ("lsp-add", pod.switch, pod.name)
        yield ("lsp-set-addresses", pod.name, f"{pod.mac} {pod.address} {pod.address_v6}")
