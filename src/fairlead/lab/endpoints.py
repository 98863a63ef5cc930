"""Maintain the EndpointSlices and Endpoints of Services that have a selector, as the controllers of
the Kubernetes control plane do.

In: changes of Services, Pods, EndpointSlices and Endpoints. Out: EndpointSlices and Endpoints are
created, replaced and deleted; the decisions are in `slices`. Level-triggered: a change marks
Services as dirty, and each dirty Service is compared as a whole. Only differences are written.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import structlog

from fairlead.backoff import Backoff
from fairlead.errors import Conflict, FairleadError
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICE_NAME_LABEL, ObjectKey, Service
from fairlead.lab.objects import ENDPOINTS, SLICES, Endpoints, Pod, Slice
from fairlead.lab.slices import (
    ENDPOINTS_MANAGED_BY_LABEL,
    MANAGED_BY_LABEL,
    MANAGER,
    compare,
    plan_endpoints,
    plan_slices,
)

log = structlog.get_logger()

COALESCE_S = 0.01
"""Changes within this time are written together: a rollout changes many Pods at once."""
RETRY_S = 0.5


class EndpointController:
    """A controller of EndpointSlices and Endpoints. The `update_*` methods take changes; `run`
    writes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._services: dict[ObjectKey, Service] = {}
        self._pods: defaultdict[str, dict[str, Pod]] = defaultdict(dict)
        self._slices: defaultdict[ObjectKey, dict[str, Slice]] = defaultdict(dict)
        self._endpoints: dict[ObjectKey, Endpoints] = {}
        self._dirty: set[ObjectKey] = set()
        self._woken = asyncio.Event()
        self._conflicts = Backoff(COALESCE_S, RETRY_S)
        self._in_conflict = False

    def update_services(self, changes: Mapping[ObjectKey, Service | None]) -> None:
        """Record the current state of Services (None: deleted)."""
        for key, service in changes.items():
            if service is None:
                self._services.pop(key, None)
            else:
                self._services[key] = service
            self._mark(key)

    def update_pods(self, changes: Mapping[ObjectKey, Pod | None]) -> None:
        """Record the current state of Pods. Mark the Services that select a Pod with its current or
        with its previous labels."""
        for key, pod in changes.items():
            pods = self._pods[key.namespace]
            labels = [
                known.metadata.labels.items()
                for known in (pods.get(key.name), pod)
                if known is not None
            ]
            if pod is None:
                pods.pop(key.name, None)
            else:
                pods[key.name] = pod
            for name, service in self._services.items():
                selector = (service.spec.selector or {}).items()
                if name.namespace == key.namespace and any(selector <= some for some in labels):
                    self._mark(name)

    def update_slices(self, changes: Mapping[ObjectKey, Slice | None]) -> None:
        """Record the current state of the slices that this controller manages."""
        for key, slice_ in changes.items():
            for service, known in self._slices.items():
                if service.namespace == key.namespace and key.name in known:
                    del known[key.name]
                    self._mark(service)
                    break
            if slice_ is not None:
                service = ObjectKey(
                    key.namespace, slice_.metadata.labels.get(SERVICE_NAME_LABEL, "")
                )
                self._slices[service][key.name] = slice_
                self._mark(service)

    def update_endpoints(self, changes: Mapping[ObjectKey, Endpoints | None]) -> None:
        """Record the current state of Endpoints, whichever client wrote them."""
        for key, endpoints in changes.items():
            if endpoints is None:
                self._endpoints.pop(key, None)
            else:
                self._endpoints[key] = endpoints
            self._mark(key)

    async def run(self) -> None:
        """Write differences until cancelled. Start this when all collections are known: with a
        partial view it would delete valid slices."""
        while True:
            await self._woken.wait()
            await asyncio.sleep(COALESCE_S)
            self._woken.clear()
            dirty, self._dirty = self._dirty, set()
            for key in sorted(dirty):
                self._in_conflict = False
                try:
                    await self._sync(key)
                    if self._in_conflict:
                        # A single conflict is normal and is retried at once. Against a server that
                        # reports a conflict each time, the back-off limits the request rate.
                        await asyncio.sleep(self._conflicts.next_s())
                    else:
                        self._conflicts.reset()
                except FairleadError as problem:
                    log.warning("endpoints", service=str(key), problem=str(problem))
                    await asyncio.sleep(RETRY_S)
                    self._mark(key)

    async def _sync(self, key: ObjectKey) -> None:
        service = self._services.get(key)
        await self._sync_slices(key, service)
        await self._sync_endpoints(key, service)

    async def _sync_slices(self, key: ObjectKey, service: Service | None) -> None:
        desired = (
            {} if service is None else plan_slices(service, self._pods[key.namespace].values())
        )
        known = self._slices[key]
        difference = compare(desired, known)
        try:
            for slice_ in difference.create:
                known[slice_.metadata.name] = await self._client.create(SLICES, slice_)
            for slice_ in difference.replace:
                name = slice_.metadata.name
                known[name] = await self._client.replace(SLICES, (key.namespace, name), slice_)
            for slice_ in difference.delete:
                known.pop(slice_.metadata.name, None)
                await self._client.delete(SLICES, (key.namespace, slice_.metadata.name))
        except (NotFound, Conflict) as problem:
            # The local copy is older than the server's.
            log.debug("endpoints", service=str(key), problem=str(problem))
            self._in_conflict = True
            await self._read_again(key)
        if service is None and not self._slices[key]:
            del self._slices[key]

    async def _sync_endpoints(self, key: ObjectKey, service: Service | None) -> None:
        """Write one Service's Endpoints. Endpoints of a Service without a selector belong to its
        owner, and so do Endpoints without the managed-by label whose Service does not exist yet."""
        known = self._endpoints.get(key)
        desired = (
            None if service is None else plan_endpoints(service, self._pods[key.namespace].values())
        )
        try:
            if desired is not None and known is None:
                self._endpoints[key] = await self._client.create(ENDPOINTS, desired)
            elif desired is not None and known is not None:
                if (known.metadata.labels, known.subsets or ()) != (
                    desired.metadata.labels,
                    desired.subsets,
                ):
                    version = known.metadata.resource_version
                    metadata = msgspec.structs.replace(desired.metadata, resource_version=version)
                    written = msgspec.structs.replace(desired, metadata=metadata)
                    self._endpoints[key] = await self._client.replace(ENDPOINTS, key, written)
            elif (
                service is None
                and known is not None
                and ENDPOINTS_MANAGED_BY_LABEL in known.metadata.labels
            ):
                self._endpoints.pop(key, None)
                await self._client.delete(ENDPOINTS, key)
        except (NotFound, Conflict) as problem:
            log.debug("endpoints", service=str(key), problem=str(problem))
            self._in_conflict = True
            self._endpoints.pop(key, None)
            with contextlib.suppress(NotFound):
                self._endpoints[key] = await self._client.get(ENDPOINTS, key)
            self._mark(key)

    async def _read_again(self, key: ObjectKey) -> None:
        """Read a Service's slices from the API server. The watch does not deliver a change of
        nothing but the resource version, and a write needs the current version."""
        selector = f"{SERVICE_NAME_LABEL}={key.name},{MANAGED_BY_LABEL}={MANAGER}"
        found = await self._client.list(SLICES, namespace=key.namespace, label_selector=selector)
        self._slices[key] = {slice_.metadata.name: slice_ for slice_ in found}
        self._mark(key)

    def _mark(self, key: ObjectKey) -> None:
        self._dirty.add(key)
        self._woken.set()
