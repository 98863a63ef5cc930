"""The map elements of each Service, and the Services in a listing of the maps.

In: a NodeService and the node's addresses; or the listing of the maps. Out: a Spec, which is the
set of map elements of one Service; the Changes between two Specs. Pure. Invariant: `parsed` returns
exactly what `elements_of` made, so that the next process adopts the kernel's state without a
change.

The frontend in an element's key determines the owner of the element: the frontend's element in
`services4/6`, and a ClusterIP's element in `cluster_ips4/6`, have the Service's name as a comment.
The rules are kube-proxy's (KEP-1669, KEP-2086, KEP-3866): the external policy applies to packets
from outside only; pods and the node itself reach every endpoint, as if they had connected through
the load balancer; source ranges apply to load-balancer addresses only, for every client."""

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Literal, NamedTuple

from fairlead.drivers.nodeproxy.skeleton import PROTOCOL_NUMBERS, TABLE, endpoint_map, of_family
from fairlead.model import Backend, NodeService, NodeServicePort, ServiceKey, Value
from fairlead.net.address import is_ipv6
from fairlead.net.nftables import Record

NO_SERVICE = ServiceKey("", TABLE)
"""The key of elements in our table that belong to no Service. They are never planned, so a diff
deletes them."""


class Element(NamedTuple):
    """One element of a map (with a `value`) or of a set (without), in nft's syntax. `map` is the
    name of the map or set."""

    map: str
    key: str
    value: str = ""
    comment: str = ""

    def __str__(self) -> str:
        comment = f' comment "{self.comment}"' if self.comment else ""
        return f"{self.key}{comment} : {self.value}" if self.value else f"{self.key}{comment}"


Spec = frozenset[Element]


class Change(Value, frozen=True):
    """Elements of one map to add or delete for one Service."""

    service: ServiceKey
    verb: Literal["delete", "add"]
    map: str
    elements: tuple[Element, ...]

    def __str__(self) -> str:
        return command(self.verb, self.map, self.elements)


class _Frontend(NamedTuple):
    kind: Literal["cluster", "balancer", "external", "node"]
    address: str
    key: str


def elements_of(
    intent: NodeService,
    node_addresses: Sequence[str],
    node_port_addresses: Sequence[str] | None = None,
    affinity_map: int = 0,
) -> Spec:
    """Return the elements of one Service on a node with these addresses. NodePorts answer at
    `node_port_addresses` only; None stands for `node_addresses`. `affinity_map`: the number of the
    maps with the Service's clients, if it has session affinity."""
    answering = node_addresses if node_port_addresses is None else node_port_addresses
    ranges = {number: _admitted(intent, number, node_addresses) for number in "46"}
    elements: set[Element] = set()
    seen: set[str] = set()
    for port in intent.ports:
        number = "4" if port.family == "IPv4" else "6"
        for frontend in _frontends(port, number, answering):
            if frontend.key not in seen:
                seen.add(frontend.key)
                elements.update(_frontend_elements(intent, port, number, frontend, affinity_map))
                if frontend.kind == "balancer" and ranges[number]:
                    elements.add(Element(f"restricted{number}", frontend.key))
                    elements.update(
                        Element(f"allowed{number}", f"{frontend.key} . {cidr}")
                        for cidr in ranges[number]
                    )
    return frozenset(elements)


def difference(
    desired: Mapping[ServiceKey, Spec], actual: Mapping[ServiceKey, Spec]
) -> tuple[Change, ...]:
    """Return the Changes from `actual` to `desired`. For each Service, deletions come before
    additions."""
    nothing: Spec = frozenset()
    changes: list[Change] = []
    for key in sorted(desired.keys() | actual.keys()):
        old, new = actual.get(key, nothing), desired.get(key, nothing)
        if old != new:
            changes += _changes(key, "delete", old - new)
            changes += _changes(key, "add", new - old)
    return tuple(changes)


