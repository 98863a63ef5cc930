"""The required result of a packet to a Service, computed from Kubernetes' rules without any code of
Fairlead.

In: the API's objects as JSON (Services, Pods, Nodes), the sender, the target. Out: the pods that
may answer and the source address that each of them may see; or that no pod answers, and whether the
packet is refused or dropped; and whether observations agree. Pure. It reads Pods and not
EndpointSlices, so it also checks the endpoint controller. Rules: kube-proxy's (KEP-1669 terminating
endpoints, KEP-2086 internal policy, KEP-1860 ipMode, the tables of its own tests); a client of a
load-balancer address enters at a node with usable pods, and with policy Local its packet stays
there and keeps the client's address."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, Literal, NamedTuple

Json = Mapping[str, Any]
OUR_CLASS = "fairlead.io/direct"
EXCLUDE_LABEL = "node.kubernetes.io/exclude-from-external-load-balancers"


class Source(NamedTuple):
    """The sender. `node`: the node on which the sender is, or the sender itself if it is a node;
    empty for a client outside the cluster. `name` of a pod: NAMESPACE/NAME."""

    name: str
    kind: Literal["client", "pod", "node"]
    node: str
    addresses: tuple[str, ...]

    def address(self, like: str) -> str:
        """Return the sender's address of the same family as `like`."""
        return next(own for own in self.addresses if (":" in own) == (":" in like))


class Target(NamedTuple):
    """The target of a packet."""

    address: str
    port: int
    protocol: str


class Answer(NamedTuple):
    """The answer of a pod, with the source address that the pod saw."""

    pod: str
    seen: str


Silent = Literal["refused", "silence"]
Observed = Answer | Literal["refused", "silence", "unreachable", "broken"]
"""`unreachable`: a router's ICMP error. `broken`: a connection was established, but received no
answer."""


class Expected(NamedTuple):
    """The expected result. `answers`: any of these is correct; if empty, `otherwise` is expected.
    `one_pod`: always the same pod answers (session affinity). `must_answer` False: no answer is
    correct, too."""

    answers: frozenset[Answer]
    otherwise: Silent = "silence"
    one_pod: bool = False
    must_answer: bool = True


class Cluster(NamedTuple):
    """The objects of the API."""

    services: Sequence[Json]
    pods: Sequence[Json]
    nodes: Sequence[Json]


class ServicePacket(NamedTuple):
    """A packet and the Service port that it is for."""

    cluster: Cluster
    service: Json
    port: Json
    source: Source
    target: Target

    def usable(self, nodes: Iterable[str] | None = None) -> list[Json]:
        """Return the pods, of these nodes or of all, that may receive the packet: ready pods, or
        else serving ones (KEP-1669)."""
        among = [pod for pod in pods_of(self) if nodes is None or pod["spec"]["nodeName"] in nodes]
        publish = self.service["spec"].get("publishNotReadyAddresses", False)
        ready = [pod for pod in among if publish or (_is_ready(pod) and not _is_terminating(pod))]
        return ready or [pod for pod in among if _is_ready(pod)]


def expect(cluster: Cluster, source: Source, target: Target) -> Expected:
    """Return the expected result of a new connection (or of a datagram from a new port)."""
    for service in cluster.services:
        if _is_terminating(service):
            continue
        for port in service["spec"].get("ports", ()):
            if port.get("protocol", "TCP") == target.protocol:
                packet = ServicePacket(cluster, service, port, source, target)
                if (expected := _for_port(packet)) is not None:
                    return expected._replace(
                        one_pod=service["spec"].get("sessionAffinity") == "ClientIP"
                    )
    return Expected(frozenset(), _without_service(cluster, source, target))


def expect_kept(cluster: Cluster, source: Source, target: Target) -> Expected:
    """Return the expected result of a datagram from a port in continued use, for which the kernel
    may have a conntrack entry. A flow stays with a pod that still serves, whatever has since
    happened to policies, readiness and ranges (as in kube-proxy), so any source address is correct
    (it is empty here). If a new flow is answered, an old flow must be answered, too. If no pod
    serves, or the Service is gone, existing flows are unchanged: the former pod may answer."""
    fresh = expect(cluster, source, target)
    pods: set[str] = set()
    serving = False
    for service in cluster.services:
        for port in service["spec"].get("ports", ()):
            only = {**service, "spec": {**service["spec"], "ports": [port]}}
            if not _is_terminating(service) and target in frontends(only, cluster.nodes):
                packet = ServicePacket(cluster, service, port, source, target)
                pods |= {_name(pod) for pod in pods_of(packet)}
                serving |= bool(packet.usable())
    if not serving:
        pods = {_name(pod) for pod in cluster.pods}
    return Expected(
        frozenset(Answer(pod, "") for pod in pods), fresh.otherwise, must_answer=bool(fresh.answers)
    )


