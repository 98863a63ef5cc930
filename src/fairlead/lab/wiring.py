"""Build a lab's network: one namespace per host, cables to the router's bridges, routes, sysctls.

In: a `Topology`. Out: namespaces and their contents in the kernel; deleting the namespaces deletes
everything. A pod is connected to its node by a point-to-point link and host routes, as with Calico,
and not by a bridge: packets between pods of one node then pass the node's netfilter hooks without
br_netfilter, as in a real cluster. Neighbour entries of pods never change and are permanent, and
duplicate address detection is off, so that nothing has to be waited for. All other neighbour
entries are those of the kernel, with its default times.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fairlead.errors import Conflict, Unavailable
from fairlead.lab import namespace, process
from fairlead.lab.topology import (
    FAR,
    LAN,
    NETWORKS,
    OVN_ADDRESSES,
    PODS,
    ROUTER,
    VIPS,
    Host,
    Network,
    PodNetwork,
    Port,
    Topology,
    mac_of,
)
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
    # Between namespaces a packet keeps the hash of the socket that sent it, and the router uses it
    # for ECMP. By default a socket gets another hash when it retransmits, so that a connection
    # would move to another gateway, which it does not on a real network.
    "net/core/txrehash": 0,
}
# With the default, a benchmark of short connections would fill the conntrack table with TIME_WAIT
# entries within half a minute.
_NODE_SYSCTLS: dict[str, object] = {"net/netfilter/nf_conntrack_tcp_timeout_time_wait": 5}
_LAST_METRIC = 4_000_000_000
_REMOVED = "removed"
"""The bridge of ports that drop all frames."""
_HAS_TXREHASH = Path("/proc/sys/net/core/txrehash").exists()
"""Kernels before 5.18 do not have this setting, and always act as with 1."""
_SYSCTLS: dict[str, dict[str, object]] = {
    "client": _CLIENT_SYSCTLS,
    "gateway": _FORWARD_SYSCTLS,
    "node": _FORWARD_SYSCTLS | _NODE_SYSCTLS,
    "control": {},
    "chassis": {},
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


# Open vSwitch reads the frames of the device. So does the kernel, which would answer the packets of
# tunnels with ICMP errors.
_ONLY_OPEN_VSWITCH = """
table netdev lab {
  chain ingress { type filter hook ingress device eth0 priority 0; policy drop; }
}
"""


async def build_router(topology: Topology) -> None:
    """Build the router with its bridges and the routes to pods, and to VIPs unless the hosts
    announce them or each VIP has a route of its own. `build_host` connects the hosts."""
    name = topology.namespace(ROUTER)
    namespace.create(name)
    namespace.set_sysctls(name, _HOST_SYSCTLS | _FORWARD_SYSCTLS | _ROUTER_SYSCTLS)
    async with _netlink(name) as links:
        await links.set_state("lo", up=True)
        for bridge in topology.networks:
            # Otherwise its MAC address would change when a port is added or removed.
            await links.add_bridge(bridge, mac_of(str(NETWORKS[bridge][0][1]), 1))
            for network in NETWORKS[bridge]:
                await links.set_address(bridge, f"{network[1]}/{network.prefixlen}")
            await links.set_state(bridge, up=True)
        await _route_pods(links, topology.of("node"))
        if topology.announce == "bgp":
            # Routing daemons replace a route of the kernel by deleting and adding it. In between,
            # the router would report clients that their destination is unreachable.
            for network in VIPS:
                await links.set_blackhole(str(network), metric=_LAST_METRIC)
        if topology.behind_ovn and not topology.gateway_routers:
            for vips, address in zip(VIPS, OVN_ADDRESSES, strict=True):
                await links.set_route(str(vips), Nexthop(address))
    if topology.announce == "none" and not topology.behind_ovn:
        await route_vips(topology, topology.gateways)


async def build_host(topology: Topology, host: Host) -> None:
    """Build a host and connect it to the router, which must exist. The host is reachable when this
    returns."""
    name = topology.namespace(host.name)
    namespace.create(name)
    sysctls = _HOST_SYSCTLS | _SYSCTLS[host.kind]
    if not _HAS_TXREHASH:
        sysctls = {key: value for key, value in sysctls.items() if not key.endswith("txrehash")}
    namespace.set_sysctls(name, sysctls)
    async with _netlink(topology.namespace(ROUTER)) as router:
        for port in host.ports:
            await router.add_veth(
                port.switch_port, port.switch_mac, port.device, port.mac, namespace.path(name)
            )
            await router.set_bridge(port.switch_port, port.network)
            await router.set_state(port.switch_port, up=True)
    async with _netlink(name) as links:
        await links.set_state("lo", up=True)
        await connect(links, topology, host)
    if host.kind == "node":
        await _load_rules(topology, host, _MASQUERADE)
    if host.kind == "chassis":
        await _load_rules(topology, host, _ONLY_OPEN_VSWITCH)


async def connect(links: Rtnetlink, topology: Topology, host: Host) -> None:
    """Bring the host's devices up with their addresses and routes, which the kernel forgets when a
    device goes down. On a chassis, Open vSwitch has the addresses."""
    for port in host.ports:
        await links.set_state(port.device, up=True)
        if host.kind == "chassis":
            return
        ipv4, ipv6 = NETWORKS[port.network]
        for address, length in zip(port.addresses, (ipv4.prefixlen, ipv6.prefixlen), strict=True):
            await links.set_address(port.device, f"{address}/{length}")
    for router, everything in zip(
        topology.default_routers(host), ("0.0.0.0/0", "::/0"), strict=True
    ):
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
    """Take the devices of a host down at once, without a message to any peer."""
    with suppress(Conflict):
        async with _netlink(topology.namespace(host.name)) as links:
            for port in host.ports:
                await links.set_state(port.device, up=False)


async def plug_in(topology: Topology, host: Host) -> None:
    """Undo `unplug`."""
    async with _netlink(topology.namespace(host.name)) as links:
        await connect(links, topology, host)


async def remove_port(topology: Topology, port: Port) -> None:
    """Let a switch port drop all frames. The host still has carrier."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        # The ports of a bridge that is down drop all frames. A port without a bridge would not: the
        # router itself would answer ARP requests at this port for all its addresses.
        if _REMOVED not in await router.links():
            await router.add_bridge(_REMOVED)
        await router.set_bridge(port.switch_port, _REMOVED)


