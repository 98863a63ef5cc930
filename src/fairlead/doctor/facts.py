"""Facts about a cluster at one time, as values. Pure.

In: what `gather` has read. Out: a `Facts`, and a `Case` for each examined Service. Invariant: a
collection is None if it could not be read, so that a rule never takes a missing right for an empty
collection. A collection whose kind does not exist, because Fairlead is not installed, is empty."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from fairlead.config import Config
from fairlead.doctor.finding import NotExamined
from fairlead.doctor.objects import Event, NetworkPolicy, OwnedService, Workload
from fairlead.kube.announcers import AnnouncerStatus
from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.objects import Endpoint, EndpointSlice, Node, ObjectMeta, Pod
from fairlead.kube.presence import Presence
from fairlead.model import ServiceKey
from fairlead.plan.classes import CLASSES
from fairlead.plan.service import claimed_class, class_of

GRACE_S = 30.0


class Target(NamedTuple):
    """A port of a pod to connect to."""

    address: str
    port: int


Answer = Literal["open", "refused", "silent"]


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


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was read. `now_s`: the time at which it was read, in seconds since 1970.
    `grace_s`: the time that a pod, a Service or a session may need to become ready. `wanted`: the
    Services to examine; empty: all of type LoadBalancer. `answers`: the results of connections to
    pods from this host; None: none were made. `writes`: the writes of addresses that were observed
    while facts were read."""

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
    announcers: tuple[AnnouncerStatus, ...] | None = ()
    processes: tuple[Process, ...] | None = ()
    answers: Mapping[Target, Answer] | None = None
    writes: Mapping[ServiceKey, Sequence[Published]] | None = None
    not_examined: tuple[NotExamined, ...] = ()

    def age_s(self, time: str | None) -> float:
        """Return the seconds since a time of the API; 0 if there is none, so that an unknown age
        never makes a finding."""
        if not time:
            return 0.0
        return self.now_s - datetime.fromisoformat(time).timestamp()

    def settled(self, time: str | None) -> bool:
        """Return whether more than the grace period has passed since a time of the API."""
        return self.age_s(time) > self.grace_s


class Case(msgspec.Struct, frozen=True, dict=True):
    """One Service, with the facts that concern it."""

    service: OwnedService
    facts: Facts

    @property
    def object(self) -> str:
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
    def endpoints(self) -> tuple[Endpoint, ...] | None:
        """The endpoints of all slices; those of both families and of each set of ports."""
        if self.facts.slices is None:
            return None
        key = self.service.key
        return tuple(
            endpoint
            for each in self.facts.slices
            if each.service == key
            for endpoint in each.endpoints or ()
        )

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

    @cached_property
    def pods_of_namespace(self) -> tuple[Pod, ...]:
        return tuple(
            each
            for each in self.facts.pods or ()
            if each.metadata.namespace == self.namespace
            and each.status.phase not in ("Succeeded", "Failed")
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
    def has_events(self) -> bool:
        """Whether a controller has written an Event about the Service."""
        meta = self.service.metadata
        return any(is_about(each, "Service", meta) for each in self.facts.events or ())

    @property
    def warnings(self) -> tuple[Event, ...]:
        """The Warning Events of the Service, the latest first."""
        return warnings_of(self.facts.events or (), "Service", self.service.metadata)


def cases(facts: Facts) -> list[Case]:
    """Return the Services to examine."""
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
