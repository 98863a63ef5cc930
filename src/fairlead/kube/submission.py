"""What the API server makes of Services that are applied: defaults, allocations and refusals. Pure.

In: Services as they were written, and what is known about the address families of the cluster. Out:
for each Service the object that the server would store, or why it would refuse it. Invariants: the
rules are those of `kube.rules`; what the server chooses itself (node ports, cluster IPs) is marked
as chosen, and never a reason to refuse; what depends on an unknown setting of the cluster is
neither refused nor kept silent."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import msgspec

from fairlead.errors import FairleadError
from fairlead.kube.objects import Node, Service
from fairlead.kube.rules import fields, names
from fairlead.kube.rules.allocation import (
    FIRST_NODE_PORT,
    LAST_NODE_PORT,
    Allocator,
    NodePorts,
    addresses_of,
    ports_of,
)
from fairlead.kube.rules.causes import Object, Rejected, invalid, joined
from fairlead.kube.rules.defaults import set_defaults
from fairlead.kube.rules.families import set_families
from fairlead.kube.rules.metadata import check_metadata
from fairlead.kube.rules.service import check_service
from fairlead.kube.rules.types import complaint, without_effect, without_nulls, wrong_time
from fairlead.model import Family, ServiceKey
from fairlead.net.address import family_of

_EVERYWHERE: Final = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}
"""The service CIDRs of a cluster are unknown, so every address may be a ClusterIP."""

_RECENT: Final = (
    "must not have leading 0s",
    "must not have leading 0s in IP or prefix length",
    "must not be an IPv4-mapped IPv6 address",
    "must not have an IPv4-mapped IPv6 address",
    "must not have bits set beyond the prefix length",
)
"""Ends of messages about addresses that the API server refuses since 1.36 (KEP-4858)."""


class Families(msgspec.Struct, frozen=True):
    """The address families of a cluster's Services, its default first. `certain`: the
    configuration names them, so no others exist."""

    families: tuple[Family, ...] = ("IPv4",)
    certain: bool = False


class Submission(msgspec.Struct, frozen=True):
    """One Service that is applied. `service`: the object that the API server would store; None: it
    refuses the Service, because of `refused`.

    `known_later`: what only the API server knows, as texts. `remarks`: what has no effect."""

    key: ServiceKey
    service: Service | None = None
    refused: str = ""
    chosen_node_ports: frozenset[tuple[int, str]] = frozenset()
    """Number and protocol of the ports whose node port the API server chooses. `service` has
    placeholders there."""
    chosen_health_port: bool = False
    known_later: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def families_of_cluster(nodes: Sequence[Node], service_cidrs: Sequence[str]) -> Families:
    """Return the families of Services, as far as the configuration and the Nodes show them."""
    if service_cidrs:
        return Families(tuple(dict.fromkeys(map(family_of, service_cidrs))), certain=True)
    known = [found for node in nodes if (found := _families_of_node(node))]
    if not known:
        return Families()
    first, *others = known[0]
    return Families((first, *(each for each in others if all(each in found for found in known))))


def _families_of_node(node: Node) -> tuple[Family, ...]:
    addresses = [each.address for each in node.status.addresses if each.type == "InternalIP"]
    return tuple(dict.fromkeys(map(family_of, node.spec.pod_cidrs or addresses)))


def submit(written: Sequence[Mapping[str, Any]], families: Families) -> list[Submission]:
    """Return what becomes of each Service, in order. `written`: the objects, with namespaces.

    Objects with a UID come from a server, which has accepted them and allocated everything."""
    return _Submitting(written, families).all()


class _Submitting:
    """The state of one submission: which ports and addresses the Services have taken."""

    def __init__(self, written: Sequence[Mapping[str, Any]], families: Families) -> None:
        self._objects: list[Object] = [without_nulls(each) for each in written]
        self._families = families
        second: Family = "IPv4" if families.families[0] == "IPv6" else "IPv6"
        both = (families.families[0], second)
        self._allocator = Allocator([_EVERYWHERE[each] for each in both])
        # Chosen ports are placeholders, so they may be anywhere, but not where a request is.
        self._allocator.ports = NodePorts(1024, 65535)
        self._allocator.ports.avoid = frozenset(
            port for each in self._objects for port in _requested_ports(each)
        )
        self._owners: dict[int | str, str] = {}

    def all(self) -> list[Submission]:
        stored = [_is_stored(each) for each in self._objects]
        found = {
            index: self._one(self._objects[index])
            for index in sorted(range(len(self._objects)), key=lambda index: not stored[index])
        }
        return [found[index] for index in range(len(self._objects))]

    def _one(self, service: Object) -> Submission:
        key = _key(service)
        try:
            msgspec.convert(service, fields.Service)
        except msgspec.ValidationError as problem:
            return Submission(key, refused=complaint(problem, service, fields.Service))
        if problem_with_time := wrong_time(service):
            return Submission(key, refused=problem_with_time)
        remarks = (
            () if _is_stored(service) else tuple(without_effect(fields.Service, "Service", service))
        )
        service["spec"] = service.get("spec") or {}
        before = deepcopy(service)
        set_defaults(service)
        later: list[str] = []
        namespace = service["metadata"]["namespace"]
        causes = [
            invalid("metadata.namespace", namespace, problem)
            for problem in names.dns_label(namespace)
        ]
        causes += check_metadata(service, names.dns_label_name)
        try:
            if _is_stored(service):
                self._hold(service)
                causes += check_service(service, service)
            else:
                service = self._with_families(service, later)
                self._allocator.reserve(service, None, dry_run=True)
                causes += check_service(service)
        except FairleadError as problem:
            return Submission(
                key, refused=self._explained(problem.message, service), remarks=remarks
            )
        causes = [each for each in causes if each.field not in _fields_of_server(before)]
        if recent := [each for each in causes if each.message.endswith(_RECENT)]:
            causes = [each for each in causes if each not in recent]
            later.append(
                f"Kubernetes 1.36 refuses it, and older versions accept it: {joined(recent)}"
            )
        if causes:
            return Submission(key, refused=joined(causes), remarks=remarks)
        self._owners |= dict.fromkeys([*ports_of(service), *addresses_of(service)], str(key))
        return _accepted(key, before, service, later, remarks)

    def _hold(self, service: Object) -> None:
        """Take what a stored Service has."""
        self._allocator.ports.taken.update(ports_of(service))
        for address in addresses_of(service):
            self._allocator.addresses[names.family_of(address)].hold(address)

    def _with_families(self, service: Object, later: list[str]) -> Object:
        """Return the Service with its families. Raise Rejected.

        Unless the families of the cluster are certain, it may have another one."""
        known = self._families
        maybe_more = not known.certain and len(known.families) == 1
        tried = deepcopy(service) if maybe_more else service
        try:
            set_families(tried, None, known.families)
        except Rejected as problem:
            if not maybe_more:
                raise
            tried = service
            set_families(tried, None, self._allocator.families)
            later.append(
                "the API server refuses it unless its cluster has Services of IPv4 and IPv6 "
                f"({problem.message})"
            )
            return tried
        if maybe_more and tried["spec"].get("ipFamilyPolicy") == "PreferDualStack":
            later.append("it gets IPv4 and IPv6 if the cluster has Services of both")
        return tried

    def _explained(self, message: str, service: Object) -> str:
        """Return a message about a port or address that is taken, with the Service that has it."""
        wanted = {*ports_of(service), *addresses_of(service)}
        owners = [
            f"Service {owner} has {each}" for each, owner in self._owners.items() if each in wanted
        ]
        return f"{message} ({owners[0]})" if owners and "already allocated" in message else message


def _accepted(
    key: ServiceKey, before: Object, service: Object, later: list[str], remarks: tuple[str, ...]
) -> Submission:
    spec, given = service["spec"], before["spec"]
    chosen = frozenset(
        (port["port"], port["protocol"])
        for port, written in zip(spec.get("ports") or (), given.get("ports") or (), strict=True)
        if port.get("nodePort") and not written.get("nodePort")
    )
    health = bool(spec.get("healthCheckNodePort") and not given.get("healthCheckNodePort"))
    if not given.get("clusterIP") and not given.get("clusterIPs"):
        spec.pop("clusterIP", None)
        spec.pop("clusterIPs", None)
    later += _later(before, chosen, health=health)
    try:
        stored = msgspec.convert(service, Service)
    except msgspec.ValidationError as problem:
        return Submission(key, refused=complaint(problem, service, Service))
    return Submission(
        key,
        stored,
        chosen_node_ports=chosen,
        chosen_health_port=health,
        known_later=tuple(later),
        remarks=remarks,
    )


def _fields_of_server(written: Object) -> Collection[str]:
    """Return the fields that only the server fills in. A problem in them has another cause, or the
    object comes from a server and was cut."""
    spec = written["spec"]
    found = {
        f"spec.ports[{index}].nodePort"
        for index, port in enumerate(spec.get("ports") or ())
        if not port.get("nodePort")
    }
    return found if spec.get("healthCheckNodePort") else found | {"spec.healthCheckNodePort"}


def _later(written: Object, chosen: Collection[tuple[int, str]], *, health: bool) -> Iterator[str]:
    """Yield what only the API server knows about the ports of a Service."""
    inside = range(FIRST_NODE_PORT, LAST_NODE_PORT + 1)
    outside = [port for port in sorted(_requested_ports(written)) if port not in inside]
    if outside and not _is_stored(written):
        yield (
            f"the API server refuses node port {outside[0]} unless its option "
            f"--service-node-port-range contains it (default: {FIRST_NODE_PORT}-{LAST_NODE_PORT})"
        )
    ports = " and ".join(f"{number}/{protocol}" for number, protocol in sorted(chosen))
    what = [f"the node port{'s' if len(chosen) > 1 else ''} of {ports}"] if ports else []
    what += ["the healthCheckNodePort"] if health else []
    if what:
        yield f"the API server chooses {', and '.join(what)}"


def _is_stored(service: Mapping[str, Any]) -> bool:
    metadata = service.get("metadata")
    return isinstance(metadata, dict) and bool(metadata.get("uid"))


def _key(service: Mapping[str, Any]) -> ServiceKey:
    metadata = service["metadata"]
    return ServiceKey(metadata["namespace"], metadata["name"])


def _requested_ports(service: Mapping[str, Any]) -> Iterator[int]:
    """Yield the node ports that a Service requests. The types of its fields are not checked yet."""
    spec = service.get("spec")
    if not isinstance(spec, dict):
        return
    ports = spec.get("ports")
    each_port = (
        [port for port in ports if isinstance(port, dict)] if isinstance(ports, list) else []
    )
    requested = [*(port.get("nodePort") for port in each_port), spec.get("healthCheckNodePort")]
    yield from (port for port in requested if type(port) is int and port)
