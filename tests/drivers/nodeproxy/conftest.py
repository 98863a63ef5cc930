"""A small cluster of namespaces for the service proxy: real packets, real pods, both families.

    client ── router ─┬─ node (under test) ── pods local1, local2, caller
                      └─ other             ── pod remote1

Pods are on point-to-point links."""

import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests import sctp

from fairlead.drivers.nodeproxy import NodeProxyDriver
from fairlead.lab import echo, namespace
from fairlead.model import Backend, NodeService, NodeServicePort, ServiceKey

Where = str
"""A place from which connections begin: client, blocked (the client's second address), node, caller
(a pod that serves nothing), local1, local2, remote1."""

PODS4 = {"local1": "10.1.0.1", "local2": "10.1.0.2", "caller": "10.1.0.9", "remote1": "10.2.0.1"}
PODS6 = {
    "local1": "2001:db8:1::1",
    "local2": "2001:db8:1::2",
    "caller": "2001:db8:1::9",
    "remote1": "2001:db8:2::1",
}
NODE4, NODE6 = "192.168.0.2", "2001:db8::2"
GATEWAYS = {"IPv4": ("10.1.0.254", "192.168.77.1"), "IPv6": ("2001:db8:1::fe", "2001:db8:77::1")}
"""Addresses of the node on the caller's link, as on a bridge: one inside of the pod CIDRs, and one
outside of them."""
CLIENT4, BLOCKED4 = "203.0.113.2", "203.0.113.130"
CLIENT6, BLOCKED6 = "2001:db8:c::2", "2001:db8:c:1::2"
CLUSTER4, CLUSTER6 = "172.30.0.41", "2001:db8:30::41"
VIP4, VIP6 = "198.51.100.10", "2001:db8:f::10"
EXTERNAL4, EXTERNAL6 = "198.51.100.20", "2001:db8:f::20"
POD_CIDRS = ("10.0.0.0/8", "2001:db8:1::/64", "2001:db8:2::/64")
SERVICE_CIDRS = ("172.30.0.0/16", "2001:db8:30::/64")
NODE_PORT = 30001
REFUSED, SILENT = "refused", "silent"
_MAC = "02:00:00:00:00:01"
_sctp_ports = itertools.count(20_000)


class Seen(NamedTuple):
    """The pod that answered, and the source address that it saw."""

    pod: str
    peer: str


