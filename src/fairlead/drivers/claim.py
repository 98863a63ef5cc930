"""The claim on a Service: the first thing that is written when a class of ours serves it, and the last that is taken off.

In: the LoadBalancers of our classes. Out: the finalizer `service.kubernetes.io/load-balancer-cleanup`, so that a Service
cannot vanish before what was made for it, together with an annotation that names our class. A Service without the
annotation is never touched: its finalizer is somebody else's. An Event tells when a claim has been taken off.
Invariant: written by server-side apply (KEP-555) with a field manager that owns nothing else, on the status subresource,
which also takes metadata, so that rights on `services/status` suffice.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers.newest import NewestServices
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.events import Recorder
from fairlead.kube.objects import CLEANUP_FINALIZER, SERVICES, ObjectKey
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.balancer import CLASS_ANNOTATION

FIELD_MANAGER = "fairlead-claim"


class Claimed(msgspec.Struct, frozen=True):
    """Which class has claimed the Service of this uid; empty while the claim is not whole."""

    uid: str
    class_name: str


class Claim(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str
    class_name: str

    def __str__(self) -> str:
        return f"claim Service {self.service} for class {self.class_name}"


class Release(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str

    def __str__(self) -> str:
        return f"release Service {self.service}"


class ClaimDriver:
    """Driver of the claims."""

    name = "claim"

    def __init__(
        self, client: Client, newest: NewestServices, recorder: Recorder, *, fence: Callable[[], None] = lambda: None
    ) -> None:
        """`fence` is called before each write, and raises if it must not be made: we do not lead any more."""
        self._client = client
        self._newest = newest
        self._recorder = recorder
        self._fence = fence

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Claimed]:
        return {key: Claimed(intent.uid, intent.class_name) for key, intent in intents.items()}

    def diff(self, desired: Mapping[ServiceKey, Claimed], actual: Mapping[ServiceKey, Claimed]) -> Sequence[Claim | Release]:
        claims = [Claim(key, each.uid, each.class_name) for key, each in desired.items() if actual.get(key) != each]
        return [*claims, *(Release(key, each.uid) for key, each in actual.items() if key not in desired)]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Claimed]:
        """What is known: the API server tells of every change, so nothing is asked again."""
        if keys is None:
            self._newest.forget_answers()
        claimed = {}
        for key, service in self._newest.of(keys).items():
            if name := service.metadata.annotations.get(CLASS_ANNOTATION):
                whole = CLEANUP_FINALIZER in service.metadata.finalizers
                claimed[key] = Claimed(service.metadata.uid, name if whole else "")
        return claimed

    async def apply(self, changes: Sequence[Claim | Release]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            # The uid makes it a Conflict to write on a Service of the same name that was made anew.
            metadata: dict[str, object] = {"uid": change.uid}
            if isinstance(change, Claim):
                metadata["finalizers"] = [CLEANUP_FINALIZER]
                metadata["annotations"] = {CLASS_ANNOTATION: change.class_name}
            self._fence()
            try:
                answer = await self._client.apply(
                    SERVICES,
                    ObjectKey(*change.service),
                    {"metadata": metadata},
                    field_manager=FIELD_MANAGER,
                    subresource="status",
                    force=True,
                )
            except NotFound:
                continue  # deleted meanwhile, and our claim with it
            self._newest.note(answer)
            if isinstance(change, Release):
                # Said here and not where addresses are taken back: the API server does that itself when the type changes.
                message = "its addresses are given back"
                self._recorder.event(change.service, change.uid, "Normal", "DeletedLoadBalancer", message)
        return {}
