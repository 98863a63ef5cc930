"""Build a lab's network: one namespace per host, cables to the router's bridges, routes, sysctls.

In: a `Topology`. Out: namespaces and their contents in the kernel; deleting the namespaces deletes
everything. A pod is connected to its node by a point-to-point link and host routes, as with Calico,
and not by a bridge: packets between pods of one node then pass the node's netfilter hooks without
br_netfilter, as in a real cluster. Neighbour entries that never change are permanent and duplicate
address detection is off, so that nothing has to be waited for.
"""

from collections.abc import Sequence
from contextlib import suppress

from fairlead.errors import Conflict, Unavailable
from fairlead.lab import namespace, process
from fairlead.lab.topology import FAR, LAN, NETWORKS, PODS, ROUTER, VIPS, Host, PodNetwork, Topology
from fairlead.net.link import Nexthop, Rtnetlink

POD_GATEWAYS = ("169.254.1.1", "fe80::1")
"""The default routers of pods. No host has these addresses; a permanent neighbour entry resolves
them to the node's end of the link."""

_HOST_SYSCTLS: dict[str, object] = {
    "net/ipv4/conf/all/rp_filter": 0,
    "net/ipv4/conf/default/rp_filter": 0,
    "net/ipv4/conf/all/send_redirects": 0,
    "net/ipv4/conf/default/send_redirects": 0,
    "net/ipv6/conf/all/accept_dad": 0,
    "net/ipv6/conf/default/accept_dad": 0,
    "net/ipv6/conf/all/accept_ra": 0,
    "net/ipv6/conf/default/accept_ra": 0,
    "net/core/somaxconn": 16384,
}
_FORWARD_SYSCTLS: dict[str, object] = {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1}
_ROUTER_SYSCTLS: dict[str, object] = {
    "net/ipv4/fib_multipath_hash_policy": 1,
    "net/ipv6/fib_multipath_hash_policy": 1,
}
_CLIENT_SYSCTLS: dict[str, object] = {
    "net/ipv4/tcp_tw_reuse": 1,
    "net/ipv4/ip_local_port_range": "1024 65535",
}
# With the default, a benchmark of short connections would fill the conntrack table with TIME_WAIT
# entries within half a minute.
_NODE_SYSCTLS: dict[str, object] = {"net/netfilter/nf_conntrack_tcp_timeout_time_wait": 5}
_SYSCTLS: dict[str, dict[str, object]] = {
    "client": _CLIENT_SYSCTLS,
    "gateway": _FORWARD_SYSCTLS,
    "node": _FORWARD_SYSCTLS | _NODE_SYSCTLS,
    "control": {},
}

# The masquerading that a CNI does for traffic of pods to addresses outside the cluster. Traffic
# inside the cluster keeps its source address, as Kubernetes requires.
_MASQUERADE = f"""
table inet lab {{
  chain postrouting {{
    type nat hook postrouting priority srcnat + 10
    ip saddr {PODS[0]} ip daddr != {{ {PODS[0]}, {LAN[0]}, {FAR[0]} }} oifname "eth0" masquerade
    ip6 saddr {PODS[1]} ip6 daddr != {{ {PODS[1]}, {LAN[1]}, {FAR[1]} }} oifname "eth0" masquerade
  }}
}}
"""


async def build_router(topology: Topology) -> None:
    """Build the router with its bridges and the routes to pods and, unless gateways announce them,
    to VIPs. `build_host` connects the hosts."""
    name = topology.namespace(ROUTER)
    namespace.create(name)
    namespace.set_sysctls(name, _HOST_SYSCTLS | _FORWARD_SYSCTLS | _ROUTER_SYSCTLS)
    async with _netlink(name) as links:
        await links.set_state("lo", up=True)
        for bridge in topology.networks:
            await links.add_bridge(bridge)
            for network in NETWORKS[bridge]:
                await links.set_address(bridge, f"{network[1]}/{network.prefixlen}")
            await links.set_state(bridge, up=True)
        await _route_pods(links, topology.of("node"))
    if topology.announce == "none":
        await route_vips(topology, topology.gateways)


async def build_host(topology: Topology, host: Host) -> None:
    """Build a host and connect it to the router, which must exist. The host is reachable when this
    returns."""
    name = topology.namespace(host.name)
    namespace.create(name)
    namespace.set_sysctls(name, _HOST_SYSCTLS | _SYSCTLS[host.kind])
    async with _netlink(topology.namespace(ROUTER)) as router:
        # The router's end has the host's name, so that a capture on the router shows the sender.
        await router.add_veth(host.name, _port_mac(host), "eth0", host.mac, namespace.path(name))
        await router.set_bridge(host.name, host.network)
        await router.set_state(host.name, up=True)
    async with _netlink(name) as links:
        await links.set_state("lo", up=True)
        await connect(links, topology, host)
    if host.kind == "node":
        await _masquerade(topology, host)