async def restore_port(topology: Topology, port: Port) -> None:
    """Undo `remove_port`."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        await router.set_bridge(port.switch_port, port.network)


async def split(topology: Topology, network: Network, hosts: Sequence[Host]) -> None:
    """Split a network in two, as if the link between two of its switches failed. The hosts can
    reach each other, but neither the router nor the other hosts. All keep carrier."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        await router.add_bridge(_part(network))
        await router.set_state(_part(network), up=True)
        for host in hosts:
            await router.set_bridge(host.port(network).switch_port, _part(network))


async def heal(topology: Topology, network: Network) -> None:
    """Undo `split`. Do nothing if the network is whole."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        for port in await router.ports(_part(network)):
            await router.set_bridge(port, network)
        await router.delete_link(_part(network))


async def tear_down_host(topology: Topology, host: Host) -> None:
    """Remove the host and the router's end of its cable, so that it can be built again."""
    async with _netlink(topology.namespace(ROUTER)) as router:
        for port in host.ports:
            await router.delete_link(port.switch_port)
    namespace.delete(topology.namespace(host.name))


async def route_vips(topology: Topology, gateways: Sequence[Host]) -> None:
    """Route the VIP ranges to these gateways by static routes, equally by flow (ECMP), as a fabric
    does when BGP sessions change."""
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


async def _load_rules(topology: Topology, host: Host, rules: str) -> None:
    name = topology.namespace(host.name)
    exit_code, _, errors = await process.run(
        name, ["nft", "-f", "-"], lab=topology.lab, input_text=rules
    )
    if exit_code:
        raise Unavailable(
            f"tried to load nftables rules in namespace {name}: nft answered {errors.strip()}"
        )


def _part(network: Network) -> str:
    """Return the name of the bridge of the other part of a split network."""
    return f"{network}-part"
