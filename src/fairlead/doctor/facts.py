"""Facts about a cluster at one time, as values. Pure.

In: what `gather` has read. Out: a `Facts`, and a `Case` for each Service to look at. Invariant: a
collection is None if it could not be read, so that a rule never takes a missing right for an empty
collection. A collection whose kind does not exist, because Fairlead is not installed, is empty."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

import msgspec

from fairlead.config import Config
from fairlead.doctor.finding import NotLookedAt
from fairlead.doctor.objects import Event, NetworkPolicy, OwnedService, Workload
from fairlead.doctor.owners import Owner, owner_of
from fairlead.doctor.rights import Right
from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.networks import read_address
from fairlead.kube.objects import Endpoint, EndpointSlice, Node, ObjectMeta, Pod
from fairlead.kube.presence import Presence
from fairlead.model import ServiceKey
from fairlead.plan.classes import CLASSES
from fairlead.plan.exclusions import Exclusions, of_api_servers, of_config, of_node, of_service
from fairlead.plan.pools import Pools, read_pools
from fairlead.plan.service import claimed_class, class_of

GRACE_S = 30.0


class Published(NamedTuple):
    """A write of the addresses of a Service that was observed: by which field manager, and which
    addresses it left."""

    manager: str
    addresses: tuple[str, ...]


class NamedWorkload(NamedTuple):
    kind: str
    workload: Workload


class Process(NamedTuple):
    """A process of Fairlead, with the record of its Lease. `alive`: whether it renews its Lease.
    `renewed`: when it last did so by its own clock."""

    record: Presence
    alive: bool
    renewed: str = ""


class Refusal(NamedTuple):
    """A right that a role of Fairlead needs, and that the API server does not grant to its
    ServiceAccount. `account`: namespace/name."""

    role: str
    account: str
    right: Right


class Facts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that was read. `now_s`: the time at which it was read, in seconds since 1970.
    `grace_s`: the time that a pod or a Service may need to become ready. `wanted`: the Services to
    look at; empty: all of type LoadBalancer in `namespace`, which is empty for all namespaces.
    `writes`: the writes of addresses that were observed while facts were read. `refusals`: the
    rights that roles of Fairlead lack."""

    now_s: float
    grace_s: float = GRACE_S
    services: tuple[OwnedService, ...] = ()
    wanted: tuple[ServiceKey, ...] = ()
    namespace: str = ""
    slices: tuple[EndpointSlice, ...] | None = ()
    nodes: tuple[Node, ...] | None = ()
    pods: tuple[Pod, ...] | None = ()
    events: tuple[Event, ...] | None = ()
    workloads: tuple[NamedWorkload, ...] | None = ()
    policies: tuple[NetworkPolicy, ...] | None = ()
    config: Config | None = None
    pools: tuple[AddressPool, ...] | None = ()
    grants: tuple[AddressGrant, ...] | None = ()
    processes: tuple[Process, ...] | None = ()
    refusals: tuple[Refusal, ...] | None = ()
    writes: Mapping[ServiceKey, Sequence[Published]] | None = None
    not_looked_at: tuple[NotLookedAt, ...] = ()

    def age_s(self, time: str | None) -> float:
        """Return the seconds since a time of the API; 0 if there is none, so that an unknown age
        never makes a finding."""
        if not time:
            return 0.0
        return self.now_s - datetime.fromisoformat(time).timestamp()

    def settled(self, time: str | None) -> bool:
        """Return whether more than the grace period has passed since a time of the API."""
        return self.age_s(time) > self.grace_s

    @cached_property
    def pools_in_use(self) -> Pools | None:
        """The pools of Fairlead, without the addresses that the cluster itself uses; None if they
        are not known."""
        if self.config is None or self.pools is None:
            return None
        exclusions = Exclusions()
        exclusions.update("configuration", of_config(self.config))
        exclusions.update("API servers", of_api_servers(self.slices or ()))
        for node in self.nodes or ():
            exclusions.update(f"Node {node.metadata.name}", of_node(node))
        for service in self.services:
            exclusions.update(f"Service {service.key}", of_service(service))
        return read_pools(self.config.pools, self.pools, exclusions)

    @cached_property
    def taken(self) -> frozenset[str | None]:
        """The addresses that Services and AddressGrants have."""
        shown = {read_address(text) for each in self.services for text in addresses_of(each)}
        return frozenset(shown | {each.spec.address for each in self.grants or ()})

    @property
    def controllers(self) -> tuple[str, ...]:
        """The names of the live controllers of Fairlead."""
        return tuple(
            each.record.name
            for each in self.processes or ()
            if each.record.role == "controller" and each.alive
        )