def command(verb: str, name: str, elements: Iterable[Element]) -> str:
    """Return the nft command that adds or deletes these elements of one map. A deletion needs the
    key only."""
    words = ", ".join(
        map(str, elements) if verb == "add" else (element.key for element in elements)
    )
    return f"{verb} element {TABLE} {name} {{ {words} }}"


def parsed(records: Iterable[Record]) -> dict[ServiceKey, Spec]:
    """Return the Specs in a listing of the maps, by owner. Raise KeyError or TypeError if the
    listing is not one of our table."""
    return by_owner([element for record in records for element in _listed(record)])


def by_owner(elements: Sequence[Element]) -> dict[ServiceKey, Spec]:
    """Group elements by their owners."""
    owners = {element.key: element.comment for element in elements if element.comment}
    found: dict[ServiceKey, set[Element]] = {}
    for element in elements:
        owner = owners.get(frontend_of(element.key))
        found.setdefault(ServiceKey.parse(owner) if owner else NO_SERVICE, set()).add(element)
    return {key: frozenset(spec) for key, spec in found.items()}


def frontend_of(key: str) -> str:
    """Return the frontend (`address . protocol . port`) with which an element's key begins; for the
    element of a ClusterIP, the address."""
    return " . ".join(key.split(" . ", 3)[:3])


@lru_cache(8192)
def canonical(address: str) -> str:
    """Return an address as nft prints it. An IPv4-mapped address stays an IPv6 address, because its
    map is for IPv6. Leading zeros in old objects are read as decimal, as in kube-proxy."""
    if is_ipv6(address):
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, address))
    return ".".join(str(int(part)) for part in address.split("."))


def _frontends(port: NodeServicePort, number: str, answering: Sequence[str]) -> Iterator[_Frontend]:
    protocol = PROTOCOL_NUMBERS[port.protocol]
    sources: tuple[tuple[Literal["cluster", "balancer", "external"], tuple[str, ...]], ...] = (
        ("cluster", port.cluster_ips),
        ("balancer", port.load_balancer_ips),
        ("external", port.external_ips),
    )
    for kind, addresses in sources:
        for address in map(canonical, addresses):
            yield _Frontend(kind, address, f"{address} . {protocol} . {port.port}")
    if port.node_port:
        for address in map(canonical, answering):
            if is_ipv6(address) == (number == "6"):
                yield _Frontend("node", address, f"{address} . {protocol} . {port.node_port}")


def _frontend_elements(
    intent: NodeService, port: NodeServicePort, number: str, frontend: _Frontend, affinity_map: int
) -> Iterator[Element]:
    inside = frontend.kind == "cluster"
    key = frontend.key
    only_local = inside and intent.internal_policy == "Local"
    backends = port.local_backends if only_local else port.cluster_backends
    verdict = _verdict(backends, port.cluster_backends, local=False)
    yield Element(f"services{number}", key, verdict, str(intent.service))
    yield from _endpoint_elements(number, key, verdict, backends)
    reachable = set(backends)
    if port.protocol != "TCP":
        yield from _flow_elements(number, key, port)
    if inside:
        yield Element(f"cluster_ips{number}", frontend.address, "", str(intent.service))
    elif intent.external_policy == "Local" and port.cluster_backends:
        outside = _verdict(port.local_backends, port.cluster_backends, local=True)
        yield Element(f"outside{number}", key, outside)
        yield from _endpoint_elements(number, key, outside, port.local_backends)
        reachable |= set(port.local_backends)
    if not reachable:
        return
    if intent.affinity_timeout_s:
        yield Element(f"recall{number}", key, f"jump recall{number}_{affinity_map}")
        yield Element(
            f"remember{number}",
            key,
            f"goto remember{number}_{intent.affinity_timeout_s}_{affinity_map}",
        )
    masquerade = "strangers" if inside else "own" if intent.external_policy == "Local" else "always"
    yield Element(f"masquerade{number}", key, f"goto masquerade_{masquerade}")
    if masquerade != "always":
        for pod in {canonical(backend.address) for backend in reachable if backend.local}:
            yield Element(f"hairpin{number}", f"{key} . {pod} . {pod}")


