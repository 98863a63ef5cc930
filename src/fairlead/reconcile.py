"""The loop that every role runs: dirty keys -> plan -> drivers -> outcomes.

In: a State that marks Services as dirty, a pure plan, a chain of drivers. Out: reports of the
outcome of each Service. A Service with an intent passes the chain in its order (for example rules
before the health port that announces them). A Service without an intent passes it in reverse order:
a driver removes the Service only after the next driver of the chain has removed everything of the
Service.

The loop is level-triggered: a key names a Service, but not what happened to it, and every step may
run twice. Failures of different Services are kept apart: a batch that a driver refuses is split in
halves until the faulty Service is alone, and a Service that is unavailable is retried with
back-off. A pass waits only for a moment for a driver that may hang (`Driver.patience_s`): its call
goes on, the other drivers go on, and its Services are reconciled again when it ends.

At its start and every `audit_interval_s` the loop plans and reads everything again, and applies the
differences. So it repairs what others have changed, and finds objects that no Service needs any
more. The first pass carries all differences of the start together, so that a driver can replace in
one step everything that a previous process left. Any exception other than FairleadError is a bug
and ends the process."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from fairlead.backoff import Backoff
from fairlead.drivers import Change, Component, Driver, Key
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.model import DONE, Finding, Outcome
from fairlead.patience import Patience
from fairlead.state import DirtyKeys, Subscribers
from fairlead.turns import in_background, in_turns, parts

log = structlog.get_logger()

KeyT = TypeVar("KeyT", bound=Key)
IntentT = TypeVar("IntentT")

Plan = Callable[[Collection[KeyT]], Mapping[KeyT, IntentT | Refused]]
"""Return the intents of these Services. A Service that needs nothing is absent from the result. The
result may include other Services that the plan affects."""

Report = Callable[[Mapping[KeyT, IntentT], Mapping[KeyT, Outcome]], None]
"""Called with the intents and outcomes of Services that were processed. A Service that is done and
has no intent is removed."""

Turns = Callable[[Iterable[Sequence[KeyT]]], AsyncIterator[Sequence[KeyT]]]
"""How slices of work are scheduled; see `turns`."""

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 60.0
PATIENCE_EACH_S = 0.001
"""How much longer a pass waits for each Service for a driver that may hang."""
THREAD_THRESHOLD = 100
"""The changes of more Services than this are computed in a thread, because other tasks would wait
for 10 ms or more."""
MAX_SPLITS = 32
"""How many times the parts of one batch are halved while the other side is unavailable: the failure
may concern some Services or all."""


class Pace(NamedTuple):
    """How a loop schedules its work.

    parallel: the number of concurrent passes, never two on the same Service; and the number of
    concurrent `apply` calls of a driver that takes fewer Services than a pass carries. coalesce_s:
    how long after the previous pass a change waits for further changes. idle_delay_s: the delay
    before a pass after an idle time, for a loop that must not delay other loops. plan_slice: the
    number of Services that are planned, or compared by an audit, before other tasks run. It is only
    for plans in which the result for a Service does not depend on the others in the call. 0: all of
    them."""

    parallel: int = 1
    coalesce_s: float = 0.01
    idle_delay_s: float = 0.0
    audit_interval_s: float = 60.0
    plan_slice: int = 0


DEFAULT_PACE = Pace()


class Source(Protocol[KeyT]):
    """The source of the Services of a loop, mostly a State: the Services, whether all of them are
    known, and which of them are dirty."""

    @property
    def has_synced(self) -> asyncio.Event: ...

    @property
    def services(self) -> Collection[KeyT]: ...

    @property
    def subscribers(self) -> Subscribers[KeyT]: ...


class Loop(Component, Generic[KeyT, IntentT]):
    """A loop that keeps what the drivers serve equal to the plan, from `run` until it is cancelled.

    A pass carries as many Services as the driver with the largest `batch` in the chain takes at
    once; the other drivers get them in smaller parts. large: whether planning and applying a
    Service takes so much time that other Services must not wait for it. Large Services are planned
    in a thread, one after the other, and each has its own pass, in parallel to the passes of the
    other Services. Only the first pass of a start handles all Services together."""

    def __init__(
        self,
        name: str,
        state: Source[KeyT],
        plan: Plan[KeyT, IntentT],
        drivers: Sequence[Driver[KeyT, IntentT, Any, Any, Any]],
        report: Report[KeyT, IntentT],
        *,
        pace: Pace = DEFAULT_PACE,
        large: Callable[[KeyT], bool] = lambda _: False,
    ) -> None:
        self.name = name
        self.settled = asyncio.Event()
        """Set once everything has been read, and all differences that were found then have been
        processed."""
        self.drift = 0
        """The number of Services that later audits found to differ from the plan."""
        self.failing: dict[KeyT, tuple[str, str]] = {}
        """The Services for which a driver failed, with the name of the driver and the state of the
        outcome."""
        self.undone: set[KeyT] = set()
        """The Services whose last reported outcome is not `done`, refused ones included. A driver
        may not know what it serves for them."""
        self._state = state
        self._plan = plan
        self._drivers = drivers
        self._report_outcomes = report
        self._pace = pace
        batches = [driver.batch for driver in drivers]
        self._batch = max(batches) if batches and all(batches) else 0
        """The number of Services that one pass carries; 0: all Services that are ready."""
        self._ready: dict[KeyT, IntentT | Refused | None] = {}
        self._large = large
        self._ready_large: dict[KeyT, None] = {}
        """The large Services to plan and apply, in their order."""
        self._were_large: set[KeyT] = set()
        """The Services that were large when they were last applied."""
        self._some_ready = asyncio.Event()
        self._busy: set[KeyT] = set()
        self._planned_since: set[KeyT] = set()
        """The Services that were planned since the last audit began, or whose pass had not ended
        when it began."""
        self._at_start: set[KeyT] | None = None
        self._compared = asyncio.Event()
        self._backoffs: dict[KeyT, Backoff] = {}
        self._retries: dict[KeyT, asyncio.TimerHandle] = {}
        self._requeues: dict[KeyT, asyncio.TimerHandle] = {}
        """Timers of Services that are done, but for which a driver has work to do at a later time.
        """
        self._patience: dict[str, Patience[KeyT, Outcome]] = {}
        """The calls of the drivers that may hang, by name."""
        self._unreported: dict[KeyT, tuple[Finding, ...]] = {}
        """The notes of calls that no pass has waited for."""

    async def run(self) -> None:
        await self._state.has_synced.wait()
        try:
            with self._state.subscribers.subscription() as dirty:
                async with asyncio.TaskGroup() as group:
                    self._patience = {
                        driver.name: self._patience_for(driver.name, group, dirty)
                        for driver in self._drivers
                        if driver.patience_s
                    }
                    group.create_task(self._audit_forever(dirty), name=f"{self.name} audit")
                    group.create_task(self._plan_forever(dirty), name=f"{self.name} plan")
                    for number in range(self._pace.parallel):
                        group.create_task(self._work_forever(dirty), name=f"{self.name} {number}")
                    group.create_task(self._work_large_forever(dirty), name=f"{self.name} large")
        finally:
            for timer in (*self._retries.values(), *self._requeues.values()):
                timer.cancel()

    async def _plan_forever(self, dirty: DirtyKeys[KeyT]) -> None:
        """Plan dirty Services. A Service that is still waiting for its pass gets the new intent."""
        while True:
            keys = await dirty.take(self._pace.coalesce_s, self._pace.idle_delay_s)
            self._planned_since |= keys
            if alone := sorted(key for key in keys if self._is_large(key)):
                self._queue_alone(alone)
                keys = keys.difference(alone)
            planned = await self._plan_all(sorted(keys), in_turns)
            # An audit may have begun between two slices, and have cleared the set.
            self._planned_since |= keys
            dirty.mark(planned.keys() - keys)
            self._ready |= {key: planned.get(key) for key in keys}
            self._some_ready.set()

    def _is_large(self, key: KeyT) -> bool:
        """Return whether the Service is large, or was when it was last applied: removing its former
        state takes as long."""
        return self._large(key) or key in self._were_large

    def _queue_alone(self, keys: Iterable[KeyT]) -> None:
        for key in keys:
            # The Service may have been planned before it became large.
            self._ready.pop(key, None)
            self._ready_large[key] = None
        self._some_ready.set()

    async def _work_forever(self, dirty: DirtyKeys[KeyT]) -> None:
        await self._compared.wait()
        while True:
            batch = self._next_batch()
            if not batch:
                self._some_ready.clear()
                await self._some_ready.wait()
                continue
            self._busy |= batch.keys()
            try:
                await self._pass(batch, dirty)
            finally:
                self._busy -= batch.keys()
                self._some_ready.set()

    async def _work_large_forever(self, dirty: DirtyKeys[KeyT]) -> None:
        """Plan and apply large Services, one after the other."""
        await self._compared.wait()
        while True:
            key = next((key for key in self._ready_large if key not in self._busy), None)
            if key is None:
                self._some_ready.clear()
                await self._some_ready.wait()
                continue
            del self._ready_large[key]
            self._busy.add(key)
            try:
                planned = await asyncio.to_thread(self._plan, [key])
                await self._pass({key: planned.get(key)}, dirty)
            finally:
                self._busy.discard(key)
                self._some_ready.set()
            if self._large(key):
                self._were_large.add(key)
            else:
                self._were_large.discard(key)

    def _next_batch(self) -> Mapping[KeyT, IntentT | Refused | None]:
        free = (key for key in self._ready if key not in self._busy)
        keys = list(islice(free, self._batch or None))
        batch = {key: self._ready.pop(key) for key in keys}
        # The first pass also carries large Services.
        self._were_large.update(filter(self._large, batch))
        return batch

    async def _audit_forever(self, dirty: DirtyKeys[KeyT]) -> None:
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            try:
                await self._audit(dirty)
            except FairleadError as error:
                log.warning("audit failed", loop=self.name, error=str(error))
                await asyncio.sleep(backoff.next_s())
            else:
                if any(driver.read_incomplete for driver in self._drivers):
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                await asyncio.sleep(self._pace.audit_interval_s * random.uniform(0.9, 1.1))

    async def _audit(self, dirty: DirtyKeys[KeyT]) -> None:
        """Compare everything with the plan, and apply the Services that differ. Report the other
        Services as done."""
        everything = list(self._state.services)
        # The role is not ready before the first audit, so only later audits run in the background.
        turns = in_background if self._compared.is_set() else in_turns
        # For these Services, this audit may read the state from before their pass.
        self._planned_since = {*self._busy, *self._ready, *self._ready_large}
        planned = await self._plan_all(everything, turns)
        intents = {
            key: intent for key, intent in planned.items() if not isinstance(intent, Refused)
        }
        refused = {
            key: _outcome_of(error) for key, error in planned.items() if isinstance(error, Refused)
        }
        differ: set[KeyT] = set()
        for driver in self._drivers:
            actual = {
                key: value for key, value in (await driver.read(None)).items() if key not in refused
            }
            if not self._batch and not self._compared.is_set():
                # The first pass carries all Services and computes their changes anyway, so they are
                # not computed twice.
                differ |= intents.keys() | actual.keys()
                continue
            differ |= await self._differing(driver, intents, actual, turns)
        # A later pass reports the outcome of its Services itself. No pass has begun before the
        # first audit has compared everything.
        later = self._in_passes() if self._compared.is_set() else set()
        self._report({}, {key: each for key, each in refused.items() if key not in later})
        async for some in turns(
            parts(list(intents.keys() - differ), self._pace.plan_slice or len(intents) or 1)
        ):
            later = self._in_passes()
            unchanged_keys = [key for key in some if key not in later]
            for key in unchanged_keys:
                self.failing.pop(key, None)
            self._report(
                {key: intents[key] for key in unchanged_keys}, dict.fromkeys(unchanged_keys, DONE)
            )
        # A Service is not planned again for its pass unless its objects may have changed since the
        # audit planned it.
        unchanged = {
            key for key in differ.intersection(everything) - self._planned_since if key not in dirty
        }
        alone = {key for key in unchanged if self._compared.is_set() and self._is_large(key)}
        self._queue_alone(sorted(alone))
        self._ready |= {key: planned.get(key) for key in unchanged - alone}
        # A Service that has changed meanwhile, or whose last pass failed, differs as well, but in
        # neither case have others changed the data plane. A Service that a driver refuses fails
        # without a retry.
        failed = self._retries.keys() | self.failing.keys()
        drifted = {key for key in differ - self._planned_since - failed if key not in dirty}
        if not self._compared.is_set():
            self._add_changed(dirty, differ)
        self._some_ready.set()
        # This comes before the keys are marked: the first pass applies the intents, and the next
        # pass removes what no Service needs.
        self._compared.set()
        dirty.mark(differ - unchanged)
        if self._at_start is None:
            self._at_start = set(differ)
            self._record_start(())
        elif drifted:
            self.drift += len(drifted)
            log.warning(
                "audit found differences from the plan",
                loop=self.name,
                services=len(drifted),
                first=str(min(drifted)),
            )

    def _report(self, intents: Mapping[KeyT, IntentT], outcomes: Mapping[KeyT, Outcome]) -> None:
        """Report the outcomes of these Services."""
        for key, outcome in outcomes.items():
            if outcome.state == "done":
                self.undone.discard(key)
            else:
                self.undone.add(key)
        self._report_outcomes(intents, outcomes)

    def _in_passes(self) -> set[KeyT]:
        """Return the Services that were planned since the last audit began, or that wait for their
        pass or are in it."""
        return {*self._busy, *self._ready, *self._ready_large, *self._planned_since}

    async def _plan_all(
        self, keys: Sequence[KeyT], turns: Turns[KeyT]
    ) -> dict[KeyT, IntentT | Refused]:
        """Return the plan of many Services. If the plan allows it, the Services are planned in
        slices, between which other tasks run: 10,000 Services take a second."""
        if not self._pace.plan_slice:
            return dict(self._plan(keys))
        planned: dict[KeyT, IntentT | Refused] = {}
        large = set(filter(self._is_large, keys))
        for key in large:
            planned |= await asyncio.to_thread(self._plan, [key])
        async for some in turns(
            parts([key for key in keys if key not in large], self._pace.plan_slice)
        ):
            planned |= self._plan(some)
        return planned

    async def _differing(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        intents: Mapping[KeyT, IntentT],
        actual: Mapping[KeyT, Any],
        turns: Turns[KeyT],
    ) -> set[KeyT]:
        """Return the Services that differ from the plan. If the comparison cannot be made in
        slices, it runs in a thread: it takes a second for 10,000 Services, and probes and watches
        must continue meanwhile."""
        if not self._pace.plan_slice:
            return {
                change.service
                for change in await asyncio.to_thread(_changes, driver, intents, actual)
            }
        differ: set[KeyT] = set()
        keys = intents.keys() | actual.keys()
        large = set(filter(self._is_large, keys))
        async for some in turns(parts([*keys - large, *large], self._pace.plan_slice)):
            wanted, present = (
                {key: each[key] for key in some if key in each} for each in (intents, actual)
            )
            if large.isdisjoint(some):
                changes = _changes(driver, wanted, present)
            else:
                changes = await asyncio.to_thread(_changes, driver, wanted, present)
            differ.update(change.service for change in changes)
        return differ

    def _add_changed(self, dirty: DirtyKeys[KeyT], differ: Collection[KeyT]) -> None:
        """Add the Services that have changed since they were planned to the first pass, in their
        present form."""
        changed = [key for key in differ if key in dirty and key not in self._ready]
        planned = self._plan(changed)
        dirty.mark(planned.keys() - set(changed))
        self._ready |= {key: planned.get(key) for key in changed}

    def _record_start(self, done: Collection[KeyT]) -> None:
        if self._at_start is not None and not self.settled.is_set():
            self._at_start.difference_update(done)
            if not self._at_start:
                self.settled.set()

    async def _pass(
        self, batch: Mapping[KeyT, IntentT | Refused | None], dirty: DirtyKeys[KeyT]
    ) -> None:
        """Apply the plan of these Services. A refused Service keeps its present state, because a
        mistake in an object must not interrupt its traffic."""
        outcomes = {
            key: _outcome_of(each) for key, each in batch.items() if isinstance(each, Refused)
        }
        intents = {
            key: each
            for key, each in batch.items()
            if each is not None and not isinstance(each, Refused)
        }
        gone = {key for key, each in batch.items() if each is None}
        for key in self._unreported.keys() & batch.keys():
            _join(outcomes, {key: Outcome("done", notes=self._unreported.pop(key))})
        # Removals come first, because another Service may need what they release (an address, a
        # port).
        for driver in reversed(self._drivers):
            await self._apply_driver(driver, gone, {}, outcomes, dirty)
        await self._withdraw(intents, outcomes, dirty)
        for driver in self._drivers:
            await self._apply_driver(driver, intents.keys(), intents, outcomes, dirty)
        self._report(intents, {key: outcomes.get(key, DONE) for key in batch})
        self._schedule(batch, outcomes, dirty)
        self._record_start(batch.keys())

    async def _withdraw(
        self,
        intents: Mapping[KeyT, IntentT],
        outcomes: dict[KeyT, Outcome],
        dirty: DirtyKeys[KeyT],
    ) -> None:
        """Take back what these Services no longer need, before anything that serves it changes. An
        address must not be announced any more when the tables for it are removed. Of the outcomes
        only the notes count, which a driver returns once: a failure, or a driver that takes too
        long, is reported when the driver is applied."""
        for driver in reversed(self._drivers):
            if not driver.withdraws_first:
                continue
            for some in parts(list(intents), driver.batch or len(intents) or 1):
                try:
                    actual = await driver.read(some)
                except FairleadError:
                    continue
                changes = driver.withdrawals({key: intents[key] for key in some}, actual)
                if changes:
                    reported = await self._apply(driver, changes, dirty)
                    notes = {key: each.notes for key, each in reported.items() if each.notes}
                    _join(
                        outcomes, {key: Outcome("done", notes=each) for key, each in notes.items()}
                    )

    async def _apply_driver(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        keys: Collection[KeyT],
        intents: Mapping[KeyT, IntentT],
        outcomes: dict[KeyT, Outcome],
        dirty: DirtyKeys[KeyT],
    ) -> None:
        """Apply one driver, for the Services that the drivers before it serve at least in part. A
        driver removes a Service only after the drivers that follow it in the chain have removed
        everything of the Service."""
        keys = [key for key in keys if _passes(outcomes.get(key, DONE), wanted=key in intents)]
        waiting = parts(keys, driver.batch or len(keys) or 1)

        async def work() -> None:
            for some in waiting:
                await self._apply_batch(driver, some, intents, outcomes, dirty)

        if len(keys) <= (driver.batch or len(keys)):
            await work()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(self._pace.parallel):
                group.create_task(work())

    async def _apply_batch(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        keys: Sequence[KeyT],
        intents: Mapping[KeyT, IntentT],
        outcomes: dict[KeyT, Outcome],
        dirty: DirtyKeys[KeyT],
    ) -> None:
        """Apply one driver to one batch of Services."""
        try:
            actual = await driver.read(keys)
        except FairleadError as error:
            _join(outcomes, dict.fromkeys(keys, _outcome_of(error)))
            return
        wanted = {key: intents[key] for key in keys if key in intents}
        if len(keys) > THREAD_THRESHOLD or any(map(self._is_large, keys)):
            changes = await asyncio.to_thread(_changes, driver, wanted, actual)
        else:
            changes = _changes(driver, wanted, actual)
        if changes:
            _join(outcomes, await self._apply(driver, changes, dirty))

    async def _apply(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        changes: Sequence[Change[KeyT]],
        dirty: DirtyKeys[KeyT],
    ) -> dict[KeyT, Outcome]:
        """Apply the changes. Return the outcomes of the Services that are not done, or about which
        the driver has something to report. If a driver that may hang takes too long, return for
        each Service the error of its previous call that took too long, or else an outcome which
        says that the change has not ended yet."""
        if not driver.patience_s:
            return await self._apply_now(driver, changes, dirty)
        patience = self._patience[driver.name]
        services = {change.service for change in changes}
        wait_s = driver.patience_s + PATIENCE_EACH_S * len(services)
        work = partial(self._apply_now, driver, changes, dirty)
        if (found := await patience.call(services, work, wait_s)) is not None:
            return dict(found)
        late = Outcome(
            "unavailable",
            f"the change of its announcement ({driver.name}) has begun and has not ended yet",
            in_part=True,
            coarse=True,
        )
        failed = {
            key: msgspec.structs.replace(each, notes=())
            for key, each in patience.unread.items()
            if each.state != "done"
        }
        outcomes = {key: failed.get(key, late) for key in services}
        self._log_failures(driver.name, outcomes)
        return outcomes

    def _patience_for(
        self, name: str, group: asyncio.TaskGroup, dirty: DirtyKeys[KeyT]
    ) -> Patience[KeyT, Outcome]:
        """Return the calls of a driver that may hang. The Services of a call for which no pass has
        waited are reconciled again."""

        def late(keys: Collection[KeyT]) -> None:
            for key, outcome in patience.unread.items():
                if outcome.notes:
                    self._unreported[key] = self._unreported.get(key, ()) + outcome.notes
            dirty.mark(keys)

        patience = Patience[KeyT, Outcome](name, group, late)
        return patience

    async def _apply_now(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        changes: Sequence[Change[KeyT]],
        dirty: DirtyKeys[KeyT],
    ) -> dict[KeyT, Outcome]:
        """Apply the changes. If they fail together, split them in halves and retry."""
        outcomes: dict[KeyT, Outcome] = {}
        groups = deque([changes])
        splits = 0
        while groups:
            group = groups.popleft()
            services = sorted({change.service for change in group})
            try:
                reported = await driver.apply(group)
            except FairleadError as error:
                if len(services) > 1 and (isinstance(error, Refused) or splits < MAX_SPLITS):
                    splits += 1
                    half = set(services[: len(services) // 2])
                    groups.append([change for change in group if change.service in half])
                    groups.append([change for change in group if change.service not in half])
                    continue
                reported = dict.fromkeys(services, _outcome_of(error))
            else:
                log.info(
                    "applied",
                    loop=self.name,
                    driver=driver.name,
                    changes=len(group),
                    first=str(services[0]),
                )
            for key, outcome in reported.items():
                if outcome.state != "done" or outcome.notes:
                    outcomes[key] = outcome
                if outcome.state == "done" and outcome.again_s:
                    self._requeue(key, outcome.again_s, dirty)
        self._log_failures(driver.name, outcomes)
        return outcomes

    def _log_failures(self, driver: str, outcomes: Mapping[KeyT, Outcome]) -> None:
        """Log failures, each once until it changes or ends."""
        failed = {
            key: each
            for key, each in outcomes.items()
            if each.state in ("refused", "unavailable")
            and self.failing.get(key) != (driver, each.state)
        }
        if failed:
            self.failing |= {key: (driver, each.state) for key, each in failed.items()}
            key, outcome = min(failed.items())
            log.warning(
                "not applied",
                driver=driver,
                services=len(failed),
                first=str(key),
                why=outcome.message,
            )

    def _requeue(self, key: KeyT, delay_s: float, dirty: DirtyKeys[KeyT]) -> None:
        """Mark the Service as dirty after this delay. Later passes do not cancel the timer, because
        the driver need not request it again."""
        if (handle := self._requeues.pop(key, None)) is not None:
            handle.cancel()
        self._requeues[key] = asyncio.get_running_loop().call_later(delay_s, dirty.mark, (key,))

    def _schedule(
        self, keys: Collection[KeyT], outcomes: Mapping[KeyT, Outcome], dirty: DirtyKeys[KeyT]
    ) -> None:
        for key in keys:
            if (handle := self._retries.pop(key, None)) is not None:
                handle.cancel()
            outcome = outcomes.get(key, DONE)
            if outcome.state == "done":
                self.failing.pop(key, None)
            if outcome.state in ("done", "refused"):
                self._backoffs.pop(key, None)
                continue
            if outcome.state == "waiting" and outcome.again_s:
                delay_s = outcome.again_s
            else:
                delay_s = self._backoffs.setdefault(
                    key, Backoff(FIRST_RETRY_S, LAST_RETRY_S)
                ).next_s(outcome.again_s)
            self._retries[key] = asyncio.get_running_loop().call_later(delay_s, dirty.mark, (key,))


def _passes(outcome: Outcome, *, wanted: bool) -> bool:
    """Return whether the next driver gets a Service that has this outcome from the previous
    drivers."""
    return outcome.state == "done" or (wanted and outcome.in_part)


def _join(outcomes: dict[KeyT, Outcome], later: Mapping[KeyT, Outcome]) -> None:
    """Combine the outcomes with the outcomes of the next driver."""
    for key, outcome in later.items():
        outcomes[key] = outcomes[key].joined(outcome) if key in outcomes else outcome


def _changes(
    driver: Driver[KeyT, IntentT, Any, Any, Any],
    intents: Mapping[KeyT, IntentT],
    actual: Mapping[KeyT, Any],
) -> Sequence[Change[KeyT]]:
    return driver.diff(driver.render(intents), actual)


def _outcome_of(error: FairleadError) -> Outcome:
    match error:
        case Refused():
            return Outcome("refused", str(error))
        case Conflict():
            # A conflict is resolved by reading again, so it is not reported to users.
            return Outcome("waiting", str(error))
        case Unavailable():
            return Outcome("unavailable", str(error), again_s=error.retry_after_s)
        case _:
            return Outcome("unavailable", str(error))