class Site:
    """The namespaces, and connections from any place in them."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.servers: list[subprocess.Popen[bytes]] = []
        self.made: list[str] = []

    def name(self, place: str) -> str:
        return f"{self.prefix}-{'client' if place == 'blocked' else place}"

    def add(self, *places: str) -> None:
        for place in places:
            namespace.create(self.name(place))
            self.made.append(self.name(place))
            self.ip(place, "link set lo up")

    def ip(self, place: str, *commands: str) -> None:
        text = "\n".join(commands) + "\n"
        subprocess.run(
            ["ip", "-n", self.name(place), "-force", "-batch", "-"], input=text.encode(), check=True
        )

    def link(self, place: str, device: str, peer: str, peer_device: str) -> None:
        self.ip(
            place,
            f"link add {device} type veth peer name {peer_device} netns {self.name(peer)}",
            f"link set {device} up",
        )
        self.ip(peer, f"link set {peer_device} up")

    def add_pod(self, node: str, pod: str) -> None:
        """Add a pod on its own link, as in networks without a bridge: with host routes and one
        permanent neighbour."""
        self.link(node, f"v{pod}", pod, "eth0")
        self.ip(node, f"link set v{pod} address {_MAC}")
        four, six = PODS4[pod], PODS6[pod]
        self.ip(
            pod,
            f"address add {four}/32 dev eth0",
            f"address add {six}/128 dev eth0 nodad",
            f"neigh replace 169.254.1.1 lladdr {_MAC} dev eth0",
            "route add 169.254.1.1 dev eth0",
            f"route add default via 169.254.1.1 dev eth0 src {four}",
            f"neigh replace fe80::1 lladdr {_MAC} dev eth0",
            "route add ::/0 via fe80::1 dev eth0",
        )
        mac = subprocess.run(
            ["ip", "-n", self.name(pod), "-br", "link", "show", "eth0"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[2]
        self.ip(node, f"route add {four} dev v{pod}", f"route add {six} dev v{pod}")
        self.ip(
            node,
            f"neigh replace {four} lladdr {mac} dev v{pod}",
            f"neigh replace {six} lladdr {mac} dev v{pod}",
        )

    def serve(self, place: str, addresses: tuple[str, str]) -> None:
        read, write = os.pipe()
        command = [
            sys.executable,
            "-I",
            "-S",
            str(Path(echo.__file__)),
            "--pod",
            place,
            "--node",
            place,
        ]
        command += ["--tcp", "8080", "--tcp", "8443", "--udp", "5353", "--ready-fd", str(write)]
        command += [word for address in addresses for word in ("--address", address)]
        name = self.name(place)
        self.servers.append(
            subprocess.Popen(["ip", "netns", "exec", name, *command], pass_fds=[write])
        )
        os.close(write)
        assert os.read(read, 1), f"the server in {place} did not start"
        os.close(read)

    @contextmanager
    def listening(self, place: str, address: str, number: int) -> Iterator[None]:
        """Run a server that answers with the name of this place."""

        def serve(listener: socket.socket) -> None:
            with listener, listener.accept()[0] as connection:
                peer = connection.getpeername()[0]
                connection.recv(100)
                connection.send(msgspec.json.encode({"pod": place, "peer": peer}))

        listener = namespace.make_socket(
            self.name(place), socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        listener.settimeout(30)
        listener.bind((address, number))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield
        thread.join()

    def sctp_socket(self, place: str, family: int) -> socket.socket:
        return namespace.make_socket(self.name(place), family, socket.SOCK_RAW, sctp.PROTOCOL)

    def call(
        self,
        place: Where,
        address: str,
        port: int,
        *,
        protocol: str = "TCP",
        source: str = "",
        timeout_s: float = 10.0,
    ) -> Seen | str:
        """Send one request from this place. Return the answer, or REFUSED or SILENT."""
        six = ":" in address
        if place in ("client", "blocked"):  # one namespace with two addresses
            source = callers("IPv6" if six else "IPv4")(place)
        if protocol == "SCTP":
            with self.sctp_socket(place, socket.AF_INET6 if six else socket.AF_INET) as caller:
                return request_by_sctp(caller, address, port, source=source, timeout_s=timeout_s)
        kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
        with namespace.make_socket(
            self.name(place), socket.AF_INET6 if six else socket.AF_INET, kind
        ) as caller:
            return request(caller, address, port, source=source, timeout_s=timeout_s)

    def remove(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()
        for name in reversed(self.made):
            namespace.delete(name)


def request(
    caller: socket.socket, address: str, port: int, *, source: str = "", timeout_s: float = 10.0
) -> Seen | str:
    """Send one line or datagram, and return the answer."""
    caller.settimeout(timeout_s)
    if source:
        caller.bind((source, 0))
    try:
        caller.connect((address, port))
        caller.send(b"hello\n")
        answer = msgspec.json.decode(caller.recv(65536))
    except ConnectionRefusedError:
        return REFUSED
    except PermissionError:
        # A datagram of the node itself was dropped or refused at the hook output. Only a refusal
        # also sets an error on the socket.
        told = caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return REFUSED if told == errno.ECONNREFUSED else SILENT
    except TimeoutError:
        return SILENT
    return Seen(answer["pod"], answer["peer"])


def request_by_sctp(
    caller: socket.socket,
    address: str,
    port: int,
    *,
    source: str = "",
    source_port: int = 0,
    timeout_s: float = 10.0,
) -> Seen | str:
    """Send an INIT, from a new port unless one is given, and return who answers."""
    if source:
        caller.bind((source, 0))
    try:
        told = sctp.send_init(
            caller, address, port, source_port=source_port or next(_sctp_ports), timeout_s=timeout_s
        )
    except ConnectionRefusedError:
        return REFUSED
    except PermissionError:
        return (
            REFUSED
            if caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
            else SILENT
        )
    return Seen(*told) if told else SILENT


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Set up the whole site, without the proxy."""
    made = Site(f"flt-{os.getpid()}-nodeproxy")
    try:
        _build(made)
        families = (socket.AF_INET, socket.AF_INET6)
        pods = [pod for pod in PODS4 if pod != "caller"]
        with sctp.InitResponder(
            {
                f"{pod} {family}": made.sctp_socket(pod, family)
                for pod in pods
                for family in families
            }
        ):
            yield made
    finally:
        made.remove()