def affinity_map_of(spec: Spec) -> int | None:
    """Return the number of the maps with this Service's clients; None if session affinity is not in
    force for it."""
    return next(
        (int(each.value.rpartition("_")[2]) for each in spec if each.map.startswith("recall")), None
    )


def _verdict(backends: Sequence[Backend], anywhere: Sequence[Backend], *, local: bool) -> str:
    """Return the verdict for a frontend. Without endpoints here, packets are dropped if another
    node has endpoints, so that the client tries again, and refused if there are none anywhere."""
    if backends:
        return f"goto pick{'_local' if local else ''}_{len(backends)}"
    return "drop" if anywhere else "goto refuse"


def _endpoint_elements(
    number: str, key: str, verdict: str, backends: Sequence[Backend]
) -> Iterator[Element]:
    if backends:
        name = endpoint_map(verdict.removeprefix("goto "), number)
        for slot, backend in enumerate(backends):
            yield Element(name, f"{key} . {slot}", f"{canonical(backend.address)} . {backend.port}")


def _flow_elements(number: str, key: str, port: NodeServicePort) -> Iterator[Element]:
    """Return the records of the endpoints to which flows may lead. These are all serving endpoints,
    without regard to policies and termination, as in kube-proxy; and all endpoints that get new
    connections, because a pod that is published while it is not ready does not count as serving."""
    for backend in {*port.serving_backends, *port.cluster_backends, *port.local_backends}:
        yield Element(f"flows{number}", f"{key} . {canonical(backend.address)} . {backend.port}")


def _admitted(intent: NodeService, number: str, node_addresses: Sequence[str]) -> Sequence[str]:
    """Return the source ranges to which the load-balancer addresses of one family are restricted,
    as kube-proxy does; empty if they are not restricted. Ranges of the other address family alone
    do not restrict this one. A node inside of a range may also use the VIPs of the Service as
    source addresses, because it may have them itself."""
    ranges = of_family(number, intent.source_ranges)
    if not ranges or any(cidr.endswith("/0") for cidr in ranges):
        return ()
    networks = [ip_network(cidr) for cidr in ranges]
    if any(
        ip_address(canonical(address)) in network
        for address in node_addresses
        for network in networks
    ):
        vips = {address for port in intent.ports for address in port.load_balancer_ips}
        return of_family(number, (*ranges, *map(canonical, vips)))
    return ranges


def _changes(
    key: ServiceKey, verb: Literal["delete", "add"], elements: Collection[Element]
) -> Iterator[Change]:
    by_map: dict[str, dict[str, list[Element]]] = {}
    for element in elements:
        by_map.setdefault(element.map, {}).setdefault(frontend_of(element.key), []).append(element)
    for name, by_frontend in sorted(by_map.items()):
        # Sort in parts: sorting a million elements at once would block the interpreter for seconds.
        members = [
            element for frontend in sorted(by_frontend) for element in sorted(by_frontend[frontend])
        ]
        yield Change(key, verb, name, tuple(members))


def _listed(record: Record) -> Iterator[Element]:
    """Return the elements of one map or set in the format of libnftables-json(5)."""
    described = record.get("map") or record.get("set")
    if not isinstance(described, dict):
        return
    name = described["name"]
    for item in described.get("elem", ()):
        key, value = item if "map" in record else (item, None)
        comment = ""
        if isinstance(key, dict) and "elem" in key:
            comment = key["elem"].get("comment", "")
            key = key["elem"]["val"]
        yield Element(name, _words(key), _words(value), comment)


def _words(expression: object) -> str:
    """Return an expression of a listing in the syntax of commands."""
    match expression:
        case None:
            return ""
        case {"concat": [*parts]}:
            return " . ".join([_words(part) for part in parts])
        case {"prefix": {"addr": address, "len": length}}:
            return f"{address}/{length}"
        case {"goto": {"target": chain}}:
            return f"goto {chain}"
        case {"jump": {"target": chain}}:
            return f"jump {chain}"
        case {"drop": _}:
            return "drop"
    return str(expression)
