"""The loop that every role runs: dirty keys -> plan -> drivers -> outcomes.

In: a State that marks Services dirty, a plan (pure), a chain of drivers. Out: reports of what
became of each Service. What is wanted goes through the chain in its order (rules before the health
port that announces them); what is wanted no more goes through it backwards, each driver seeing only
what the one before it has finished with. The loop is level-triggered: a key says only where to
look; every step may run twice. Failures are kept apart: a batch that a driver refuses is halved
until the Service at fault stands alone, what is unavailable is tried again with back-off. At its
start and every `audit_interval_s` the loop plans and reads everything anew and brings what differs,
so that what others changed behind our back is put right, and what nobody wants any more is found.
The first pass carries all that differs at the start: a driver may put what it is first given as one
whole in the place of what a predecessor left. Any exception but FairleadError is a bug and ends the
process."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import structlog

from fairlead.backoff import Backoff
from fairlead.drivers import Change, Component, Driver, Key
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.model import DONE, Outcome
from fairlead.state import DirtyKeys, Subscribers
from fairlead.turns import gently, in_turns, parts

log = structlog.get_logger()

KeyT = TypeVar("KeyT", bound=Key)
IntentT = TypeVar("IntentT")

Plan = Callable[[Collection[KeyT]], Mapping[KeyT, IntentT | Refused]]
"""Intents of these Services; a Service that needs nothing is left out. Others that the plan finds
touched may come too."""

Report = Callable[[Mapping[KeyT, IntentT], Mapping[KeyT, Outcome]], None]
"""Told the intent and the outcome of every Service that was looked at; one that is done without an
intent is gone."""

Turns = Callable[[Iterable[Sequence[KeyT]]], AsyncIterator[Sequence[KeyT]]]
"""How slices of work follow one another; see `turns`."""

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 60.0
MOST_AT_ONCE = 100
"""The steps for more Services than that are found in a thread: so long, ten milliseconds or so,
others wait."""
MOST_SPLITS = 32
"""How often a batch is halved because the other side is unavailable: for some Services, or
altogether."""


class Pace(NamedTuple):
    """How a loop goes about its work.

    parallel: how many passes run at once, never two on the same Service; and how many `apply`s of a
    driver run at once, where it takes fewer Services than a pass carries. coalesce_s: how long a
    change waits for others after the one before. patience_s: how long a loop whose work must not
    hold up others waits also after quiet. plan_slice: how many Services are planned, and compared
    by audits, in one go, where the plan of one does not depend on which others it is made with;
    then others have their turn. 0: all of them."""

    parallel: int = 1
    coalesce_s: float = 0.01
    patience_s: float = 0.0
    audit_interval_s: float = 60.0
    plan_slice: int = 0


USUAL = Pace()


class Source(Protocol[KeyT]):
    """Where Services come from, mostly a State: which there are, whether all are known, and which
    are dirty."""

    @property
    def whole(self) -> asyncio.Event: ...

    @property
    def services(self) -> Collection[KeyT]: ...

    @property
    def subscribers(self) -> Subscribers[KeyT]: ...


class Loop(Component, Generic[KeyT, IntentT]):
    """Keeps what the drivers serve equal to the plan, from `run` until it is cancelled.

    A pass carries as many Services as the driver with the largest `batch` in the chain takes at
    once; the other drivers get them in smaller parts. large: whether planning and applying a
    Service takes so long that others must not wait for it. Such Services are planned in a thread,
    one after the other, and each has its own pass, in parallel to the pass of all the others. Only
    the first pass of a start handles all Services together."""

    def __init__(
        self,
        name: str,
        state: Source[KeyT],
        plan: Plan[KeyT, IntentT],
        drivers: Sequence[Driver[KeyT, IntentT, Any, Any, Any]],
        report: Report[KeyT, IntentT],
        *,
        pace: Pace = USUAL,
        large: Callable[[KeyT], bool] = lambda _: False,
    ) -> None:
        self.name = name
        self.settled = asyncio.Event()
        """Set once everything has been read, and all that differed then has been looked at."""
        self.drift = 0
        """How many Services later audits found to differ from what was planned."""
        self.failing: dict[KeyT, tuple[str, str]] = {}
        """The Services that a driver failed on, with its name and the state of the outcome."""
        self._state = state
        self._plan = plan
        self._drivers = drivers
        self._report = report
        self._pace = pace
        batches = [driver.batch for driver in drivers]
        self._batch = max(batches) if batches and all(batches) else 0
        """How many Services one pass carries; 0: all that are ready."""
        self._ready: dict[KeyT, IntentT | Refused | None] = {}
        self._large = large
        self._ready_alone: dict[KeyT, None] = {}
        """Large Services to plan and apply, in their order, and Services that were large when they
        were last applied."""
        self._were_large: set[KeyT] = set()
        self._some_ready = asyncio.Event()
        self._busy: set[KeyT] = set()
        self._planned_since: set[KeyT] = (
            set()
        )  # since the last audit began, or not brought yet when it did
        self._at_start: set[KeyT] | None = None
        self._compared = asyncio.Event()
        self._backoffs: dict[KeyT, Backoff] = {}
        self._retries: dict[KeyT, asyncio.TimerHandle] = {}
        self._looks: dict[KeyT, asyncio.TimerHandle] = {}
        """Services that are done, and where a driver has something to do by itself at some time."""

    async def run(self) -> None:
        await self._state.whole.wait()
        try:
            with self._state.subscribers.subscription() as dirty:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._audit_for_ever(dirty), name=f"{self.name} audit")
                    group.create_task(self._plan_for_ever(dirty), name=f"{self.name} plan")
                    for number in range(self._pace.parallel):
                        group.create_task(self._work_for_ever(dirty), name=f"{self.name} {number}")
                    group.create_task(self._work_alone_for_ever(dirty), name=f"{self.name} large")
        finally:
            for timer in (*self._retries.values(), *self._looks.values()):
                timer.cancel()

    async def _plan_for_ever(self, dirty: DirtyKeys[KeyT]) -> None:
        """Plan what is dirty. A Service that waits for its pass gets the newest intent."""
        while True:
            keys = await dirty.take(self._pace.coalesce_s, self._pace.patience_s)
            self._planned_since |= keys
            if alone := sorted(key for key in keys if self._is_large(key)):
                self._let_wait_alone(alone)
                keys = keys.difference(alone)
            planned = await self._plan_all(sorted(keys), in_turns)
            self._planned_since |= keys  # an audit may have begun between two slices
            dirty.mark(planned.keys() - keys)
            self._ready |= {key: planned.get(key) for key in keys}
            self._some_ready.set()

    def _is_large(self, key: KeyT) -> bool:
        """Whether the Service is large, or was: removing what it had is as much work."""
        return self._large(key) or key in self._were_large

    def _let_wait_alone(self, keys: Iterable[KeyT]) -> None:
        for key in keys:
            self._ready.pop(key, None)  # planned before the Service was large
            self._ready_alone[key] = None
        self._some_ready.set()

    async def _work_for_ever(self, dirty: DirtyKeys[KeyT]) -> None:
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

    async def _work_alone_for_ever(self, dirty: DirtyKeys[KeyT]) -> None:
        """Plan and apply large Services, one after the other."""
        await self._compared.wait()
        while True:
            key = next((key for key in self._ready_alone if key not in self._busy), None)
            if key is None:
                self._some_ready.clear()
                await self._some_ready.wait()
                continue
            del self._ready_alone[key]
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
        self._were_large.update(filter(self._large, batch))  # large Services of the first pass
        return batch

    async def _audit_for_ever(self, dirty: DirtyKeys[KeyT]) -> None:
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
        """Compare everything with the plan; bring the Services that differ. Those that do not are
        reported as done."""
        everything = list(self._state.services)
        turns = (
            gently if self._compared.is_set() else in_turns
        )  # a start is waited for, later audits are not
        # The state that this audit reads of these Services may be from before their pass.
        self._planned_since = {*self._busy, *self._ready, *self._ready_alone}
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
                # The one pass of a start that carries all has to find the steps anyway, and once is
                # enough.
                differ |= intents.keys() | actual.keys()
                continue
            differ |= await self._differing(driver, intents, actual, turns)
        # A later pass of a Service tells what became of it. No pass has begun before the first audit
        # has compared everything.
        later = self._in_passes() if self._compared.is_set() else set()
        self._report({}, {key: each for key, each in refused.items() if key not in later})
        async for some in turns(
            parts(list(intents.keys() - differ), self._pace.plan_slice or len(intents) or 1)
        ):
            later = self._in_passes()
            alike = [key for key in some if key not in later]
            for key in alike:
                self.failing.pop(key, None)
            self._report({key: intents[key] for key in alike}, dict.fromkeys(alike, DONE))
        # What was planned a moment ago is not planned again, unless it may have changed.
        unchanged = {
            key for key in differ.intersection(everything) - self._planned_since if key not in dirty
        }
        alone = {key for key in unchanged if self._compared.is_set() and self._is_large(key)}
        self._let_wait_alone(sorted(alone))
        self._ready |= {key: planned.get(key) for key in unchanged - alone}
        # What changes meanwhile differs as well, and so does what has failed; neither is anybody
        # else's doing.
        drifted = {
            key for key in differ - self._planned_since - self._retries.keys() if key not in dirty
        }
        if not self._compared.is_set():
            self._take_in(dirty, differ)
        self._some_ready.set()
        # before marking: the first pass is of what is wanted, what is there too much has the next
        # one
        self._compared.set()
        dirty.mark(differ - unchanged)
        if self._at_start is None:
            self._at_start = set(differ)
            self._note_start(())
        elif drifted:
            self.drift += len(drifted)
            log.warning(
                "found other than planned",
                loop=self.name,
                services=len(drifted),
                first=str(min(drifted)),
            )

    def _in_passes(self) -> set[KeyT]:
        """The Services that were planned since the last audit began, or that wait for their pass or
        are in it."""
        return {*self._busy, *self._ready, *self._ready_alone, *self._planned_since}

    async def _plan_all(
        self, keys: Sequence[KeyT], turns: Turns[KeyT]
    ) -> dict[KeyT, IntentT | Refused]:
        """The plan of many. In slices, between which others have their turn, where the plan allows
        that: 10,000 Services take a second."""
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
        """The Services that are other than planned. Where it may not be found in slices it is found
        in a thread: at 10,000 Services it takes a second, and probes and watches must go on
        meanwhile."""
        if not self._pace.plan_slice:
            return {
                change.service
                for change in await asyncio.to_thread(_changes, driver, intents, actual)
            }
        differ: set[KeyT] = set()
        keys = intents.keys() | actual.keys()
        large = set(filter(self._is_large, keys))
        async for some in turns(parts([*keys - large, *large], self._pace.plan_slice)):
            wanted, there = (
                {key: each[key] for key in some if key in each} for each in (intents, actual)
            )
            if large.isdisjoint(some):
                changes = _changes(driver, wanted, there)
            else:
                changes = await asyncio.to_thread(_changes, driver, wanted, there)
            differ.update(change.service for change in changes)
        return differ

    def _take_in(self, dirty: DirtyKeys[KeyT], differ: Collection[KeyT]) -> None:
        """Have the first pass carry also those that have changed since they were planned, as they
        are now."""
        changed = [key for key in differ if key in dirty and key not in self._ready]
        planned = self._plan(changed)
        dirty.mark(planned.keys() - set(changed))
        self._ready |= {key: planned.get(key) for key in changed}

    def _note_start(self, done: Collection[KeyT]) -> None:
        if self._at_start is not None and not self.settled.is_set():
            self._at_start.difference_update(done)
            if not self._at_start:
                self.settled.set()

    async def _pass(
        self, batch: Mapping[KeyT, IntentT | Refused | None], dirty: DirtyKeys[KeyT]
    ) -> None:
        """Bring these Services to what the plan says. A refused one keeps what it has: a mistake in
        an object must not take its traffic away."""
        outcomes = {
            key: _outcome_of(each) for key, each in batch.items() if isinstance(each, Refused)
        }
        intents = {
            key: each
            for key, each in batch.items()
            if each is not None and not isinstance(each, Refused)
        }
        gone = {key for key, each in batch.items() if each is None}
        # What goes, goes first: what it leaves (an address, a port) may be wanted by another.
        for driver in reversed(self._drivers):
            await self._bring(driver, gone, {}, outcomes, dirty)
        for driver in self._drivers:
            await self._bring(driver, intents.keys(), intents, outcomes, dirty)
        self._report(intents, {key: outcomes.get(key, DONE) for key in batch})
        self._schedule(batch, outcomes, dirty)
        self._note_start(batch.keys())

    async def _bring(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        keys: Collection[KeyT],
        intents: Mapping[KeyT, IntentT],
        outcomes: dict[KeyT, Outcome],
        dirty: DirtyKeys[KeyT],
    ) -> None:
        """One driver's part, for the Services that the drivers before it serve at least in part.
        What is to go stays in a driver until the drivers after it have let go of all of it."""
        keys = [key for key in keys if _passes(outcomes.get(key, DONE), wanted=key in intents)]
        waiting = parts(keys, driver.batch or len(keys) or 1)

        async def work() -> None:
            for some in waiting:
                await self._bring_some(driver, some, intents, outcomes, dirty)

        if len(keys) <= (driver.batch or len(keys)):
            await work()
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(self._pace.parallel):
                group.create_task(work())

    async def _bring_some(
        self,
        driver: Driver[KeyT, IntentT, Any, Any, Any],
        keys: Sequence[KeyT],
        intents: Mapping[KeyT, IntentT],
        outcomes: dict[KeyT, Outcome],
        dirty: DirtyKeys[KeyT],
    ) -> None:
        """As many Services as the driver takes at once."""
        try:
            actual = await driver.read(keys)
        except FairleadError as error:
            _join(outcomes, dict.fromkeys(keys, _outcome_of(error)))
            return
        wanted = {key: intents[key] for key in keys if key in intents}
        if len(keys) > MOST_AT_ONCE or any(map(self._is_large, keys)):
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
        """Apply the changes, in halves where they fail together; the outcomes of the Services that
        are not done, or of which the driver has something to tell."""
        outcomes: dict[KeyT, Outcome] = {}
        groups = deque([changes])
        splits = 0
        while groups:
            group = groups.popleft()
            services = sorted({change.service for change in group})
            try:
                told = await driver.apply(group)
            except FairleadError as error:
                if len(services) > 1 and (isinstance(error, Refused) or splits < MOST_SPLITS):
                    splits += 1
                    half = set(services[: len(services) // 2])
                    groups.append([change for change in group if change.service in half])
                    groups.append([change for change in group if change.service not in half])
                    continue
                told = dict.fromkeys(services, _outcome_of(error))
            else:
                log.info(
                    "applied",
                    loop=self.name,
                    driver=driver.name,
                    changes=len(group),
                    first=str(services[0]),
                )
            for key, outcome in told.items():
                if outcome.state != "done" or outcome.notes:
                    outcomes[key] = outcome
                if outcome.state == "done" and outcome.again_s:
                    self._requeue(key, outcome.again_s, dirty)
        self._log_failures(driver.name, outcomes)
        return outcomes

    def _log_failures(self, driver: str, outcomes: Mapping[KeyT, Outcome]) -> None:
        """Log what failed, each failure once until it changes or goes away."""
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
        """Passes in between do not put it off: they need not tell of it again."""
        if (handle := self._looks.pop(key, None)) is not None:
            handle.cancel()
        self._looks[key] = asyncio.get_running_loop().call_later(delay_s, dirty.mark, (key,))

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
    """Whether the next driver sees a Service of which the drivers before it say this."""
    return outcome.state == "done" or (wanted and outcome.in_part)


def _join(outcomes: dict[KeyT, Outcome], later: Mapping[KeyT, Outcome]) -> None:
    """Add what the next driver says."""
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
            return Outcome("waiting", str(error))  # read again; nobody needs to hear of it
        case Unavailable():
            return Outcome("unavailable", str(error), again_s=error.retry_after_s)
        case _:
            return Outcome("unavailable", str(error))
