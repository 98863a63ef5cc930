"""The state of each AddressPool in its status (counts, conditions) and in Events, and the
protection of a pool that is in use from deletion.

In: the ledger, whose changes are signalled by `changed`. Out: the source, the plan and the loop
with which `drivers.pools` writes. Invariants: each change is written once, and a pool is written at
most every `INTERVAL_S`; a pool whose write fails is retried with growing delays. Pools of the
configuration file are not objects, so nothing is written for them; a log line names their excluded
addresses."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from fairlead.drivers import Component
from fairlead.drivers.pools import DesiredPool, PoolDriver
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.ledger import Ledger
from fairlead.plan.pool_status import (
    NONE_EXCLUDED,
    PoolCondition,
    excluded_condition,
    pool_states,
)
from fairlead.reconcile import Loop, Pace
from fairlead.state import State, Subscribers

log = structlog.get_logger()

INTERVAL_S = 0.5
"""The minimum time between two writes. Counts are for people, so many changes become one write."""


class PoolStates(Component):
    """The source and the plan of the loop. A pool becomes dirty when its published state changes,
    not at every assignment."""

    name = "pool states"

    def __init__(self, state: State, ledger: Ledger, limits: KeptAddressLimits) -> None:
        self.has_synced = asyncio.Event()
        self.services: dict[str, DesiredPool] = {}
        """The desired state of each pool by its name. The field is called `services` in every
        source."""
        self.subscribers = Subscribers[str]()
        self._state = state
        self._ledger = ledger
        self._limits = limits
        self._news = asyncio.Event()
        self._logged: dict[str, PoolCondition] = {}

    def changed(self) -> None:
        """Signal that the ledger may have changed."""
        self._news.set()

    def plan(self, keys: Collection[str]) -> Mapping[str, DesiredPool]:
        return {name: self.services[name] for name in keys if name in self.services}

    async def run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(INTERVAL_S)
            self._news.clear()
            self._log_excluded()
            states = pool_states(self._ledger, self._state.pools, self._limits)
            before, self.services = (
                self.services,
                {
                    name: DesiredPool(self._state.pools[name].metadata.uid, each)
                    for name, each in states.items()
                },
            )
            names = before.keys() | self.services.keys()
            self.has_synced.set()
            self.subscribers.mark(
                [name for name in names if before.get(name) != self.services.get(name)]
            )

    def _log_excluded(self) -> None:
        """Log the excluded addresses of each pool of the configuration, when they have changed."""
        pools = self._ledger.pools
        for pool in pools.in_order:
            found = excluded_condition(pools, pool)
            if pool.name in self._state.pools or found == self._logged.get(
                pool.name, NONE_EXCLUDED
            ):
                continue
            self._logged[pool.name] = found
            level = log.warning if found.status == "True" else log.info
            level("excluded addresses of a pool", pool=pool.name, excluded=found.message)


class PoolReports:
    """The publication of the state of pools. The role runs `components`, and calls `changed` after
    each assignment."""

    def __init__(
        self,
        client: Client,
        state: State,
        ledger: Ledger,
        recorder: EventRecorder,
        limits: KeptAddressLimits,
        *,
        fence: Callable[[], None],
    ) -> None:
        states = PoolStates(state, ledger, limits)
        self._driver = PoolDriver(client, state, recorder, fence)
        self._loop = Loop(
            "pools",
            states,
            states.plan,
            [self._driver],
            lambda _intents, _outcomes: None,
            pace=Pace(coalesce_s=INTERVAL_S),
        )
        self.changed = states.changed
        self.components: Sequence[Component] = (states, self._loop)

    @property
    def remembered(self) -> set[str]:
        """The pools for which the result of the last write is still stored."""
        return {*self._driver.answers.answered, *self._loop.failing}