def objection(expected: Expected, observed: Sequence[Observed]) -> str:
    """Return a description of the error in these observations of one source and target; "" if there
    is none."""
    for one in observed:
        if isinstance(one, Answer):
            if one not in expected.answers:
                return f"{one.pod} answered and saw {one.seen}"
        elif expected.answers and expected.must_answer:
            return f"{one} instead of an answer"
        elif not expected.must_answer:
            continue
        # A router's ICMP error is equivalent to silence: nothing in the cluster has answered.
        elif one != expected.otherwise and (one, expected.otherwise) != ("unreachable", "silence"):
            return f"{one} instead of {expected.otherwise}"
    pods = {one.pod for one in observed if isinstance(one, Answer)}
    if expected.one_pod and len(pods) > 1:
        return f"session affinity, but {', '.join(sorted(pods))} answered"
    return ""


def pods_of(packet: ServicePacket) -> Iterator[Json]:
    """Return the pods that the Service port selects, in any state."""
    selector = packet.service["spec"].get("selector") or {}
    for pod in packet.cluster.pods:
        labels = pod["metadata"].get("labels", {})
        status = pod.get("status", {})
        if (
            not selector
            or not selector.items() <= labels.items()
            or status.get("phase") in ("Succeeded", "Failed")
        ):
            continue
        if _pod_address(pod, packet.target.address) and _has_port(pod, packet.port):
            yield pod


def frontends(service: Json, nodes: Sequence[Json]) -> Iterator[Target]:
    """Return every address, port and protocol at which a Service can be reached."""
    spec = service["spec"]
    for port in spec.get("ports", ()):
        protocol = port.get("protocol", "TCP")
        for address in (*spec.get("clusterIPs", ()), *balancer_addresses(service)):
            yield Target(address, port["port"], protocol)
        if port.get("nodePort"):
            families = spec.get("ipFamilies", ())
            for address in (address for node in nodes for address in internal_addresses(node)):
                if f"IPv{ip_address(address).version}" in families:
                    yield Target(address, port["nodePort"], protocol)


def balancer_addresses(service: Json) -> tuple[str, ...]:
    """Return the load-balancer addresses that nodes answer for themselves (ipMode VIP)."""
    ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    return tuple(
        entry["ip"] for entry in ingress if entry.get("ip") and entry.get("ipMode", "VIP") == "VIP"
    )


def is_ours(service: Json) -> bool:
    """Return whether Fairlead serves the Service in the lab's configuration, where its class is the
    default."""
    spec = service["spec"]
    return bool(
        spec.get("type") == "LoadBalancer" and spec.get("loadBalancerClass", OUR_CLASS) == OUR_CLASS
    )


def internal_addresses(node: Json) -> tuple[str, ...]:
    return tuple(
        entry["address"] for entry in node["status"]["addresses"] if entry["type"] == "InternalIP"
    )


def _for_port(packet: ServicePacket) -> Expected | None:
    """Return the expected result if the packet is for this Service port, else None."""
    spec, target = packet.service["spec"], packet.target
    if target.port == packet.port["port"]:
        if target.address in spec.get("clusterIPs", ()):
            return _cluster_ip(packet)
        if target.address in balancer_addresses(packet.service):
            return _balancer(packet)
    if target.port == packet.port.get("nodePort"):
        for node in packet.cluster.nodes:
            family = f"IPv{ip_address(target.address).version}"
            if target.address in internal_addresses(node) and family in spec.get("ipFamilies", ()):
                return _external(packet, node["metadata"]["name"])
    return None


def _cluster_ip(packet: ServicePacket) -> Expected:
    entry = packet.source.node
    if not entry:
        return Expected(frozenset())
    here = {entry} if packet.service["spec"].get("internalTrafficPolicy") == "Local" else None
    return _answers(packet, packet.usable(here), entry, masquerade=packet.source.kind != "pod")


def _balancer(packet: ServicePacket) -> Expected:
    if not _in_ranges(packet):
        return Expected(frozenset())
    if packet.source.kind != "client":
        return _external(packet, packet.source.node)
    if not is_ours(packet.service):
        return Expected(frozenset())
    answers: set[Answer] = set()
    for entry in _entries(packet):
        answers |= _external(packet, entry).answers
    return Expected(frozenset(answers), "silence" if packet.usable() else "refused")


def _entries(packet: ServicePacket) -> set[str]:
    """Return the nodes to which a load balancer may send the packet."""
    allowed = {node["metadata"]["name"] for node in packet.cluster.nodes if not _is_excluded(node)}
    chosen = {pod["spec"]["nodeName"] for pod in packet.usable(allowed)}
    if chosen or packet.service["spec"].get("externalTrafficPolicy") == "Local":
        return chosen
    return allowed if packet.usable() else set()


