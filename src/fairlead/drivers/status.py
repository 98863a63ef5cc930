"""What users see on a Service: the claim on it, its addresses, an Event when they change.

In: one Publication for each Service that a class of ours serves. Out: server-side applies on the status subresource, which
also takes metadata, so that rights on `services/status` suffice. The claim is the finalizer
`service.kubernetes.io/load-balancer-cleanup` together with an annotation that names our class; it is written before
anything else and taken off last. A Service without the annotation is never touched: its finalizer is somebody else's.
Invariant: every apply carries all that we own on the object, so what we no longer name is removed by the API server.
Follows KEP-555 (server-side apply) and KEP-1860 (ipMode).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import CLEANUP_FINALIZER, SERVICES, ObjectKey, Service
from fairlead.model import Ingress, Outcome, Publication, ServiceKey
from fairlead.plan.balancer import CLASS_ANNOTATION
from fairlead.state import State

FIELD_MANAGER = "fairlead-controller"


class Published(msgspec.Struct, frozen=True):
    """What a Service shows now. `claimed_by` is empty while our claim is not complete."""

    uid: str
    claimed_by: str
    marked: bool
    ingress: tuple[Ingress, ...]


class Claim(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str
    class_name: str
    ingress: tuple[Ingress, ...] = ()

    def __str__(self) -> str:
        return f"claim Service {self.service} for class {self.class_name}"


class Publish(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str
    class_name: str
    ingress: tuple[Ingress, ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{entry.ip} ({entry.ip_mode})" for entry in self.ingress) or "no address"
        return f"publish {shown} on Service {self.service}"


class Release(msgspec.Struct, frozen=True):
    service: ServiceKey
    uid: str

    def __str__(self) -> str:
        return f"release Service {self.service}"


StatusChange = Claim | Publish | Release


class Recorder(Protocol):
    """Where Events go; see `kube.events`."""

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None: ...


class StatusDriver:
    """Driver of Service status; one Service a call, a few at once."""

    name = "status"
    parallel = 8

    def __init__(self, client: Client, state: State, recorder: Recorder) -> None:
        self._client = client
        self._state = state
        self._recorder = recorder

    def render(self, intents: Mapping[ServiceKey, Publication]) -> Mapping[ServiceKey, Publication]:
        return intents

    def diff(self, desired: Mapping[ServiceKey, Publication], actual: Mapping[ServiceKey, Published]) -> Sequence[StatusChange]:
        changes: list[StatusChange] = []
        for key, wanted in desired.items():
            shown = actual.get(key)
            if shown is None or shown.uid != wanted.uid:
                continue  # gone or made anew since it was planned: its own event brings us back
            if shown.claimed_by != wanted.class_name:
                changes.append(Claim(key, wanted.uid, wanted.class_name, shown.ingress))
            if shown.ingress != wanted.ingress:
                changes.append(Publish(key, wanted.uid, wanted.class_name, wanted.ingress))
        changes += (Release(key, shown.uid) for key, shown in actual.items() if key not in desired and shown.marked)
        return changes

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Published]:
        """What the reflector last saw: the API server tells of every change, so nothing is asked again."""
        services = self._state.services
        return {key: _published(services[key]) for key in (services if keys is None else keys) if key in services}

    async def apply(self, changes: Sequence[StatusChange]) -> Mapping[ServiceKey, Outcome]:
        for change in changes:
            try:
                await self._client.apply(
                    SERVICES,
                    ObjectKey(*change.service),
                    _body(change),
                    field_manager=FIELD_MANAGER,
                    subresource="status",
                    force=True,
                )
            except NotFound:
                continue  # deleted meanwhile, and our claim with it
            if isinstance(change, Publish):
                addresses = ", ".join(entry.ip for entry in change.ingress)
                message = f"class {change.class_name} serves it on {addresses}"
                self._recorder.event(change.service, change.uid, "Normal", "EnsuredLoadBalancer", message)
            elif isinstance(change, Release):
                self._recorder.event(
                    change.service, change.uid, "Normal", "DeletedLoadBalancer", "its addresses are given back"
                )
        return {}


def _published(service: Service) -> Published:
    mark = service.metadata.annotations.get(CLASS_ANNOTATION, "")
    held = CLEANUP_FINALIZER in service.metadata.finalizers
    ingress = tuple(Ingress(e.ip, e.ip_mode or "VIP") for e in service.status.load_balancer.ingress if e.ip)
    return Published(service.metadata.uid, mark if held else "", bool(mark), ingress)


def _body(change: StatusChange) -> dict[str, Any]:
    # The uid makes the apply fail on a Service of the same name that was made anew.
    metadata: dict[str, Any] = {"name": change.service.name, "namespace": change.service.namespace, "uid": change.uid}
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
    if isinstance(change, Release):
        return body
    metadata["finalizers"] = [CLEANUP_FINALIZER]
    metadata["annotations"] = {CLASS_ANNOTATION: change.class_name}
    if change.ingress:
        body["status"] = {"loadBalancer": {"ingress": [{"ip": e.ip, "ipMode": e.ip_mode} for e in change.ingress]}}
    return body
