"""The driver of the status of AddressPools, and of the finalizer on pools that are in use.

In: the desired status of each pool. Out: the status by server-side apply, an Event when a problem
begins and when it ends, and the finalizer; each is written only if it differs from the present
state of the pool. Invariants: a pool that fails does not delay the others; nothing is written when
the fence raises."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from fairlead.drivers import object_conditions
from fairlead.drivers.object_status import ObjectStatusDriver
from fairlead.kube.crds import ADDRESS_POOLS, POOL_FINALIZER, AddressPool
from fairlead.kube.events import stamp
from fairlead.plan.pool_status import PoolState

FIELD_MANAGER = "fairlead-pools"


class DesiredPool(NamedTuple):
    """The desired state of the pool with this uid."""

    uid: str
    state: PoolState


class PoolDriver(ObjectStatusDriver[AddressPool, DesiredPool]):
    """Driver of the status and the finalizer of AddressPools."""

    name = "pools"
    kind = ADDRESS_POOLS.kind

    def watched(self) -> Mapping[str, AddressPool]:
        return self._state.pools

    def differs(self, found: AddressPool, wanted: DesiredPool) -> bool:
        return (
            status_of(found, wanted.state, "") is not None
            or finalizers_of(found, wanted.state) is not None
        )

    def writes(self) -> Sequence[Callable[[AddressPool, DesiredPool], Awaitable[None]]]:
        return (self._show, self._set_finalizer)

    async def _show(self, pool: AddressPool, desired: DesiredPool) -> None:
        wanted = desired.state
        body = status_of(pool, wanted, stamp(datetime.now(UTC)))
        if body is None:
            return
        self._fence()
        key = ("", pool.metadata.name)
        answer = await self._client.apply(
            ADDRESS_POOLS,
            key,
            {"status": body},
            field_manager=FIELD_MANAGER,
            subresource="status",
            force=True,
        )
        self.answers.note(pool.metadata.name, answer)
        object_conditions.report(
            lambda *event: self._recorder.event_about(ADDRESS_POOLS, pool, *event),
            pool.status.conditions,
            wanted.conditions,
        )

    async def _set_finalizer(self, pool: AddressPool, desired: DesiredPool) -> None:
        """Add or remove the finalizer."""
        if (finalizers := finalizers_of(pool, desired.state)) is None:
            return
        metadata = {"finalizers": finalizers, "resourceVersion": pool.metadata.resource_version}
        self._fence()
        answer = await self._client.patch(
            ADDRESS_POOLS, ("", pool.metadata.name), {"metadata": metadata}
        )
        self.answers.note(pool.metadata.name, answer)


def finalizers_of(pool: AddressPool, wanted: PoolState) -> list[str] | None:
    """Return the finalizers that the pool should have; None if it has them."""
    finalizers = pool.metadata.finalizers
    going = pool.metadata.deletion_timestamp is not None
    if wanted.in_use == (POOL_FINALIZER in finalizers) or (wanted.in_use and going):
        return None
    others = [each for each in finalizers if each != POOL_FINALIZER]
    return [*others, POOL_FINALIZER] if wanted.in_use else others


def status_of(pool: AddressPool, wanted: PoolState, now: str) -> Mapping[str, object] | None:
    """Return the status that the pool should have; None if it has it. `lastTransitionTime` of a
    condition is the time at which its status last changed."""
    shown = pool.status
    counts = (
        (shown.assigned_ipv4, shown.assigned_ipv6),
        (shown.available_ipv4, shown.available_ipv6),
    )
    same = counts == (wanted.assigned, wanted.available) and (
        (shown.kept_addresses, shown.kept, shown.announce)
        == (wanted.kept_addresses, wanted.kept, wanted.announce)
    )
    if same and object_conditions.same(shown.conditions, wanted.conditions):
        return None
    announce = {} if wanted.announce is None else {"announce": wanted.announce}
    return {
        **announce,
        "assignedIPv4": wanted.assigned[0],
        "assignedIPv6": wanted.assigned[1],
        "availableIPv4": wanted.available[0],
        "availableIPv6": wanted.available[1],
        "keptAddresses": wanted.kept_addresses,
        "kept": msgspec.to_builtins(wanted.kept),
        "conditions": object_conditions.body_of(
            shown.conditions, wanted.conditions, pool.metadata.generation, now
        ),
    }