async def connect(links: Rtnetlink, topology: Topology, host: Host) -> None:
    """Bring eth0 up with its addresses and routes, which the kernel forgets when the device goes
    down."""
    await links.set_state("eth0", up=True)
    for address, router, length, everything in zip(
        host.addresses, host.routers, (24, 64), ("0.0.0.0/0", "::/0"), strict=True
    ):
        await links.set_address("eth0", f"{address}/{length}")
        await links.set_route(everything, Nexthop(router))
    if host.kind in ("node", "gateway", "control"):
        # Pods of nodes on other networks are reached through the router.
        on_link = [
            node
            for node in topology.of("node")
            if node.network == host.network and node.name != host.name
        ]
        await _route_pods(links, on_link)


async def unplug(topology: Topology, host: Host) -> None:
    """Take eth0 of a host down at once, without a message to any peer."""
    with suppress(Conflict):
        async with _netlink(topology.namespace(host.name)) as links:
            await links.set_state("eth0", up=False)


async def plug_in(topology: Topology, host: Host) -> None:
    """Undo `unplug`."""
    async with _netlink(topology.namespace(host.name)) as links:
        await connect(links, topology, host)


async def tear_down_host(topology: Topology, host: Host) -> None:
    """Remove the host and the router's end of its cable, so that it can be built again."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        await router.delete_link(host.name)
    namespace.delete(topology.namespace(host.name))


async def route_vips(topology: Topology, gateways: Sequence[Host]) -> None:
    """Route the VIP ranges to these gateways, equally by flow (ECMP), as a fabric does when BGP
    sessions change."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        for family, vips in enumerate(VIPS):
            hops = [Nexthop(gateway.addresses[family], gateway.network) for gateway in gateways]
            if hops:  # replaced in one step: a fabric loses no packet when its routes change
                await router.set_route(str(vips), *hops)
            else:
                await router.delete_route(str(vips))


async def build_pod(name: str, node: str, host: Host, place: PodNetwork) -> None:
    """Create a pod's namespace `name` and connect it to the node's namespace `node`. Remove what a
    killed process may have left in its place."""
    namespace.delete(name)
    namespace.create(name)
    namespace.set_sysctls(name, _HOST_SYSCTLS)
    async with _netlink(node) as outside, _netlink(name) as inside:
        await outside.delete_link(place.device)
        await outside.add_veth(
            place.device, place.node_mac, "eth0", place.mac, namespace.path(name)
        )
        await outside.set_state(place.device, up=True)
        await inside.set_state("lo", up=True)
        await inside.set_state("eth0", up=True)
        defaults = ("0.0.0.0/0", "::/0")
        for family, (address, gateway, default) in enumerate(
            zip(place.addresses, POD_GATEWAYS, defaults, strict=True)
        ):
            whole = f"{address}/{128 if family else 32}"
            await inside.set_address("eth0", whole)
            await inside.set_neighbour("eth0", gateway, place.node_mac)
            await inside.set_route(default, Nexthop(gateway, "eth0"), onlink=True)
            await outside.set_neighbour(place.device, address, place.mac)
            await outside.set_route(
                whole, Nexthop(device=place.device), source=host.addresses[family]
            )


async def tear_down_pod(name: str, node: str, place: PodNetwork) -> None:
    """Remove a pod's link and namespace. The node may already be gone."""
    with suppress(Conflict):
        async with _netlink(node) as outside:
            await outside.delete_link(place.device)
    namespace.delete(name)


async def _route_pods(links: Rtnetlink, nodes: Sequence[Host]) -> None:
    for node in nodes:
        for cidr, address in zip(node.pod_cidrs, node.addresses, strict=True):
            await links.set_route(cidr, Nexthop(address))


def _netlink(name: str) -> Rtnetlink:
    with namespace.inside(name):
        return Rtnetlink()


async def _masquerade(topology: Topology, host: Host) -> None:
    name = topology.namespace(host.name)
    exit_code, _, errors = await process.run(
        name, ["nft", "-f", "-"], lab=topology.lab, input_text=_MASQUERADE
    )
    if exit_code:
        raise Unavailable(
            f"tried to load the masquerade rules in namespace {name}: nft answered {errors.strip()}"
        )


def _port_mac(host: Host) -> str:
    return host.mac.replace("02:01:", "02:04:", 1)
