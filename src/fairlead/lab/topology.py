"""The network of a lab, as values: hosts, addresses and routes.

In: a name and the number of hosts of each kind. Out: a `Topology`; `wiring` builds it.

    client1 ... ── wan 198.51.100.0/24 ── router ── lan 192.0.2.0/24 ── gw1 ... node1 ... control
                   2001:db8:2::/64            │     2001:db8:1::/64           │ point-to-point
                                              │                  pods 10.244.<i>.0/24,
                                              │                       2001:db8:244:<i>::/64
                                              ├── far 198.18.0.0/24 ── nodes that no gateway has
                                              │       2001:db8:3::/64  a link to
                                              └── lan2 198.19.0.0/24 ── eth1 of the gateways, and
                                                       2001:db8:4::/64  hosts outside the cluster

VIPs 203.0.113.0/24 and 2001:db8:f::/64 are routed to the gateways, or to all nodes where the nodes
are the gateways: by static routes, or by the routes that the hosts announce by BGP. With
announcement by L2, VIPs are addresses of lan and lan2 that no host has, and the router has no route
to them other than to the network itself. If the lab has chassis of OVN, VIPs are routed to OVN's
router, which has one port, in lan, and is the default router of the nodes; or each node has a
gateway router of its own, on the chassis of the same number, and each VIP that serves has a route
to those of the nodes with ready pods. ClusterIPs 10.96.0.0/16
and 2001:db8:96::/112 are not routed: the nodes translate them. `host1`, `host2` and so on are hosts
of lan and lan2 that are outside the cluster. The networks far and lan2 exist only where a host is
connected to them.

Invariant: everything follows from the name and the counts, MAC addresses too, so a host that is
rebuilt has the same addresses. Addresses are of the documentation ranges (RFC 5737, RFC 3849), with
two exceptions. Pods and ClusterIPs need larger ranges. The IPv4 addresses of the far network and of
lan2 are of the range for benchmarks of network devices (RFC 2544), because no documentation range
is left.
"""

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Literal, NamedTuple

import msgspec

from fairlead.announce_sections import AnnounceMethod
from fairlead.errors import Refused

Kind = Literal["client", "gateway", "node", "control", "chassis"]
Network = Literal["lan", "wan", "far", "lan2"]

LAN = (IPv4Network("192.0.2.0/24"), IPv6Network("2001:db8:1::/64"))
WAN = (IPv4Network("198.51.100.0/24"), IPv6Network("2001:db8:2::/64"))
FAR = (IPv4Network("198.18.0.0/24"), IPv6Network("2001:db8:3::/64"))
LAN2 = (IPv4Network("198.19.0.0/24"), IPv6Network("2001:db8:4::/64"))
NETWORKS: Mapping[Network, tuple[IPv4Network, IPv6Network]] = {
    "lan": LAN,
    "wan": WAN,
    "far": FAR,
    "lan2": LAN2,
}
"""The router's bridges and their networks, (IPv4, IPv6)."""
VIPS = (IPv4Network("203.0.113.0/24"), IPv6Network("2001:db8:f::/64"))
PODS = (IPv4Network("10.244.0.0/16"), IPv6Network("2001:db8:244::/48"))
SERVICES = (IPv4Network("10.96.0.0/16"), IPv6Network("2001:db8:96::/112"))
OVN_ADDRESSES = tuple(str(network[2]) for network in LAN)
"""The addresses of OVN's router in lan, where the lab has one router in front of all nodes."""
ROUTER = "router"
CONTROL = "control"
API_PORT = 6443
POOL = ("203.0.113.10-203.0.113.250", "2001:db8:f::10-2001:db8:f::ffff")
LAN_POOL = ("192.0.2.230-192.0.2.250", "2001:db8:1::1000-2001:db8:1::ffff")
LAN2_POOL = ("198.19.0.230-198.19.0.250", "2001:db8:4::1000-2001:db8:4::ffff")
"""The pools of a lab whose addresses are announced by L2: addresses in the LANs that no host has.
"""

PODS_PER_NODE = 250

_NAME = re.compile(r"[a-z][a-z0-9]{0,19}")
_FIRST = {"control": 5, "gateway": 10, "node": 20, "client": 10, "chassis": 240}
_MAX_COUNT = {"gateway": 9, "node": 200, "client": 200, "chassis": 9}
_LAN_CLIENT_FIRST, _MAX_LAN_CLIENTS = 220, 9
_GATEWAY_ROUTER_FIRST = 230


class Port(NamedTuple):
    """A cable from a host to a bridge of the router. `device` is the end at the host, `switch_port`
    the end at the bridge `network`. `addresses` (IPv4, IPv6) are those of the device."""

    device: str
    switch_port: str
    network: Network
    addresses: tuple[str, str]

    @property
    def mac(self) -> str:
        """The MAC address of the device."""
        return mac_of(self.addresses[0], 1)

    @property
    def switch_mac(self) -> str:
        """The MAC address of the end at the bridge."""
        return mac_of(self.addresses[0], 4)


