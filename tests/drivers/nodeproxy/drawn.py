"""Random Services of the test site as API objects, and the results that Kubernetes' rules require
for packets to them.

In: choices of Hypothesis. Out: `DrawnService`s with EndpointSlices, and an `Expected` for each
client and address. Pure; Fairlead's plan is not used. The rules are kube-proxy's: KEP-1669
(terminating endpoints), KEP-2086 (internal policy), KEP-1860 (ipMode), and the clients to which
policies and source ranges apply. docs/node.md defines which of several Services gets a frontend."""

from collections.abc import Iterable, Iterator
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tests.drivers.nodeproxy.conftest import NODE4, NODE6, PODS4, PODS6, REFUSED, SILENT, callers
from tests.drivers.nodeproxy.process import NODE

SLOTS = 4
"""The maximum number of Services. Each slot has its own addresses and ports."""
TARGETS = {("TCP", 80): 8080, ("TCP", 443): 8443, ("UDP", 53): 5353, ("SCTP", 53): 3868}
NUMBERS = {"TCP": 6, "UDP": 17, "SCTP": 132}
STATES = {
    "ready": {"ready": True, "serving": True, "terminating": False},
    "going": {"ready": False, "serving": True, "terminating": True},
    "gone": {"ready": False, "serving": False, "terminating": True},
    "unready": {"ready": False, "serving": False, "terminating": False},
}
RANGES = (
    (),
    (),
    ("203.0.113.0/25", "2001:db8:c::/64"),
    (" 192.168.0.0/24", "2001:db8::/64"),
    ("10.1.0.0/16 ",),
    ("192.0.2.0/24", "2001:db8:ff::/64"),
)
PLACES = ("client", "blocked", "node", "caller", "local1")
LOCAL = ("local1", "local2")


class DrawnService(NamedTuple):
    """A Service and its pods."""

    slot: int
    kind: str
    families: tuple[str, ...]
    ports: tuple[tuple[str, int], ...]
    internal: str
    external: str
    service_with_affinity: bool
    ranges: tuple[str, ...]
    external_ips: str
    """The external addresses of the Service: its own, shared with other Services, or the ClusterIPs
    of slot 0; empty for none."""
    ip_mode: str
    endpoints: tuple[tuple[str, str], ...]
    """Pods and their states."""

    @property
    def name(self) -> str:
        return f"s{self.slot}"

    def address(self, kind: str, family: str) -> str:
        if kind == "external" and self.external_ips != "own":
            six, four = "2001:db8:f::250", "198.51.100.250"
            if self.external_ips == "cluster":
                six, four = "2001:db8:30::100", "172.30.0.100"
            return four if family == "IPv4" else six
        four, six = {
            "cluster": (f"172.30.0.{100 + self.slot}", f"2001:db8:30::{100 + self.slot}"),
            "balancer": (f"198.51.100.{100 + self.slot}", f"2001:db8:f::{100 + self.slot}"),
            "external": (f"198.51.100.{200 + self.slot}", f"2001:db8:f::{200 + self.slot}"),
            "node": (NODE4, NODE6),
        }[kind]
        return four if family == "IPv4" else six

    def node_port(self, place: int) -> int:
        """Return the node port of the port at this index."""
        return 31_000 + 10 * self.slot + place

    def kinds(self) -> Iterator[str]:
        """Return the types of addresses at which a node answers for the Service."""
        yield "cluster"
        if self.external_ips:
            yield "external"
        if self.kind != "ClusterIP":
            yield "node"
        if self.kind == "LoadBalancer" and self.ip_mode == "VIP":
            yield "balancer"

    def service(self) -> dict[str, Any]:
        ports = [
            {"name": _name(*port), "protocol": port[0], "port": port[1]} for port in self.ports
        ]
        if self.kind != "ClusterIP":
            ports = [
                {**port, "nodePort": self.node_port(place)} for place, port in enumerate(ports)
            ]
        cluster_ips = [self.address("cluster", family) for family in self.families]
        spec: dict[str, Any] = {
            "type": self.kind,
            "clusterIP": cluster_ips[0],
            "clusterIPs": cluster_ips,
            "ports": ports,
        }
        spec |= {"internalTrafficPolicy": self.internal, "externalTrafficPolicy": self.external}
        if self.service_with_affinity:
            spec |= {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
            }
        if self.external_ips:
            spec["externalIPs"] = [self.address("external", family) for family in self.families]
        status: dict[str, Any] = {}
        if self.kind == "LoadBalancer":
            spec["loadBalancerSourceRanges"] = list(self.ranges)
            shown = [
                {"ip": self.address("balancer", family), "ipMode": self.ip_mode}
                for family in self.families
            ]
            status = {"loadBalancer": {"ingress": shown}}
        created = f"2026-01-{SLOTS - self.slot:02}T00:00:00Z"  # the last Service by name is the
        # oldest
        metadata = {
            "name": self.name,
            "namespace": "default",
            "uid": "u",
            "creationTimestamp": created,
        }
        return {"metadata": metadata, "spec": spec, "status": status}

    def slices(self) -> dict[str, dict[str, Any]]:
        """Return the EndpointSlices by name: one for each address family, also if the Service has
        only one."""
        ports = [
            {"name": _name(*port), "protocol": port[0], "port": TARGETS[port]}
            for port in self.ports
        ]
        made = {}
        for family, pods in (("IPv4", PODS4), ("IPv6", PODS6)):
            endpoints = [
                {
                    "addresses": [pods[pod]],
                    "conditions": STATES[state],
                    "nodeName": NODE if pod in LOCAL else "other",
                }
                for pod, state in self.endpoints
            ]
            labels = {"kubernetes.io/service-name": self.name}
            made[f"{self.name}-{family}"] = {
                "metadata": {
                    "name": f"{self.name}-{family}",
                    "namespace": "default",
                    "labels": labels,
                },
                "addressType": family,
                "ports": ports,
                "endpoints": endpoints,
            }
        return made


