"""Services and EndpointSlices of every type, for comparing two service proxies. Pure.

In: a random source, or nothing for the cases of kube-proxy's own packet tests. Out: `Scene`s: a
Service with unique addresses and ports, its slices, and the status of its load balancer. Slices
name pods instead of addresses, because the addresses of pods differ between labs. Services have no
selector, so slices are arbitrary: ready, serving, terminating, without a node, with hints."""

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from random import Random
from typing import Any, NamedTuple

Manifest = dict[str, Any]

PODS = {"a1": "node1", "a2": "node1", "b1": "node2", "c1": "node3"}
"""The endpoints and their nodes."""
CALLERS = {"caller1": "node1", "caller3": "node3"}
NODES = ("node1", "node2", "node3")
ZONES = ("east", "west")
ZONE_LABEL = "topology.kubernetes.io/zone"
NUMBERS = {"TCP": (8080, 9090), "UDP": (5353, 5354), "SCTP": (3868, 2905)}
"""The ports of every pod."""
PORTS = (
    ("web", 80, "TCP"),
    ("dns", 53, "UDP"),
    ("dns-tcp", 53, "TCP"),
    ("dns-sctp", 53, "SCTP"),
    ("admin", 8081, "TCP"),
    ("diameter", 3868, "SCTP"),
)
"""Ports of random Services: name, port and protocol."""

READY, SERVING, NOT_READY = (
    {"ready": True, "serving": True, "terminating": False},
    {"ready": False, "serving": True, "terminating": True},
    {"ready": False, "serving": False, "terminating": False},
)
STATES: tuple[Manifest, ...] = (
    *(READY,) * 5,
    *(SERVING,) * 2,
    NOT_READY,
    {"ready": False, "serving": False, "terminating": True},
    {"ready": False, "terminating": True},
    {},
)
INSIDE, OUTSIDE = ("198.51.100.11/32", "2001:db8:2::b/128"), ("203.0.113.0/25", "2001:db8:77::/64")
"""Source ranges that contain client1, and source ranges that contain no host of the lab."""
RANGES: tuple[tuple[str, ...], ...] = (
    (),
    (),
    (),
    INSIDE,
    OUTSIDE,
    (*INSIDE, " 10.244.0.0/16"),
    ("192.0.2.0/24", "2001:db8:1::/64"),
)
PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"


class Scene(NamedTuple):
    """A Service, its slices, and the ingress entries in its status."""

    service: Manifest
    slices: tuple[Manifest, ...]
    ingress: tuple[Manifest, ...] = ()

    @property
    def name(self) -> str:
        return str(self.service["metadata"]["name"])

    @property
    def endpoints(self) -> set[str]:
        """The pods in any of its slices."""
        return {endpoint["pod"] for each in self.slices for endpoint in each["endpoints"]}

    def frontends(
        self, node_addresses: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[str, int, str]]:
        """Return address, port and protocol of every frontend of the Service."""
        spec = self.service["spec"]
        shown = [entry["ip"] for entry in self.ingress]
        for port in spec["ports"]:
            for address in (*spec["clusterIPs"], *spec.get("externalIPs", ()), *shown):
                yield address, port["port"], port["protocol"]
            if "nodePort" in port:
                for node in ("node1", "node2"):
                    for address in node_addresses[node]:
                        yield address, port["nodePort"], port["protocol"]

    def unserved_frontends(
        self, node_addresses: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[str, int, str]]:
        """Return the Service's addresses with ports and protocols that it does not have."""
        frontends = set(self.frontends(node_addresses))
        for address, number, protocol in sorted(frontends):
            for stray in (
                (address, number, "UDP" if protocol == "TCP" else "TCP"),
                (address, number + 1000, protocol),
            ):
                if stray not in frontends:
                    yield stray


