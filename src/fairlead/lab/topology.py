"""The network of a lab, as values: hosts, addresses and routes.

In: a name and the number of hosts of each kind. Out: a `Topology`; `wiring` builds it.

    client1 ... ── wan 198.51.100.0/24 ── router ── lan 192.0.2.0/24 ── gw1 ... node1 ... control
                   2001:db8:2::/64            │     2001:db8:1::/64           │ point-to-point
                                              │                  pods 10.244.<i>.0/24,
                                              │                       2001:db8:244:<i>::/64
                                              └── far 198.18.0.0/24 ── nodes that no gateway has
                                                      2001:db8:3::/64  a link to

VIPs 203.0.113.0/24 and 2001:db8:f::/64 are routed to the gateways, or to all nodes where the nodes
are the gateways. Where the gateways announce addresses on layer 2, VIPs are addresses of the lan
that no host has, and the router has no route to them but that to the lan itself. ClusterIPs
10.96.0.0/16 and 2001:db8:96::/112 are not routed: the nodes translate them.

Invariant: everything follows from the name and the counts, MAC addresses too, so a host that is
rebuilt has the same addresses. Addresses are of the documentation ranges (RFC 5737, RFC 3849), with
two exceptions. Pods and ClusterIPs need larger ranges. The far network's IPv4 addresses are of the
range for benchmarks of network devices (RFC 2544), because no documentation range is left.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Literal, NamedTuple

import msgspec

from fairlead.errors import Refused

Kind = Literal["client", "gateway", "node", "control"]
Network = Literal["lan", "wan", "far"]
Announcement = Literal["none", "l2"]
"""How the router learns where VIPs are: by static routes, or by ARP and neighbor discovery."""

LAN = (IPv4Network("192.0.2.0/24"), IPv6Network("2001:db8:1::/64"))
WAN = (IPv4Network("198.51.100.0/24"), IPv6Network("2001:db8:2::/64"))
FAR = (IPv4Network("198.18.0.0/24"), IPv6Network("2001:db8:3::/64"))
NETWORKS = {"lan": LAN, "wan": WAN, "far": FAR}
"""The router's bridges and their networks, (IPv4, IPv6)."""
VIPS = (IPv4Network("203.0.113.0/24"), IPv6Network("2001:db8:f::/64"))
PODS = (IPv4Network("10.244.0.0/16"), IPv6Network("2001:db8:244::/48"))
SERVICES = (IPv4Network("10.96.0.0/16"), IPv6Network("2001:db8:96::/112"))
ROUTER = "router"
CONTROL = "control"
API_PORT = 6443
POOL = ("203.0.113.10-203.0.113.250", "2001:db8:f::10-2001:db8:f::ffff")
LAN_POOL = ("192.0.2.224-192.0.2.250", "2001:db8:1::f00-2001:db8:1::fff")
"""The pool of a lab with announcement on layer 2."""

PODS_PER_NODE = 250

_NAME = re.compile(r"[a-z][a-z0-9]{0,19}")
_FIRST = {"control": 5, "gateway": 10, "node": 20, "client": 10}
_MAX_COUNT = {"gateway": 9, "node": 200, "client": 200}


class Host(msgspec.Struct, frozen=True):
    """A machine of the lab. `number` counts the hosts of its kind from 1. `network` is the router's
    bridge that it is connected to. Nodes have pod CIDRs, (IPv4, IPv6)."""

    name: str
    kind: Kind
    number: int
    addresses: tuple[str, str]
    network: Network
    pod_cidrs: tuple[str, ...] = ()

    @property
    def mac(self) -> str:
        """The MAC address of its eth0."""
        return mac_of(self.addresses[0], 1)

    @property
    def routers(self) -> tuple[str, str]:
        """Its default routers, (IPv4, IPv6)."""
        ipv4, ipv6 = NETWORKS[self.network]
        return str(ipv4[1]), str(ipv6[1])


class Topology(msgspec.Struct, frozen=True):
    """A lab: its name and its hosts, without the router, which each lab has. `gateway_kind` is the
    kind of the hosts that are gateways."""

    lab: str
    hosts: tuple[Host, ...]
    gateway_kind: Literal["gateway", "node"] = "gateway"
    announce: Announcement = "none"

    @property
    def gateways(self) -> tuple[Host, ...]:
        """The hosts on which a gateway runs."""
        return self.of(self.gateway_kind)

    @property
    def pool(self) -> tuple[str, ...]:
        """The ranges of the pool from which Services get addresses."""
        return LAN_POOL if self.announce == "l2" else POOL

    @property
    def networks(self) -> tuple[Network, ...]:
        """The router's bridges. The far one exists only if a host is connected to it."""
        return (
            ("lan", "wan", "far")
            if any(host.network == "far" for host in self.hosts)
            else ("lan", "wan")
        )

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
                "the router only forwards and runs no processes: it cannot be killed or revived",
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
    announce: Announcement = "none",
) -> Topology:
    """Return the topology of a lab. `far_nodes` are numbered after the other nodes. With
    `gateways_on_nodes` there are no hosts of kind gateway. Raise Refused for an invalid name or
    number."""
    check_name(lab)
    hosts = [_host("control", 0, "lan")]
    counts: dict[Kind, int] = {
        "gateway": 0 if gateways_on_nodes else gateways,
        "node": nodes + far_nodes,
        "client": clients,
    }
    if far_nodes < 0:
        raise Refused(f"a lab cannot have {far_nodes} far nodes", fix="choose 0 or more")
    for kind, count in counts.items():
        if not 0 <= count <= _MAX_COUNT[kind]:
            raise Refused(
                f"a lab cannot have {count} {kind}s", fix=f"choose 0 to {_MAX_COUNT[kind]}"
            )
        hosts += [
            _host(kind, number, _network(kind, number, nodes)) for number in range(1, count + 1)
        ]
    return Topology(lab, tuple(hosts), "node" if gateways_on_nodes else "gateway", announce)


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


def _host(kind: Kind, number: int, network: Network) -> Host:
    name = {
        "gateway": f"gw{number}",
        "node": f"node{number}",
        "client": f"client{number}",
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