class Host(msgspec.Struct, frozen=True):
    """A machine of the lab. `number` is the number in its name. `network` is the router's bridge
    that its eth0 is connected to, and `addresses` are those of eth0. `second` are the addresses of
    its eth1, which is connected to lan2; None if it has none. Nodes have pod CIDRs, (IPv4, IPv6).
    """

    name: str
    kind: Kind
    number: int
    addresses: tuple[str, str]
    network: Network
    pod_cidrs: tuple[str, ...] = ()
    second: tuple[str, str] | None = None

    @property
    def ports(self) -> tuple[Port, ...]:
        """Its cables."""
        # The router's end has the host's name, so that a capture on the router shows the sender.
        first = Port("eth0", self.name, self.network, self.addresses)
        if self.second is None:
            return (first,)
        return first, Port("eth1", f"{self.name}-eth1", "lan2", self.second)

    def port(self, network: Network) -> Port:
        """Return its cable to this network. Raise Refused if it has none."""
        for port in self.ports:
            if port.network == network:
                return port
        networks = " or ".join(port.network for port in self.ports)
        raise Refused(f"{self.name} is not connected to {network}", fix=f"choose {networks}")

    @property
    def mac(self) -> str:
        """The MAC address of its eth0."""
        return self.ports[0].mac


class Topology(msgspec.Struct, frozen=True):
    """A lab: its name and its hosts, without the router, which each lab has. `gateway_kind` is the
    kind of the hosts that are gateways. `announce` is the way in which the router learns where VIPs
    are; `none`: by static routes. `gateway_routers`: each node has a gateway router of OVN."""

    lab: str
    hosts: tuple[Host, ...]
    gateway_kind: Literal["gateway", "node"] = "gateway"
    announce: AnnounceMethod = "none"
    gateway_routers: bool = False

    @property
    def gateways(self) -> tuple[Host, ...]:
        """The hosts on which a gateway runs."""
        return self.of(self.gateway_kind)

    @property
    def behind_ovn(self) -> bool:
        """Whether a router of OVN is in front of the nodes, or of each node."""
        return bool(self.of("chassis"))

    def default_routers(self, host: Host) -> tuple[str, ...]:
        """Return the default routers of a host, (IPv4, IPv6). OVN's router must be that of the
        nodes, because it translates replies of pods."""
        if host.kind == "node" and self.behind_ovn:
            return gateway_router_addresses(host) if self.gateway_routers else OVN_ADDRESSES
        return tuple(str(network[1]) for network in NETWORKS[host.network])

    @property
    def networks(self) -> tuple[Network, ...]:
        """The router's bridges."""
        connected = {port.network for host in self.hosts for port in host.ports}
        return tuple(each for each in NETWORKS if each in ("lan", "wan") or each in connected)

    @property
    def pools(self) -> Mapping[str, tuple[str, str]]:
        """The pools of VIPs, by name. The first is the one for Services that request none."""
        if self.announce != "l2":
            return {"lab": POOL}
        return {"lab": LAN_POOL} | ({"lan2": LAN2_POOL} if "lan2" in self.networks else {})

    def of(self, kind: Kind) -> tuple[Host, ...]:
        """Return the hosts of one kind, by number."""
        return tuple(host for host in self.hosts if host.kind == kind)

    def host(self, name: str) -> Host:
        """Return the host with this name. Raise Refused when it does not exist."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        if name == ROUTER:
            raise Refused(
                "the router is no host of the cluster: it cannot be killed or revived",
                fix=f"choose {known}",
            )
        raise Refused(f"lab {self.lab} has no host {name}", fix=f"choose one of {ROUTER}, {known}")

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{prefix(self.lab)}{host}"

    def pod_namespace(self, namespace: str, pod: str) -> str:
        """Return the name of a pod's network namespace. The dot makes it unambiguous, because a
        Kubernetes namespace cannot contain one."""
        return f"{prefix(self.lab)}pod-{namespace}.{pod}"


class PodNetwork(NamedTuple):
    """How a pod is connected to its node: its addresses (IPv4, IPv6), the device on the node's
    side, and both MAC addresses."""

    addresses: tuple[str, str]
    device: str
    mac: str
    node_mac: str


def prefix(lab: str) -> str:
    """Return the prefix of the names of a lab's namespaces. Lab names contain no hyphen, so no
    lab's prefix is a prefix of another's."""
    return f"fl-{lab}-"


def is_name(lab: str) -> bool:
    """Return whether a lab can have this name."""
    return _NAME.fullmatch(lab) is not None


def check_name(lab: str) -> None:
    """Raise Refused for an invalid lab name. Paths that are removed and prefixes of namespaces are
    derived from it."""
    if not is_name(lab):
        raise Refused(
            f"{lab!r} is not a valid lab name",
            fix="use up to 20 lower-case letters and digits, starting with a letter",
        )


def plan_topology(
    lab: str,
    nodes: int,
    gateways: int,
    clients: int,
    *,
    far_nodes: int = 0,
    gateways_on_nodes: bool = False,
    lan_clients: int = 0,
    second_lan: bool = False,
    announce: AnnounceMethod = "none",
    chassis: int = 0,
    gateway_routers: bool = False,
) -> Topology:
    """Return the topology of a lab. `far_nodes` are numbered after the other nodes. With
    `gateways_on_nodes` there are no hosts of kind gateway. `lan_clients` is the number of hosts of
    each LAN that are outside the cluster; with `second_lan` there are two LANs, and gateways of the
    first have an interface in the second. `chassis` is the number of hypervisors of OVN, and
    `gateway_routers` tells whether each has the gateway router of a node. Raise Refused for an
    invalid name or number."""
    check_name(lab)
    hosts = [_host("control", 0, "lan")]
    counts: dict[Kind, int] = {
        "gateway": 0 if gateways_on_nodes else gateways,
        "node": nodes + far_nodes,
        "client": clients,
        "chassis": chassis,
    }
    if far_nodes < 0:
        raise Refused(f"a lab cannot have {far_nodes} far nodes", fix="choose 0 or more")
    for kind, count in counts.items():
        if not 0 <= count <= _MAX_COUNT[kind]:
            what = kind if kind == "chassis" else f"{kind}s"
            raise Refused(
                f"a lab cannot have {count} {what}", fix=f"choose 0 to {_MAX_COUNT[kind]}"
            )
        hosts += [
            _host(kind, number, _network(kind, number, nodes)) for number in range(1, count + 1)
        ]
    gateway_kind: Literal["gateway", "node"] = "node" if gateways_on_nodes else "gateway"
    if second_lan:
        hosts = [_with_second(each) if each.kind == gateway_kind else each for each in hosts]
    hosts += _lan_clients(lan_clients, ("lan", "lan2") if second_lan else ("lan",))
    return Topology(lab, tuple(hosts), gateway_kind, announce, gateway_routers)


def gateway_router_addresses(node: Host) -> tuple[str, str]:
    """Return the addresses in lan of the gateway router of a node, where the lab has one for each
    node."""
    ipv4, ipv6 = LAN
    place = _GATEWAY_ROUTER_FIRST + node.number
    return str(ipv4[place]), str(ipv6[place])


def pod_network(host: Host, index: int) -> PodNetwork:
    """Return the network of the pod with this index on a node; 0 <= index < PODS_PER_NODE."""
    ipv4, ipv6 = (IPv4Network(host.pod_cidrs[0]), IPv6Network(host.pod_cidrs[1]))
    address = str(ipv4[index + 2])
    return PodNetwork(
        (address, str(ipv6[index + 2])), f"pod{index + 2}", mac_of(address, 2), mac_of(address, 3)
    )


def mac_of(address: str, kind: int) -> str:
    """Return a locally administered MAC address that contains an IPv4 address, so that captures are
    easy to read."""
    return ":".join(f"{byte:02x}" for byte in (0x02, kind, *IPv4Address(address).packed))


def _network(kind: Kind, number: int, near_nodes: int) -> Network:
    if kind == "node" and number > near_nodes:
        return "far"
    return "wan" if kind == "client" else "lan"


def _with_second(host: Host) -> Host:
    if host.network != "lan":
        return host
    ipv4, ipv6 = LAN2
    place = _FIRST[host.kind] + host.number
    return msgspec.structs.replace(host, second=(str(ipv4[place]), str(ipv6[place])))


def _lan_clients(count: int, networks: tuple[Network, ...]) -> list[Host]:
    most = _MAX_LAN_CLIENTS // len(networks)
    if not 0 <= count <= most:
        raise Refused(f"a LAN cannot have {count} clients", fix=f"choose 0 to {most}")
    hosts: list[Host] = []
    for network in networks:
        for _ in range(count):
            number = len(hosts) + 1
            ipv4, ipv6 = (each[_LAN_CLIENT_FIRST + number] for each in NETWORKS[network])
            addresses = (str(ipv4), str(ipv6))
            hosts.append(Host(f"host{number}", "client", number, addresses, network))
    return hosts


def _host(kind: Kind, number: int, network: Network) -> Host:
    name = {
        "gateway": f"gw{number}",
        "node": f"node{number}",
        "client": f"client{number}",
        "chassis": f"chassis{number}",
        "control": CONTROL,
    }[kind]
    ipv4, ipv6 = NETWORKS[network]
    place = _FIRST[kind] + number
    pods = (
        (f"10.244.{number}.0/24", f"{IPv6Address('2001:db8:244::') + (number << 64)}/64")
        if kind == "node"
        else ()
    )
    return Host(name, kind, number, (str(ipv4[place]), str(ipv6[place])), network, pods)