class ServiceFactory:
    """Creates Services with unique addresses and ports."""

    def __init__(self) -> None:
        self._number = 0

    def service(
        self,
        name: str,
        kind: str = "ClusterIP",
        *,
        ports: list[Manifest] | None = None,
        **fields: Any,
    ) -> Manifest:
        """Return a Service with these fields, and with unique addresses and ports."""
        self._number += 1
        number, families = self._number, fields.setdefault("ipFamilies", ["IPv4", "IPv6"])
        fields["ipFamilyPolicy"] = "RequireDualStack" if len(families) == 2 else "SingleStack"
        fields["clusterIPs"] = [
            _address(family, "10.96.1.0", "2001:db8:96::1000", number) for family in families
        ]
        fields["clusterIP"] = fields["clusterIPs"][0]
        wanted = [dict(each) for each in ports or [{"name": "web", "port": 80, "protocol": "TCP"}]]
        if kind != "ClusterIP" and fields.get("allocateLoadBalancerNodePorts", True):
            for place, port in enumerate(wanted):
                port["nodePort"] = 30_000 + 4 * number + place
        if kind == "LoadBalancer" and fields.get("externalTrafficPolicy") == "Local":
            fields["healthCheckNodePort"] = 30_000 + 4 * number + 3
        if external := fields.pop("external", 0):
            fields["externalIPs"] = [
                _address(family, "203.0.113.0", "2001:db8:f::1:0", external) for family in families
            ]
        labels = fields.pop("labels", {})
        metadata = {"name": name, "namespace": "default", "labels": labels}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"type": kind, "ports": wanted, **fields},
        }

    def ingress(self, service: Manifest, number: int, mode: str = "VIP") -> tuple[Manifest, ...]:
        """Return the ingress entries with the load-balancer addresses of a Service, one for each
        family."""
        families = service["spec"]["ipFamilies"]
        addresses = [
            _address(family, "203.0.113.0", "2001:db8:f::1:0", number) for family in families
        ]
        return tuple({"ip": address, "ipMode": mode} for address in addresses)


def _address(family: str, four: str, six: str, number: int) -> str:
    return str(IPv4Address(four) + number if family == "IPv4" else IPv6Address(six) + number)


def slices_of(
    service: Manifest,
    endpoints: list[Manifest],
    targets: Mapping[str, int] | None = None,
    suffix: str = "",
    headless: bool = False,
) -> tuple[Manifest, ...]:
    """Return a slice for each family. `targets`: the targets of its ports, by name; by default the
    first number of the protocol. `headless`: whether the slices have the label of headless
    Services."""
    name, made = service["metadata"]["name"], []
    for family in service["spec"]["ipFamilies"]:
        ports = [
            {
                "name": port["name"],
                "protocol": port["protocol"],
                "port": (targets or {}).get(port["name"], NUMBERS[port["protocol"]][0]),
            }
            for port in service["spec"]["ports"]
            if targets is None or port["name"] in targets
        ]
        labels = {
            "kubernetes.io/service-name": name,
            "endpointslice.kubernetes.io/managed-by": "tests.fairlead.io",
        }
        labels |= {HEADLESS_LABEL: ""} if headless else {}
        made.append(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": f"{name}-{family.lower()}{suffix}",
                    "namespace": "default",
                    "labels": labels,
                },
                "addressType": family,
                "ports": ports,
                "endpoints": endpoints,
            }
        )
    return tuple(made)


def endpoint(pod: str, state: Manifest = READY, **fields: Any) -> Manifest:
    """Return an endpoint of a slice, with the pod's name in place of its addresses."""
    return {"pod": pod, "nodeName": PODS[pod], "conditions": state, **fields}


