"""The claim on a Service: a finalizer and an annotation, the first fields that a controller writes
for a Service of its classes, and the last that it removes.

In: the LoadBalancers of the classes that this controller serves. Out: the finalizer
`service.kubernetes.io/load-balancer-cleanup`, so that a Service cannot vanish before its load
balancer is deleted, together with an annotation that names the class. A Service without the
annotation, or on which the claim's field manager owns nothing, is never released: its finalizer
belongs to another controller, or a user wrote the annotation. Events report when work on a Service
begins and when a claim is removed, with the reasons of the upstream service controller. Invariants:
the claim has a field manager of its own, which owns nothing else; a claim for a class of another
chain of drivers is released by that chain, before this chain makes its own claim."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.drivers.service_status import ServiceWriter
from fairlead.errors import Conflict, FairleadError
from fairlead.kube.events import Recorder
from fairlead.kube.objects import CLEANUP_FINALIZER, Service
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.addresses import keeps
from fairlead.plan.annotations import WITHOUT_EFFECT, quoted
from fairlead.plan.classes import LoopName, loop_of
from fairlead.plan.service import (
    CLAIM_MANAGER,
    CLASS_ANNOTATION,
    CLASS_PREFIX,
    claimed_class,
    class_of,
)


class Claimed(msgspec.Struct, frozen=True):
    """The class that has claimed the Service of this uid. `class_name` is empty while the claim
    lacks its finalizer."""

    uid: str
    class_name: str


class Claim(msgspec.Struct, frozen=True):
    """Claim a Service for a class. `renewed`: the Service already has a claim, for another class or
    without its finalizer."""

    service: ServiceKey
    uid: str
    class_name: str
    renewed: bool = False

    def __str__(self) -> str:
        return f"claim Service {self.service} for class {self.class_name}"


class Release(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str

    def __str__(self) -> str:
        return f"release Service {self.service}"


class ClaimDriver(Component):
    """The driver that adds and removes claims."""

    name = "claim"
    batch = 1

    def __init__(
        self,
        writer: ServiceWriter,
        services: ServiceCache,
        recorder: Recorder,
        *,
        loop: LoopName = "services",
        may_keep: bool = True,
        obstacle: Callable[[str], FairleadError | None] = lambda _: None,
    ) -> None:
        """Create the driver. `loop`: the loop that runs this driver; the driver claims only
        Services of the classes that this loop serves. `may_keep`: whether the addresses of these
        classes can be kept for later Services. `obstacle` returns why a Service that the class of
        this name has claimed cannot change to another class at present."""
        self._obstacle = obstacle
        self._loop = loop
        self._may_keep = may_keep
        self._writer = writer
        self._services = services
        self._recorder = recorder
        self.unfinished: dict[ServiceKey, Claim | Release] = {}
        """Changes that were tried and have not succeeded yet, by Service."""
        self._warned: dict[ServiceKey, tuple[str, str]] = {}
        """Uid and annotation value of each Service for which an Event has reported an annotation
        that a user wrote: only the controller may write the class annotation."""

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Claimed]:
        return {key: Claimed(intent.uid, intent.class_name) for key, intent in intents.items()}

    def diff(
        self, desired: Mapping[ServiceKey, Claimed], actual: Mapping[ServiceKey, Claimed]
    ) -> Sequence[Claim | Release]:
        claims = [
            Claim(key, each.uid, each.class_name, key in actual)
            for key, each in desired.items()
            if actual.get(key) != each
        ]
        return [
            *claims,
            *(Release(key, each.uid) for key, each in actual.items() if key not in desired),
        ]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Claimed]:
        """Return the known claims. The watch reports every change, so no request is made."""
        if keys is None:
            self._services.forget_answers()
            self._forget_gone()
            self._warn_of_foreign_annotations()
        claimed = {}
        for key, service in self._services.of(keys).items():
            if name := claimed_for(service, self._loop):
                whole = CLEANUP_FINALIZER in service.metadata.finalizers
                claimed[key] = Claimed(service.metadata.uid, name if whole else "")
        return claimed

    async def apply(self, changes: Sequence[Claim | Release]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            match change:
                case Claim():
                    await self._claim(change)
                case Release():
                    await self._release(change)
            self.unfinished.pop(change.service, None)
        return {}

    def _forget_gone(self) -> None:
        """Forget unfinished changes of Services that are deleted or were recreated under the same
        name."""
        present = {
            key: service.metadata.uid for key, service in self._services.of(self.unfinished).items()
        }
        self.unfinished = {
            key: change for key, change in self.unfinished.items() if present.get(key) == change.uid
        }

    def _warn_of_foreign_annotations(self) -> None:
        """Write one Event for each Service whose class annotation was written by a user and that no
        class of Fairlead is to serve. On other Services the claim overwrites the annotation."""
        foreign = {}
        for key, service in self._services.of(None).items():
            value = service.metadata.annotations.get(CLASS_ANNOTATION, "")
            if (
                value
                and loop_of(value) == self._loop
                and not claimed_class(service)
                and not _may_be_ours(service)
            ):
                foreign[key] = (service.metadata.uid, value)
        for key, (uid, value) in foreign.items():
            if self._warned.get(key) != (uid, value):
                what = (
                    f"{CLASS_ANNOTATION} is {quoted(value)}, which has no effect: only the "
                    "controller writes this annotation"
                )
                fix = (
                    f"remove it: kubectl annotate service -n {key.namespace} {key.name} "
                    f"{CLASS_ANNOTATION}-"
                )
                self._recorder.event(key, uid, "Warning", WITHOUT_EFFECT, f"{what}; {fix}")
        self._warned = foreign

    async def _claim(self, claim: Claim) -> None:
        service = self._services.of([claim.service]).get(claim.service)
        held = claimed_class(service) if service is not None else ""
        if held and loop_of(held) != self._loop:
            raise Conflict(f"class {held} has not released Service {claim.service} yet")
        if held not in ("", claim.class_name) and (error := self._obstacle(held)) is not None:
            raise error
        if not claim.renewed:
            self._announce_first_attempt(claim, "EnsuringLoadBalancer", "Ensuring load balancer")
        metadata = {
            "finalizers": [CLEANUP_FINALIZER],
            "annotations": {CLASS_ANNOTATION: claim.class_name},
        }
        await self._writer.apply(
            claim.service, claim.uid, field_manager=CLAIM_MANAGER, metadata=metadata
        )

    async def _release(self, release: Release) -> None:
        # This Event is written here and not where the addresses are removed from the status,
        # because the API server removes them itself when the type of the Service changes.
        self._announce_first_attempt(release, "DeletingLoadBalancer", "Deleting load balancer")
        left = await self._writer.apply(release.service, release.uid, field_manager=CLAIM_MANAGER)
        if left is not None:
            what = (
                "kept for a later Service of this name"
                if self._may_keep and keeps(left)
                else "released"
            )
            message = f"Deleted load balancer: its addresses are {what}{_waits_for(left)}"
            self._recorder.event(
                release.service, release.uid, "Normal", "DeletedLoadBalancer", message
            )

    def _announce_first_attempt(self, change: Claim | Release, reason: str, message: str) -> None:
        """Write the Event at the first attempt of the change, not at each retry."""
        if self.unfinished.get(change.service) != change:
            self.unfinished[change.service] = change
            self._recorder.event(change.service, change.uid, "Normal", reason, message)


def _may_be_ours(service: Service) -> bool:
    """Return whether the Service, by its spec, may be served by a class of Fairlead."""
    wanted = class_of(service, CLASS_PREFIX)
    return wanted is not None and wanted.startswith(CLASS_PREFIX)


def claimed_for(service: Service, loop: LoopName) -> str:
    """Return the class that has claimed the Service if this loop serves that class, else ""."""
    name = claimed_class(service)
    return name if name and loop_of(name) == loop else ""


def _waits_for(left: Service) -> str:
    """Name the finalizers of other controllers for which a deleted Service waits; "" if there are
    none."""
    if left.metadata.deletion_timestamp is None or not left.metadata.finalizers:
        return ""
    names = ", ".join(left.metadata.finalizers)
    return (
        f"; the Service stays until finalizer {names} is removed, which another controller has "
        "set: check that this controller runs, or, if it is uninstalled, remove its finalizer "
        "(kubectl edit service)"
    )
