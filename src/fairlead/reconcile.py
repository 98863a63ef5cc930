"""The loop that every role runs: dirty keys -> plan -> drivers -> outcomes.

In: a State that marks Services dirty, a plan (pure), drivers in the order in which they must act (rules before the health
port that announces them). Out: reports of what became of each Service.
The loop is level-triggered: a key says only where to look; every step may run twice. Failures are kept apart: a batch that
a driver refuses is halved until the Service at fault stands alone, what is unavailable is tried again with back-off, and
what fails in one driver is not shown to the next. Every `audit_interval_s` everything is read anew and compared, so that
what others changed behind our back is put right.
Any exception but FairleadError is a bug and ends the process.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import structlog

from fairlead.drivers import Change, Driver
from fairlead.errors import FairleadError, Refused
from fairlead.model import DONE, Outcome, ServiceKey
from fairlead.state import DirtyKeys, State

log = structlog.get_logger()

IntentT = TypeVar("IntentT")

Plan = Callable[[Collection[ServiceKey]], Mapping[ServiceKey, IntentT | Refused]]
"""Intents of these Services, and of others that the plan finds touched. A Service that needs nothing is left out."""

Report = Callable[[Mapping[ServiceKey, IntentT], Mapping[ServiceKey, Outcome]], None]
"""Told the intents and the outcome of every Service that was looked at; one with neither intent nor failure is gone."""

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


class Loop(Generic[IntentT]):
    """Keeps what the drivers serve equal to the plan, from `run` until it is cancelled."""

    def __init__(
        self,
        name: str,
        state: State,
        plan: Plan[IntentT],
        drivers: Sequence[Driver[IntentT, Any, Any, Any]],
        report: Report[IntentT],
        *,
        coalesce_s: float = 0.01,
        audit_interval_s: float = 60.0,
    ) -> None:
        self.name = name
        self.settled = asyncio.Event()
        """Set once the first whole pass is done: what is served equals what was planned."""
        self._state = state
        self._plan = plan
        self._drivers = drivers
        self._report = report
        self._coalesce_s = coalesce_s
        self._audit_interval_s = audit_interval_s
        self._parallel = max(driver.parallel for driver in drivers)
        self._attempts: dict[ServiceKey, int] = {}
        self._retries: dict[ServiceKey, asyncio.TimerHandle] = {}
        self._busy: set[ServiceKey] = set()
        self._again: set[ServiceKey] = set()

    async def run(self) -> None:
        await self._state.whole.wait()
        dirty = self._state.subscribe()
        await self._pass(None, dirty)
        self.settled.set()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._audit(dirty))
                slots = asyncio.Semaphore(self._parallel or 1)
                while True:
                    keys = await dirty.take(self._coalesce_s)
                    if not self._parallel:
                        async with slots:
                            await self._pass(keys, dirty)
                        continue
                    for key in self._claim(keys):
                        await slots.acquire()
                        group.create_task(self._pass_alone(key, dirty, slots))
        finally:
            for retry in self._retries.values():
                retry.cancel()

    async def _audit(self, dirty: DirtyKeys) -> None:
        """Look at everything again, reading it from the thing itself. In parallel mode key by key, as any other change."""
        while True:
            await asyncio.sleep(self._audit_interval_s * random.uniform(0.9, 1.1))
            if self._parallel:
                dirty.mark(self._state.services)
            else:
                for driver in self._drivers:
                    dirty.mark(await driver.read(None))
                dirty.mark(self._state.services)

    def _claim(self, keys: Collection[ServiceKey]) -> list[ServiceKey]:
        """Those not under way already; the others are looked at again once they are done."""
        free = [key for key in sorted(keys) if key not in self._busy]
        self._again.update(set(keys) - set(free))
        self._busy.update(free)
        return free

    async def _pass_alone(self, key: ServiceKey, dirty: DirtyKeys, slots: asyncio.Semaphore) -> None:
        try:
            await self._pass({key}, dirty)
        finally:
            self._busy.discard(key)
            slots.release()
            if key in self._again:
                self._again.discard(key)
                dirty.mark((key,))

    async def _pass(self, keys: Collection[ServiceKey] | None, dirty: DirtyKeys) -> None:
        """Bring these Services (None: all, also those that only a driver still knows) to what the plan says."""
        planned = self._plan(self._state.services if keys is None else keys)
        outcomes: dict[ServiceKey, Outcome] = {k: _refused(v) for k, v in planned.items() if isinstance(v, Refused)}
        intents = {k: v for k, v in planned.items() if not isinstance(v, Refused)}
        scope = None if keys is None else set(keys) | set(planned)
        for driver in self._drivers:
            try:
                actual = await driver.read(scope)
            except FairleadError as error:
                outcomes |= {key: _outcome_of(error) for key in (scope or self._state.services)}
                continue
            desired = driver.render({key: intent for key, intent in intents.items() if key not in outcomes})
            # A refused Service keeps what it has: a mistake in an object must not take its traffic away.
            changes = driver.diff(desired, {key: value for key, value in actual.items() if key not in outcomes})
            if changes:
                outcomes |= await self._apply(driver, changes)
        looked_at = set(planned) | set(keys or self._state.services)
        self._schedule(looked_at, outcomes, dirty)
        self._report(intents, {key: outcomes.get(key, DONE) for key in looked_at})

    async def _apply(self, driver: Driver[IntentT, Any, Any, Any], changes: Sequence[Change]) -> dict[ServiceKey, Outcome]:
        try:
            outcomes = await driver.apply(changes)
        except FairleadError as error:
            services = sorted({change.service for change in changes})
            if len(services) == 1 or not isinstance(error, Refused):
                log.warning("not applied", loop=self.name, driver=driver.name, services=len(services), error=str(error))
                return dict.fromkeys(services, _outcome_of(error))
            first_half = set(services[: len(services) // 2])
            found = await self._apply(driver, [change for change in changes if change.service in first_half])
            return found | await self._apply(driver, [change for change in changes if change.service not in first_half])
        log.info("applied", loop=self.name, driver=driver.name, changes=len(changes), first=str(changes[0]))
        return {key: outcome for key, outcome in outcomes.items() if outcome.state != "done"}

    def _schedule(self, keys: Collection[ServiceKey], outcomes: Mapping[ServiceKey, Outcome], dirty: DirtyKeys) -> None:
        for key in keys:
            if (handle := self._retries.pop(key, None)) is not None:
                handle.cancel()
            if key not in outcomes or outcomes[key].state != "unavailable":
                self._attempts.pop(key, None)
                continue
            attempt = self._attempts.get(key, 0)
            self._attempts[key] = attempt + 1
            delay_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempt, 10)) * random.uniform(0.75, 1.25)
            self._retries[key] = asyncio.get_running_loop().call_later(delay_s, dirty.mark, (key,))


def _refused(error: Refused) -> Outcome:
    return Outcome("refused", str(error))


def _outcome_of(error: FairleadError) -> Outcome:
    return Outcome("refused" if isinstance(error, Refused) else "unavailable", str(error))