def rows(maker: ServiceFactory) -> list[Scene]:
    """Return the cases of kube-proxy's packet tests (TestNoEndpointsReject and the tests after
    it)."""
    made: list[Scene] = []

    def add(
        name: str, pods: list[Manifest], kind: str = "LoadBalancer", number: int = 0, **fields: Any
    ) -> None:
        service = maker.service(name, kind, **fields)
        made.append(
            Scene(
                service, slices_of(service, pods), maker.ingress(service, number) if number else ()
            )
        )

    here, elsewhere = endpoint("a1"), endpoint("c1")
    add("no-endpoints", [], number=100, external=101)
    add("one-endpoint", [here], "ClusterIP")
    many = [
        {"name": "web", "port": 80, "protocol": "TCP"},
        {"name": "tls", "port": 443, "protocol": "TCP"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        {"name": "dns-sctp", "port": 53, "protocol": "SCTP"},
    ]
    add("many-ports", [here, elsewhere], "ClusterIP", ports=many)
    add(
        "ranges",
        [here],
        number=102,
        loadBalancerSourceRanges=["192.0.2.0/24", " 198.51.100.11/32", "2001:db8:2::b/128"],
    )
    add("node-port", [here, elsewhere], "NodePort")
    add("local", [here, elsewhere], number=103, external=104, externalTrafficPolicy="Local")
    add("cluster", [here, elsewhere], number=105, external=106, externalTrafficPolicy="Cluster")
    add("local-none-here", [elsewhere], number=107, external=108, externalTrafficPolicy="Local")
    add("inside-local", [here, elsewhere], number=109, internalTrafficPolicy="Local")
    add(
        "inside-local-two",
        [here, endpoint("a2"), endpoint("b1")],
        "ClusterIP",
        internalTrafficPolicy="Local",
    )
    add(
        "inside-local-none", [endpoint("b1"), elsewhere], "ClusterIP", internalTrafficPolicy="Local"
    )
    add(
        "terminating",
        [endpoint("a1", SERVING), elsewhere],
        number=110,
        externalTrafficPolicy="Local",
    )
    add(
        "all-terminating",
        [endpoint("a1", SERVING), endpoint("c1", SERVING)],
        number=111,
        externalTrafficPolicy="Local",
    )
    unsaid = [endpoint(pod, {"ready": False, "terminating": True}) for pod in ("a1", "c1")]
    add("all-terminating-serving-unsaid", unsaid, number=122, externalTrafficPolicy="Local")
    add("another-proxy", [here], number=112, labels={PROXY_NAME_LABEL: "other"})
    add(
        "labelled-headless",
        [here, elsewhere],
        number=123,
        labels={HEADLESS_LABEL: ""},
        externalTrafficPolicy="Local",
    )
    unseen = maker.service("slices-labelled-headless", "LoadBalancer")
    made.append(
        Scene(
            unseen, slices_of(unseen, [here, elsewhere], headless=True), maker.ingress(unseen, 124)
        )
    )
    partly = maker.service(
        "one-slice-labelled-headless", "LoadBalancer", externalTrafficPolicy="Local"
    )
    slices = (
        *slices_of(partly, [elsewhere]),
        *slices_of(partly, [here], suffix="-dns", headless=True),
    )
    made.append(Scene(partly, slices, maker.ingress(partly, 125)))
    diameter = [{"name": "diameter", "port": 3868, "protocol": "SCTP"}]
    add(
        "sctp",
        [here, elsewhere],
        number=117,
        external=118,
        externalTrafficPolicy="Cluster",
        ports=diameter,
    )
    add(
        "sctp-local",
        [here, elsewhere],
        number=119,
        external=120,
        externalTrafficPolicy="Local",
        ports=diameter,
    )
    add("sctp-no-endpoints", [], number=121, ports=diameter)
    add("affine", [here, elsewhere], number=113, sessionAffinity="ClientIP")
    made[1] = made[1]._replace(ingress=())
    proxied = maker.service("proxied", "LoadBalancer")
    made.append(
        Scene(proxied, slices_of(proxied, [here, elsewhere]), maker.ingress(proxied, 114, "Proxy"))
    )
    zoned = [
        endpoint(pod, hints={"forZones": [{"name": zone}]})
        for pod, zone in (("a1", "east"), ("b1", "west"), ("c1", "west"))
    ]
    add("zones", zoned, number=115)
    add("zones-local", zoned, number=116, externalTrafficPolicy="Local")
    add("zones-of-some", [*zoned[:2], endpoint("c1")], "ClusterIP")
    add("zones-of-others", zoned[1:], "ClusterIP")
    noded = [
        endpoint(pod, hints={"forNodes": [{"name": PODS[pod]}], "forZones": [{"name": "west"}]})
        for pod in ("a1", "a2", "c1")
    ]
    add("same-node", noded, "ClusterIP", trafficDistribution="PreferSameNode")
    return made


class RandomServices:
    """Random Services."""

    def __init__(self, random: Random, maker: ServiceFactory) -> None:
        self._random, self._maker = random, maker

    def scene(self, name: str, number: int) -> Scene:
        """Return a random scene. `number`: the number of its load-balancer address within the
        batch."""
        draw = self._random
        kind = draw.choice(
            ("ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer", "LoadBalancer")
        )
        fields: Manifest = {
            "ipFamilies": draw.choice((["IPv4"], ["IPv6"], ["IPv4", "IPv6"], ["IPv6", "IPv4"]))
        }
        if kind != "ClusterIP":
            fields["externalTrafficPolicy"] = draw.choice(("Local", "Cluster"))
        if kind == "LoadBalancer":
            fields["loadBalancerSourceRanges"] = list(draw.choice(RANGES))
            fields["allocateLoadBalancerNodePorts"] = draw.random() < 0.8
        if draw.random() < 0.3:
            fields["external"] = number + 120
            fields.setdefault("externalTrafficPolicy", "Cluster")
        fields["internalTrafficPolicy"] = draw.choice(("Cluster", "Cluster", "Local"))
        if draw.random() < 0.15:
            fields["sessionAffinity"] = "ClientIP"
        if draw.random() < 0.05:
            fields["labels"] = {PROXY_NAME_LABEL: "other"}
        elif draw.random() < 0.05:
            fields["labels"] = {HEADLESS_LABEL: ""}
        kinds = draw.sample(PORTS, draw.choice((1, 1, 2, 3)))
        ports = [{"name": port, "port": at, "protocol": protocol} for port, at, protocol in kinds]
        service = self._maker.service(name, kind, ports=ports, **fields)
        mode = "Proxy" if draw.random() < 0.2 else "VIP"
        shown = (
            self._maker.ingress(service, number, mode)
            if kind == "LoadBalancer" and draw.random() < 0.9
            else ()
        )
        return Scene(service, self._slices(service), shown)

    def changed(self, scene: Scene) -> Scene:
        """Return the same Service with other policies and other slices."""
        spec = dict(scene.service["spec"])
        if (
            "externalTrafficPolicy" in spec
            and "healthCheckNodePort" not in spec
            and spec["type"] == "NodePort"
        ):
            spec["externalTrafficPolicy"] = self._random.choice(("Local", "Cluster"))
        if spec["type"] == "LoadBalancer":
            spec["loadBalancerSourceRanges"] = list(self._random.choice(RANGES))
        spec["internalTrafficPolicy"] = self._random.choice(("Cluster", "Local"))
        mode = self._random.choice(("VIP", "Proxy"))
        service = {**scene.service, "spec": spec}
        return Scene(
            service,
            self._slices(service),
            tuple({**entry, "ipMode": mode} for entry in scene.ingress),
        )

    def zones(self) -> dict[str, str]:
        """Return a zone for each node."""
        return {node: self._random.choice(ZONES) for node in NODES}

    def _slices(self, service: Manifest) -> tuple[Manifest, ...]:
        """Return one or two slices of a family. No endpoint is in both, because kube-proxy would
        then use the conditions of either."""
        draw = self._random
        hinted = draw.choice((0.0, 0.0, 1.0, 0.7))
        pods = draw.sample(sorted(PODS), draw.choice((0, 1, 2, 2, 3, 4)))
        first = draw.randint(0, len(pods))
        made: list[Manifest] = []
        for suffix, some in (("", pods[:first]), ("-more", pods[first:])):
            ports = [port for port in service["spec"]["ports"] if draw.random() < 0.95]
            targets = {port["name"]: draw.choice(NUMBERS[port["protocol"]]) for port in ports}
            headless = draw.random() < 0.1
            made += slices_of(
                service, [self._endpoint(pod, hinted) for pod in some], targets, suffix, headless
            )
        return tuple(made)

    def _endpoint(self, pod: str, hinted: float) -> Manifest:
        draw = self._random
        made = endpoint(pod, dict(draw.choice(STATES)))
        if draw.random() < hinted:
            hints: Manifest = {
                "forZones": [{"name": zone} for zone in draw.sample(ZONES, draw.choice((1, 1, 2)))]
            }
            if draw.random() < 0.4:
                hints["forNodes"] = [{"name": draw.choice(NODES)}]
            made["hints"] = hints
        if draw.random() < 0.08:
            del made["nodeName"]
        return made
