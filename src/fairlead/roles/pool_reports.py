"""The state of each AddressPool in its status (counts, conditions) and in Events, and the
protection of a pool that is in use from deletion.

In: the ledger, whose changes are signalled by `changed`. Out: the source, the plan and the loop
with which `drivers.pools` writes. Invariants: each change is written once, and a pool is written at
most every `INTERVAL_S`; a pool whose write fails is retried with growing delays. Pools of the
configuration file are not objects, so nothing is written for them; their excluded addresses are
logged, and that few are free is logged and a finding of the controller."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from fairlead.drivers import Component
from fairlead.drivers.pools import DesiredPool, PoolDriver
from fairlead.kube.client import Client
from fairlead.kube.events import EventRecorder
from fairlead.model import Finding
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.ledger import Ledger
from fairlead.plan.pool_status import (
    EXCLUDED,
    NONE_EXCLUDED,
    NONE_SCARCE,
    SCARCE,
    PoolCondition,
    excluded_condition,
    pool_states,
    scarce_condition,
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
        self._configured: dict[str, dict[str, PoolCondition]] = {}
        """The conditions of the pools of the configuration, by name and type."""

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
            self._look_at_configured()
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

    def findings(self) -> Sequence[Finding]:
        return [
            Finding(scarce.reason, f"pool {name}: {scarce.message}")
            for name, conditions in self._configured.items()
            if (scarce := conditions[SCARCE]).status == "True"
        ]

    def _look_at_configured(self) -> None:
        """Find out the conditions of each pool of the configuration, and log those that have
        changed."""
        pools, all_before, self._configured = self._ledger.pools, self._configured, {}
        for pool in pools.in_order:
            if pool.name in self._state.pools:
                continue
            before = all_before.get(pool.name, {EXCLUDED: NONE_EXCLUDED, SCARCE: NONE_SCARCE})
            scarce = before[SCARCE].status == "True"
            found = {
                EXCLUDED: excluded_condition(pools, pool),
                SCARCE: scarce_condition(pool, scarce=scarce),
            }
            self._configured[pool.name] = found
            for each in found.values():
                if each != before[each.type]:
                    level = log.warning if each.status == "True" else log.info
                    level("a pool of the configuration", pool=pool.name, state=each.message)


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
