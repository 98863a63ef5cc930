"""Show on each AddressPool how it is: counts, conditions, Events; and keep one that is in use from
going without a word.

In: the ledger, told by `changed` that it is another one. Out: the status of AddressPools by
server-side apply, written where it differs from what is shown; a finalizer, from the first address
that is given to the last that comes back. Invariants: one write for each thing that changed, at
most every `INTERVAL_S`; a pool that fails is tried again, ever more rarely, and holds up no other;
nothing is written when the fence does not let it. Pools of the configuration file are no objects
and show nothing."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec
import structlog

from fairlead.backoff import Backoff
from fairlead.drivers.newest import Newest
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder, stamp
from fairlead.kube.objects import Condition
from fairlead.kube.own import ADDRESS_POOLS, POOL_FINALIZER, AddressPool
from fairlead.plan.keeping import KeepLimits
from fairlead.plan.ledger import Ledger
from fairlead.plan.pool_status import READY, PoolCondition, PoolState, pool_states
from fairlead.roles.report import RECOVERED, lasted
from fairlead.state import State

log = structlog.get_logger()

FIELD_MANAGER = "fairlead-pools"
INTERVAL_S = 0.5
"""Counts are for people: many changes make one write."""
LAST_RETRY_S = 60.0
BELIEVED_S = 60.0
"""So long an answer counts before the watch shows it: a server that was restored may never show
it."""


class Failing:
    """A pool that could not be written: why, and when it is tried again."""

    def __init__(self) -> None:
        self.kind: type[FairleadError] | None = None
        self.again_at_s = 0.0
        self._backoff = Backoff(INTERVAL_S, LAST_RETRY_S)

    def failed(self, problem: FairleadError) -> bool:
        """Take note of one more failure. Answers whether it is another than the last."""
        wait_s = self._backoff.next_s(
            problem.retry_after_s if isinstance(problem, Unavailable) else 0.0
        )
        self.again_at_s = asyncio.get_running_loop().time() + wait_s
        news, self.kind = type(problem) is not self.kind, type(problem)
        return news


class PoolReports:
    """`run` is its life; call `changed` after each assignment."""

    def __init__(
        self,
        client: Client,
        state: State,
        ledger: Ledger,
        recorder: EventRecorder,
        limits: KeepLimits,
        *,
        fence: Callable[[], None],
    ) -> None:
        self._client = client
        self._state = state
        self._ledger = ledger
        self._recorder = recorder
        self._limits = limits
        self._fence = fence
        self._news = asyncio.Event()
        self._answers = Newest[str, AddressPool]()
        self._failing: dict[str, Failing] = {}

    def changed(self) -> None:
        """The ledger may be another one."""
        self._news.set()

    @property
    def remembered(self) -> set[str]:
        """The pools of which it is known what was written, or why it was not."""
        return {*self._answers.answered, *self._failing}

    async def run(self) -> None:
        believed_until_s = 0.0
        while True:
            await self._something_due()
            await asyncio.sleep(INTERVAL_S)
            self._news.clear()
            if (now_s := asyncio.get_running_loop().time()) > believed_until_s:
                self._answers.forget_all()
                believed_until_s = now_s + BELIEVED_S
            for name in self.remembered - self._state.pools.keys():
                self._answers.forget(name)
                self._failing.pop(name, None)
            await self._show_all()

    async def _something_due(self) -> None:
        """Wait for news, or for a pool that failed to be tried again."""
        again_at_s = min((each.again_at_s for each in self._failing.values()), default=None)
        try:
            async with asyncio.timeout_at(again_at_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _show_all(self) -> None:
        now_s = asyncio.get_running_loop().time()
        told: dict[str, FairleadError] = {}
        for name, wanted in pool_states(self._ledger, self._state.pools, self._limits).items():
            pool, failing = self._newest(name), self._failing.get(name)
            if pool is None or (failing is not None and now_s < failing.again_at_s):
                continue
            try:
                await self._show(pool, wanted)
                await self._hold(self._newest(name) or pool, wanted)
            except NotFound:
                self._answers.forget(name)  # it went meanwhile
            except FairleadError as problem:
                # Of a Conflict nobody needs to hear: the watch will show what it is now.
                if self._failing.setdefault(name, Failing()).failed(problem) and not isinstance(
                    problem, Conflict
                ):
                    told[name] = problem
                continue
            self._failing.pop(name, None)
        if told:
            first = min(told)
            log.warning(
                "status of pools not written",
                pools=len(told),
                first=first,
                problem=str(told[first]),
            )

    def _newest(self, name: str) -> AddressPool | None:
        """None: the watch shows it no more."""
        watched = self._state.pools.get(name)
        return self._answers.of(name, watched) if watched is not None else None

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
        self._answers.note(pool.metadata.name, answer)
        wrong = [each for each in wanted.conditions if _is_wrong(each)]
        for each in wrong:
            if _words(each) not in before:
                self._recorder.event_about(
                    ADDRESS_POOLS, pool, "Warning", each.reason, each.message
                )
        for shown in pool.status.conditions:
            if _is_wrong(shown) and shown.reason not in {each.reason for each in wrong}:
                passed = lasted(shown.last_transition_time or "", datetime.now(UTC))
                self._recorder.event_about(
                    ADDRESS_POOLS,
                    pool,
                    "Normal",
                    RECOVERED,
                    f"{shown.reason} no longer holds, after {passed}",
                )

    async def _hold(self, pool: AddressPool, wanted: PoolState) -> None:
        """Put the finalizer on, or take it off."""
        finalizers = pool.metadata.finalizers
        going = pool.metadata.deletion_timestamp is not None
        if wanted.in_use == (POOL_FINALIZER in finalizers) or (wanted.in_use and going):
            return
        others = [each for each in finalizers if each != POOL_FINALIZER]
        metadata = {
            "finalizers": [*others, POOL_FINALIZER] if wanted.in_use else others,
            "resourceVersion": pool.metadata.resource_version,
        }
        self._fence()
        answer = await self._client.patch(
            ADDRESS_POOLS, ("", pool.metadata.name), {"metadata": metadata}
        )
        self._answers.note(pool.metadata.name, answer)


def status_of(pool: AddressPool, wanted: PoolState, now: str) -> Mapping[str, object] | None:
    """The status as it should be; None if the pool shows it already. The time of a condition is
    that of its last turn."""
    shown = pool.status
    before = {each.type: each for each in shown.conditions}
    told = {(each.type, each.status, each.reason, each.message) for each in shown.conditions}
    counts = (
        (shown.assigned_ipv4, shown.assigned_ipv6),
        (shown.available_ipv4, shown.available_ipv6),
    )
    same = counts == (wanted.assigned, wanted.available) and (shown.kept_addresses, shown.kept) == (
        wanted.kept_addresses,
        wanted.kept,
    )
    if same and told == {_words(each) for each in wanted.conditions}:
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


def _words(condition: PoolCondition) -> tuple[str, str, str, str]:
    return condition.type, condition.status, condition.reason, condition.message