class Case(msgspec.Struct, frozen=True, dict=True):
    """One Service, with the facts that concern it."""

    service: OwnedService
    facts: Facts

    @property
    def subject(self) -> str:
        return f"Service {self.service.key}"

    @property
    def name(self) -> str:
        return self.service.metadata.name

    @property
    def namespace(self) -> str:
        return self.service.metadata.namespace

    @property
    def local(self) -> bool:
        return self.service.spec.external_traffic_policy == "Local"

    @property
    def settled(self) -> bool:
        """Whether the Service is older than the grace period."""
        return self.facts.settled(self.service.metadata.creation_timestamp)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses and host names in the status."""
        return addresses_of(self.service)

    @cached_property
    def slices(self) -> tuple[EndpointSlice, ...] | None:
        """The EndpointSlices of the Service: of both families, and of each set of ports."""
        if self.facts.slices is None:
            return None
        return tuple(each for each in self.facts.slices if each.service == self.service.key)

    @property
    def endpoints(self) -> tuple[Endpoint, ...] | None:
        """The endpoints of all slices."""
        if self.slices is None:
            return None
        return tuple(endpoint for each in self.slices for endpoint in each.endpoints or ())

    @cached_property
    def pods(self) -> tuple[Pod, ...] | None:
        """The pods that the selector selects and that have not finished."""
        selector = self.service.spec.selector
        if self.facts.pods is None or not selector:
            return None
        return tuple(
            each
            for each in self.pods_of_namespace
            if selector.items() <= each.metadata.labels.items()
        )

    @property
    def pods_of_namespace(self) -> tuple[Pod, ...]:
        return tuple(
            each
            for each in self.facts.pods or ()
            if each.metadata.namespace == self.namespace
            and each.status.phase not in ("Succeeded", "Failed")
        )

    @cached_property
    def owner(self) -> Owner:
        """The controller that serves the Service."""
        events, meta = self.facts.events, self.service.metadata
        has_events = (
            None if events is None else any(is_about(each, "Service", meta) for each in events)
        )
        return owner_of(self.service, has_events=has_events)

    @property
    def announced_by_bgp(self) -> bool:
        """Whether MetalLB has reported, in the last hour, that nodes announce the address by
        BGP."""
        return any(
            each.reason == "nodeAssigned" and '"bgp"' in each.message
            for each in self.facts.events or ()
            if is_about(each, "Service", self.service.metadata)
        )

    @property
    def our_class(self) -> str:
        """The class of Fairlead that serves the Service; empty if another controller serves it."""
        claimed = claimed_class(self.service)
        if claimed or self.facts.config is None:
            return claimed
        name = class_of(self.service, self.facts.config.default_class) or ""
        return name if name in CLASSES else ""

    @property
    def warnings(self) -> tuple[Event, ...]:
        """The Warning Events of the Service, the latest first."""
        return warnings_of(self.facts.events or (), "Service", self.service.metadata)


def cases(facts: Facts) -> list[Case]:
    """Return the Services to look at."""
    return [
        Case(each, facts)
        for each in sorted(facts.services, key=lambda each: each.key)
        if (
            each.key in facts.wanted
            if facts.wanted
            else each.spec.type == "LoadBalancer"
            and facts.namespace in ("", each.metadata.namespace)
        )
    ]


def addresses_of(service: OwnedService) -> tuple[str, ...]:
    """Return the addresses and host names in the status of a Service."""
    return tuple(each.ip or each.hostname for each in service.status.load_balancer.ingress)


def warnings_of(events: Iterable[Event], kind: str, meta: ObjectMeta) -> tuple[Event, ...]:
    """Return the Warning Events of an object, the latest first."""
    found = [each for each in events if each.type == "Warning" and is_about(each, kind, meta)]
    return tuple(sorted(found, key=lambda each: each.time, reverse=True))


def is_about(event: Event, kind: str, meta: ObjectMeta) -> bool:
    """Return whether an Event is about an object. The Events of a deleted object remain for an
    hour, and the object that has its name now has another uid."""
    about = event.involved_object
    return (about.kind, about.namespace, about.name) == (kind, meta.namespace, meta.name) and (
        about.uid in ("", meta.uid)
    )