def _external(packet: ServicePacket, entry: str) -> Expected:
    """Return the expected result at a NodePort or load-balancer address, at the node `entry`. The
    external traffic policy applies only to clients outside the cluster and to clients on another
    node: a pod elsewhere would answer such a client directly, without the reverse translation."""
    if packet.service["spec"].get("externalTrafficPolicy") != "Local":
        return _answers(packet, packet.usable(), entry, masquerade=True)
    if packet.source.node == entry:
        return _answers(packet, packet.usable(), entry, masquerade=packet.source.kind == "node")
    return _answers(packet, packet.usable({entry}), entry, masquerade=False)


def _answers(
    packet: ServicePacket, pods: Sequence[Json], entry: str, *, masquerade: bool
) -> Expected:
    """Return the expected result if one of these pods answers. Without pods the packet is dropped
    if another node could have answered, so that the client retries, and refused if none could."""
    if not pods:
        return Expected(frozenset(), "silence" if packet.usable() else "refused")
    own = {
        address
        for node in packet.cluster.nodes
        if node["metadata"]["name"] == entry
        for address in internal_addresses(node)
        if (":" in address) == (":" in packet.target.address)
    }
    answers: set[Answer] = set()
    for pod in pods:
        name = _name(pod)
        # A pod that receives its own call would see itself as the client, and answer without the
        # reverse translation.
        hidden = masquerade or name == packet.source.name
        seen = own if hidden else {packet.source.address(packet.target.address)}
        answers |= {Answer(name, address) for address in seen}
    return Expected(frozenset(answers))


def _without_service(cluster: Cluster, source: Source, target: Target) -> Silent:
    """Return the result if no Service has this port. A node's own address and a ClusterIP refuse;
    other addresses are not routed."""
    if any(target.address in internal_addresses(node) for node in cluster.nodes):
        return "refused"
    known = {
        ip
        for service in cluster.services
        if not _is_terminating(service)
        for ip in service["spec"].get("clusterIPs", ())
    }
    return "refused" if source.node and target.address in known else "silence"


def _in_ranges(packet: ServicePacket) -> bool:
    """Return whether the source ranges admit the sender. If all ranges are of the other family, no
    client outside the cluster is admitted, because gateways deny by default; for senders inside the
    cluster, such ranges have no effect at their node, as in kube-proxy."""
    like = ip_address(packet.target.address).version
    ranges = [
        ip_network(text.strip())
        for text in packet.service["spec"].get("loadBalancerSourceRanges") or ()
    ]
    if packet.source.kind != "client":
        ranges = [network for network in ranges if network.version == like]
    address = ip_address(packet.source.address(packet.target.address))
    return not ranges or any(address in network for network in ranges)


def health_answer(cluster: Cluster, service: Json, node: str) -> tuple[int, int] | None:
    """Return the (status, number of ready pods) that a node's healthCheckNodePort must answer;
    None: the Service has none."""
    spec = service["spec"]
    if (
        spec.get("type") != "LoadBalancer"
        or not spec.get("healthCheckNodePort")
        or _is_terminating(service)
    ):
        return None
    names: set[str] = set()
    for port in spec["ports"]:
        for address in spec["clusterIPs"]:
            source = Source("", "client", "", (address,))
            packet = ServicePacket(
                cluster,
                service,
                port,
                source,
                Target(address, port["port"], port.get("protocol", "TCP")),
            )
            publish = spec.get("publishNotReadyAddresses", False)
            names |= {_name(p) for p in packet.usable({node}) if publish or not _is_terminating(p)}
    return (200 if names else 503), len(names)


def _name(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _has_port(pod: Json, port: Json) -> bool:
    wanted = port.get("targetPort", port["port"])
    ports = [
        known for container in pod["spec"]["containers"] for known in container.get("ports", ())
    ]
    protocol = port.get("protocol", "TCP")
    return isinstance(wanted, int) or any(
        (p.get("name"), p.get("protocol", "TCP")) == (wanted, protocol) for p in ports
    )


def _pod_address(pod: Json, like: str) -> str:
    addresses = [entry["ip"] for entry in pod.get("status", {}).get("podIPs", ())]
    return next((address for address in addresses if (":" in address) == (":" in like)), "")


def _is_ready(pod: Json) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True"
        for c in pod.get("status", {}).get("conditions", ())
    )


def _is_terminating(thing: Json) -> bool:
    return bool(thing["metadata"].get("deletionTimestamp"))


def _is_excluded(node: Json) -> bool:
    return EXCLUDE_LABEL in node["metadata"].get("labels", {})
