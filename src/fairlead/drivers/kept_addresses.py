"""Decides which addresses are kept for deleted Services: applies the limits of `plan.keeping` to
the present state.

In: AddressGrants, namespaces, the configuration, the clock. Out: whether one more address is kept,
whether a kept address becomes free, and an Event for a Service whose address is not kept.
Invariant: a namespace that the watch does not show may exist, because the watch may lag behind. The
API server is queried before an address is freed for that reason."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from fairlead.drivers.grant_cache import GrantCache
from fairlead.errors import Conflict
from fairlead.kube.client import Client
from fairlead.kube.crds import AddressGrant, Holder
from fairlead.kube.events import Recorder, stamp
from fairlead.kube.objects import NAMESPACES, Namespace
from fairlead.model import ServiceKey
from fairlead.plan import keeping
from fairlead.plan.keeping import NOT_KEPT, KeptAddressLimits
from fairlead.state import State

NAME_LABEL = "kubernetes.io/metadata.name"
"""The API server sets this label on every namespace (KEP-2161)."""


class KeptAddresses:
    """Applies the limits on kept addresses.

    `deciding` is a lock: the caller holds it from `may_keep`, which counts the kept addresses of a
    namespace, until the next kept address is written."""

    def __init__(
        self,
        client: Client,
        state: State,
        grants: GrantCache,
        recorder: Recorder,
        limits: KeptAddressLimits,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.deciding = asyncio.Lock()
        self._client = client
        self._state = state
        self._grants = grants
        self._recorder = recorder
        self._limits = limits
        self._now = now

    @property
    def since(self) -> str:
        """The time to record for an address that is kept from now on."""
        return stamp(self._now())

    def expired(self, holder: Holder) -> str:
        """Return why the address is no longer kept for this holder, as far as the watch shows;
        empty while it is kept."""
        return keeping.expired(
            holder, self._state.namespace(holder.namespace), self._limits, self._now()
        )

    async def check_expired(self, holder: Holder) -> None:
        """Raise Conflict if the address is still kept for this holder, according to the API
        server."""
        namespace = await self._fetch_namespace(holder.namespace)
        if not keeping.expired(holder, namespace, self._limits, self._now()):
            raise Conflict(
                f"namespace {holder.namespace} exists, but the watch has not shown it yet"
            )

    async def may_keep(self, key: ServiceKey, uid: str, grant: AddressGrant) -> bool:
        """Return whether to keep the address of this Service, which is being deleted or is gone. If
        a limit forbids that, write an Event on the Service."""
        known = self._state.namespace(key.namespace)
        if known is None or known.metadata.deletion_timestamp is not None:
            known = await self._fetch_namespace(key.namespace)
            if known is None or known.metadata.deletion_timestamp is not None:
                return False
        if why := keeping.exceeded(key.namespace, self._kept_in(key.namespace), self._limits):
            self._recorder.event(
                key, uid, "Warning", NOT_KEPT, f"{grant.spec.address} is not kept: {why}"
            )
        return not why

    def _kept_in(self, namespace: str) -> int:
        keys = [key for key in self._grants.holders() if key.namespace == namespace]
        holders = [grant.holder(key) for key in keys for grant in self._grants.of(key)]
        return sum(holder is not None and not holder.uid for holder in holders)

    async def _fetch_namespace(self, namespace: str) -> Namespace | None:
        found = await self._client.list(NAMESPACES, label_selector=f"{NAME_LABEL}={namespace}")
        return found[0] if found else None