def _build(site: Site) -> None:
    site.add("client", "router", "node", "other", "local1", "local2", "caller", "remote1")
    forward = {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1}
    # The kernel limits the rate of refusals to one client. Tests must not depend on the time of the
    # last refusal.
    unlimited = {
        "net/ipv4/icmp_ratelimit": 0,
        "net/ipv4/icmp_msgs_per_sec": 100_000,
        "net/ipv6/icmp/ratelimit": 0,
    }
    for place in ("router", "node", "other"):
        namespace.set_sysctls(site.name(place), forward | unlimited)
    for place in site.made:
        namespace.set_sysctls(
            place, {"net/ipv6/conf/all/accept_dad": 0, "net/ipv6/conf/default/accept_dad": 0}
        )
    site.link("client", "eth0", "router", "client")
    site.ip("router", "link add lan type bridge", "link set lan up")
    for node in ("node", "other"):
        site.link(node, "eth0", "router", node)
        site.ip("router", f"link set {node} master lan")
    site.ip(
        "client",
        *[f"address add {a} dev eth0 nodad" for a in (f"{CLIENT6}/64", f"{BLOCKED6}/64")],
        *[f"address add {a} dev eth0" for a in (f"{CLIENT4}/24", f"{BLOCKED4}/24")],
        "route add default via 203.0.113.1",
        "route add ::/0 via 2001:db8:c::1",
    )
    site.ip(
        "router",
        "address add 203.0.113.1/24 dev client",
        "address add 2001:db8:c::1/64 dev client nodad",
        "address add 2001:db8:c:1::1/64 dev client nodad",
        "address add 192.168.0.1/24 dev lan",
        "address add 2001:db8::1/64 dev lan nodad",
        *[
            f"route add {net} via {NODE4}"
            for net in ("198.51.100.0/24", "172.30.0.0/16", "10.1.0.0/16")
        ],
        *[
            f"route add {net} via {NODE6}"
            for net in ("2001:db8:f::/64", "2001:db8:30::/64", "2001:db8:1::/64")
        ],
        "route add 10.2.0.0/16 via 192.168.0.3",
        "route add 2001:db8:2::/64 via 2001:db8::3",
    )
    for node, number, theirs in (("node", 2, 3), ("other", 3, 2)):
        site.ip(
            node,
            f"address add 192.168.0.{number}/24 dev eth0",
            f"address add 2001:db8::{number}/64 dev eth0 nodad",
            "route add default via 192.168.0.1",
            "route add ::/0 via 2001:db8::1",
            f"route add 10.{theirs - 1}.0.0/16 via 192.168.0.{theirs}",
            f"route add 2001:db8:{theirs - 1}::/64 via 2001:db8::{theirs}",
        )
    site.ip("node", "address add 192.168.1.2/32 dev eth0")
    for node, pod in (
        ("node", "local1"),
        ("node", "local2"),
        ("node", "caller"),
        ("other", "remote1"),
    ):
        site.add_pod(node, pod)
    site.ip("node", *[f"address add {four}/32 dev vcaller" for four in GATEWAYS["IPv4"]])
    site.ip(
        "node",
        *[f"address add {six}/128 dev vcaller nodad preferred_lft 0" for six in GATEWAYS["IPv6"]],
    )
    for pod in ("local1", "local2", "remote1"):
        site.serve(pod, (PODS4[pod], PODS6[pod]))


@pytest.fixture
def at_node(site: Site) -> Iterator[None]:
    """Run this process in the node's namespace, like the role node."""
    with namespace.inside(site.name("node")):
        yield


@pytest.fixture
async def driver(at_node: None) -> AsyncIterator[NodeProxyDriver]:
    made = NodeProxyDriver(
        node_addresses=lambda: (NODE4, NODE6), pod_cidrs=POD_CIDRS, service_cidrs=SERVICE_CIDRS
    )
    await made.open()
    yield made
    await made.close(remove=True)


def backends(*pods: str, family: str = "IPv4", port: int = 8080) -> tuple[Backend, ...]:
    addresses: Mapping[str, str] = PODS4 if family == "IPv4" else PODS6
    return tuple(sorted(Backend(addresses[pod], port, pod.startswith("local")) for pod in pods))


def port(
    everywhere: tuple[Backend, ...],
    *,
    number: int = 80,
    family: str = "IPv4",
    protocol: str = "TCP",
    node_port: int = NODE_PORT,
    balancers: tuple[str, ...] | None = None,
    cluster_ip: str = "",
    serving: tuple[Backend, ...] = (),
) -> NodeServicePort:
    """Return a port with a ClusterIP, a NodePort, a load-balancer address and an external address.
    Local endpoints are the endpoints on the node."""
    four = family == "IPv4"
    return NodeServicePort(
        family="IPv4" if four else "IPv6",
        protocol="UDP" if protocol == "UDP" else "SCTP" if protocol == "SCTP" else "TCP",
        port=number,
        name="web",
        cluster_ips=(cluster_ip or (CLUSTER4 if four else CLUSTER6),),
        load_balancer_ips=balancers if balancers is not None else ((VIP4,) if four else (VIP6,)),
        external_ips=((EXTERNAL4,) if four else (EXTERNAL6,)),
        node_port=node_port,
        cluster_backends=everywhere,
        local_backends=tuple(backend for backend in everywhere if backend.local),
        serving_backends=tuple(sorted({*everywhere, *serving})) if protocol != "TCP" else (),
    )


def service(
    *ports: NodeServicePort,
    internal: str = "Cluster",
    external: str = "Cluster",
    name: str = "web",
    affinity_timeout_s: int = 0,
    source_ranges: tuple[str, ...] = (),
) -> NodeService:
    return NodeService(
        service=ServiceKey("default", name),
        uid=f"uid-{name}",
        internal_policy="Local" if internal == "Local" else "Cluster",
        external_policy="Local" if external == "Local" else "Cluster",
        ports=tuple(sorted(ports)),
        affinity_timeout_s=affinity_timeout_s,
        source_ranges=source_ranges,
    )


async def install(driver: NodeProxyDriver, *services: NodeService) -> None:
    """Make the node serve exactly these Services."""
    desired = driver.render({each.service: each for each in services})
    await driver.apply(driver.diff(desired, await driver.read(None)))


def callers(family: str = "IPv4") -> Callable[[str], str]:
    """Return a function from a place to the source address of its connections."""
    four = family == "IPv4"
    known = (PODS4 if four else PODS6) | {
        "client": CLIENT4 if four else CLIENT6,
        "blocked": BLOCKED4 if four else BLOCKED6,
        "node": NODE4 if four else NODE6,
    }
    return known.__getitem__
