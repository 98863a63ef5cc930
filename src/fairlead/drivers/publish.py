"""What users and nodes read on a Service: its addresses, with the hairpin contract of each.

In: LoadBalancers with their addresses. Out: `status.loadBalancer.ingress` with `ipMode` (KEP-1860), by server-side apply
(KEP-555) with a field manager that owns nothing else, and an Event that names them. The only writer of Service status.
Invariant: published last, taken back first; a Service that no class of ours has claimed is not touched.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from fairlead.drivers.newest import NewestServices
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.events import Recorder
from fairlead.kube.objects import SERVICES, ObjectKey, Service
from fairlead.model import IPMode, LoadBalancer, Outcome, ServiceKey
from fairlead.plan.balancer import CLASS_ANNOTATION

FIELD_MANAGER = "fairlead-publish"


class Published(msgspec.Struct, frozen=True):
    """What the Service of this uid shows: addresses, each with its ipMode."""

    uid: str
    ingress: tuple[tuple[str, IPMode], ...]


class Publish(msgspec.Struct, frozen=True):
    """Show exactly these addresses; none: take back what is shown."""

    service: ServiceKey
    uid: str
    ingress: tuple[tuple[str, IPMode], ...]

    def __str__(self) -> str:
        if not self.ingress:
            return f"publish no address on Service {self.service}"
        return f"publish {', '.join(f'{ip} ({mode})' for ip, mode in self.ingress)} on Service {self.service}"


class PublishDriver:
    """Driver of Service status."""

    name = "publish"

    def __init__(
        self, client: Client, newest: NewestServices, recorder: Recorder, *, fence: Callable[[], None] = lambda: None
    ) -> None:
        """`fence` is called before each write, and raises if it must not be made: we do not lead any more."""
        self._client = client
        self._newest = newest
        self._recorder = recorder
        self._fence = fence

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, Published]:
        return {
            key: Published(intent.uid, tuple((address, intent.ip_mode) for address in intent.addresses))
            for key, intent in intents.items()
        }

    def diff(self, desired: Mapping[ServiceKey, Published], actual: Mapping[ServiceKey, Published]) -> Sequence[Publish]:
        shown = [Publish(key, each.uid, each.ingress) for key, each in desired.items() if actual.get(key) != each]
        return [*shown, *(Publish(key, each.uid, ()) for key, each in actual.items() if key not in desired)]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Published]:
        """What is known. A Service that is being deleted takes its status with it."""
        if keys is None:
            self._newest.forget_answers()
        services = self._newest.of(keys)
        return {key: published for key, service in services.items() if (published := _published(service)) is not None}

    async def apply(self, changes: Sequence[Publish]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            # The uid makes it a Conflict to write on a Service of the same name that was made anew.
            body: dict[str, object] = {"metadata": {"uid": change.uid}}
            if change.ingress:
                body["status"] = {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": mode} for ip, mode in change.ingress]}}
            self._fence()
            try:
                answer = await self._client.apply(
                    SERVICES,
                    ObjectKey(*change.service),
                    body,
                    field_manager=FIELD_MANAGER,
                    subresource="status",
                    force=True,
                )
            except NotFound:
                continue  # deleted meanwhile
            self._newest.note(answer)
            if change.ingress:
                message = f"served on {', '.join(ip for ip, _ in change.ingress)}"
                self._recorder.event(change.service, change.uid, "Normal", "EnsuredLoadBalancer", message)
        return {}


def _published(service: Service) -> Published | None:
    """None: it shows nothing, or nothing of ours."""
    if CLASS_ANNOTATION not in service.metadata.annotations or service.metadata.deletion_timestamp is not None:
        return None
    ingress: tuple[tuple[str, IPMode], ...] = tuple(
        (entry.ip, entry.ip_mode or "VIP") for entry in service.status.load_balancer.ingress if entry.ip
    )
    return Published(service.metadata.uid, ingress) if ingress else None
