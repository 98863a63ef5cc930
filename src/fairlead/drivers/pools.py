"""The driver of the status of AddressPools, and of the finalizer on pools that are in use.

In: the desired status of each pool. Out: the status by server-side apply, an Event when a problem
begins and when it ends, and the finalizer; each is written only if it differs from the present
state of the pool. Invariants: a pool that fails does not delay the others; nothing is written when
the fence raises."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from fairlead.drivers import Component
from fairlead.drivers.mutation_cache import MutationCache
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_POOLS, POOL_FINALIZER, AddressPool
from fairlead.kube.events import RECOVERED, EventRecorder, rounded_duration, stamp
from fairlead.kube.objects import Condition
from fairlead.model import Outcome
from fairlead.plan.pool_status import READY, PoolCondition, PoolState
from fairlead.state import State

FIELD_MANAGER = "fairlead-pools"


class DesiredPool(NamedTuple):
    """The desired state of the pool with this uid."""

    uid: str
    state: PoolState


class ShowPool(NamedTuple):
    """Write the status and the finalizer of a pool. `service` is the name of the pool, which is the
    key in its loop."""

    service: str
    wanted: DesiredPool

    def __str__(self) -> str:
        return f"update the status of AddressPool {self.service}"


class PoolDriver(Component):
    """Driver of the status and the finalizer of AddressPools."""

    name = "pools"

    def __init__(
        self, client: Client, state: State, recorder: EventRecorder, fence: Callable[[], None]
    ) -> None:
        self.answers = MutationCache[str, AddressPool]()
        self._client = client
        self._state = state
        self._recorder = recorder
        self._fence = fence

    def render(self, intents: Mapping[str, DesiredPool]) -> Mapping[str, DesiredPool]:
        return intents

    def diff(
        self, desired: Mapping[str, DesiredPool], actual: Mapping[str, AddressPool]
    ) -> Sequence[ShowPool]:
        """Return a step for each pool that exists and differs. A pool that is gone needs no
        step."""
        return [
            ShowPool(name, wanted)
            for name, wanted in desired.items()
            if (pool := actual.get(name)) is not None
            and (status_of(pool, wanted.state, "") or finalizers_of(pool, wanted.state) is not None)
        ]

    async def read(self, keys: Collection[str] | None) -> Mapping[str, AddressPool]:
        """Return the pools as the watch or the last write of this process shows them."""
        pools = self._state.pools
        if keys is None:
            self.answers.forget_all()
            return dict(pools)
        for gone in set(keys) - pools.keys():
            self.answers.forget(gone)
        return {name: self.answers.of(name, pools[name]) for name in keys if name in pools}

    async def apply(self, changes: Sequence[ShowPool]) -> Mapping[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for name, wanted in changes:
            try:
                for write in (self._show, self._set_finalizer):
                    if (pool := (await self.read([name])).get(name)) is not None:
                        await write(pool, wanted.state)
            except NotFound:
                self.answers.forget(name)  # the pool was deleted in the meantime
            except Conflict as problem:
                outcomes[name] = Outcome("waiting", str(problem))  # the watch will show it
            except FairleadError as problem:
                # Refused counts as unavailable too: the permission to write may be granted later.
                again_s = problem.retry_after_s if isinstance(problem, Unavailable) else 0.0
                outcomes[name] = Outcome("unavailable", str(problem), again_s=again_s)
        return outcomes

    async def _show(self, pool: AddressPool, wanted: PoolState) -> None:
        body = status_of(pool, wanted, stamp(datetime.now(UTC)))
        if body is None:
            return
        self._fence()
        before = {
            (each.type, each.status, each.reason, each.message) for each in pool.status.conditions
        }
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
        wrong = [each for each in wanted.conditions if _is_wrong(each)]
        for each in wrong:
            if _content(each) not in before:
                self._recorder.event_about(
                    ADDRESS_POOLS, pool, "Warning", each.reason, each.message
                )
        for shown in pool.status.conditions:
            if _is_wrong(shown) and shown.reason not in {each.reason for each in wrong}:
                passed = rounded_duration(shown.last_transition_time or "", datetime.now(UTC))
                self._recorder.event_about(
                    ADDRESS_POOLS,
                    pool,
                    "Normal",
                    RECOVERED,
                    f"{shown.reason} no longer holds, after {passed}",
                )

    async def _set_finalizer(self, pool: AddressPool, wanted: PoolState) -> None:
        """Add or remove the finalizer."""
        if (finalizers := finalizers_of(pool, wanted)) is None:
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
    before = {each.type: each for each in shown.conditions}
    present = {(each.type, each.status, each.reason, each.message) for each in shown.conditions}
    counts = (
        (shown.assigned_ipv4, shown.assigned_ipv6),
        (shown.available_ipv4, shown.available_ipv6),
    )
    same = counts == (wanted.assigned, wanted.available) and (shown.kept_addresses, shown.kept) == (
        wanted.kept_addresses,
        wanted.kept,
    )
    if same and present == {_content(each) for each in wanted.conditions}:
        return None
    conditions = []
    for each in wanted.conditions:
        old = before.get(each.type)
        since = old.last_transition_time if old is not None and old.status == each.status else None
        conditions.append(
            {
                "type": each.type,
                "status": each.status,
                "reason": each.reason,
                "message": each.message,
                "lastTransitionTime": since or now,
                "observedGeneration": pool.metadata.generation,
            }
        )
    return {
        "assignedIPv4": wanted.assigned[0],
        "assignedIPv6": wanted.assigned[1],
        "availableIPv4": wanted.available[0],
        "availableIPv6": wanted.available[1],
        "keptAddresses": wanted.kept_addresses,
        "kept": msgspec.to_builtins(wanted.kept),
        "conditions": conditions,
    }


def _is_wrong(condition: PoolCondition | Condition) -> bool:
    return condition.status == ("False" if condition.type == READY else "True")


def _content(condition: PoolCondition) -> tuple[str, str, str, str]:
    return condition.type, condition.status, condition.reason, condition.message