SERVICES = st.builds(
    DrawnService,
    slot=st.integers(0, SLOTS - 1),
    kind=st.sampled_from(("ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer")),
    families=st.sampled_from((("IPv4",), ("IPv6",), ("IPv4", "IPv6"), ("IPv6", "IPv4"))),
    ports=st.lists(st.sampled_from(sorted(TARGETS)), min_size=1, max_size=3, unique=True).map(
        tuple
    ),
    internal=st.sampled_from(("Cluster", "Cluster", "Local")),
    external=st.sampled_from(("Cluster", "Local")),
    service_with_affinity=st.sampled_from((False, False, True)),
    ranges=st.sampled_from(RANGES),
    external_ips=st.sampled_from(("", "own", "own", "shared", "cluster")),
    ip_mode=st.sampled_from(("VIP", "VIP", "VIP", "Proxy")),
    endpoints=st.dictionaries(
        st.sampled_from(("local1", "local2", "remote1")),
        st.sampled_from(("ready", "ready", "ready", *STATES)),
        max_size=3,
    ).map(lambda found: tuple(sorted(found.items()))),
)


class Call(NamedTuple):
    """Packets from a place to a port of a Service at one of its addresses. `number`: the index of
    the port."""

    drawn: DrawnService
    number: int
    kind: str
    family: str
    place: str

    @property
    def protocol(self) -> str:
        return self.drawn.ports[self.number][0]

    @property
    def target(self) -> tuple[str, int]:
        number = (
            self.drawn.node_port(self.number)
            if self.kind == "node"
            else self.drawn.ports[self.number][1]
        )
        return self.drawn.address(self.kind, self.family), number

    @property
    def frontend(self) -> str:
        address, number = self.target
        return f"{address} . {NUMBERS[self.protocol]} . {number}"


class Expected(NamedTuple):
    """The pods that may answer, each with the source address that it may see; or REFUSED or
    SILENT."""

    answers: frozenset[tuple[str, str]]
    otherwise: str


def owners(shown: Iterable[DrawnService]) -> dict[str, tuple[int, str]]:
    """Return, for each frontend (`address . protocol . port`), the slot of the Service that gets
    it, and the kind of its address."""
    ranks = [
        (call.kind != "cluster", -call.drawn.slot, call.kind, call.frontend)
        for drawn in shown
        for call in calls(drawn)
        if call.place == PLACES[0]
    ]
    return {frontend: (-slot, kind) for _, slot, kind, frontend in sorted(ranks, reverse=True)}


def calls(drawn: DrawnService) -> list[Call]:
    """Return the calls from every place to every frontend."""
    ports, kinds = range(len(drawn.ports)), tuple(drawn.kinds())
    return [
        Call(drawn, n, kind, family, place)
        for n in ports
        for kind in kinds
        for family in drawn.families
        for place in PLACES
    ]


def expected(call: Call) -> Expected:
    """Return the result that the rules require for a new flow."""
    drawn, outside = call.drawn, call.place in ("client", "blocked")
    address_of = callers(call.family)
    own, node = address_of(call.place), address_of("node")
    if call.kind == "balancer" and not _admits(drawn.ranges, own):
        return Expected(frozenset(), SILENT)
    inside_policy = (
        drawn.internal == "Local"
        if call.kind == "cluster"
        else drawn.external == "Local" and outside
    )
    everywhere = usable(drawn, (*LOCAL, "remote1"))
    pods = usable(drawn, LOCAL) if inside_policy else everywhere
    if not pods:
        return Expected(frozenset(), SILENT if everywhere else REFUSED)
    hidden = call.place == "node" or (
        outside if call.kind == "cluster" else drawn.external == "Cluster"
    )
    return Expected(
        frozenset((pod, node if hidden or pod == call.place else own) for pod in pods), ""
    )


def usable(drawn: DrawnService, among: tuple[str, ...]) -> frozenset[str]:
    """Return the ready pods, or if there are none, the serving terminating pods."""
    found = [(pod, state) for pod, state in drawn.endpoints if pod in among]
    ready = frozenset(pod for pod, state in found if state == "ready")
    return ready or frozenset(pod for pod, state in found if state == "going")


def serving(drawn: DrawnService) -> frozenset[str]:
    """Return the pods to which an existing flow may lead."""
    return frozenset(pod for pod, state in drawn.endpoints if state in ("ready", "going"))


def _admits(ranges: tuple[str, ...], address: str) -> bool:
    """Return whether the source ranges admit the address. Ranges of the other family alone restrict
    nothing."""
    own = ip_address(address)
    networks = [
        network
        for network in map(ip_network, map(str.strip, ranges))
        if network.version == own.version
    ]
    return not networks or any(own in network for network in networks)


def _name(protocol: str, number: int) -> str:
    return f"{protocol}-{number}".lower()
