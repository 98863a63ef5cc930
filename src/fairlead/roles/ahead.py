"""At a gateway's start, what need not wait for the whole plan is begun with as soon as a part of it
is known.

In: the plan of the loop that probes, slice by slice. Out: the same; the nodes of each slice are
asked at once, and the tables that its Services will need if the answers are good, as mostly they
are, are made in a thread. So the first answers are there when the plan is, or soon after.
Invariant: this only hastens. What it has not done the loops do."""

import asyncio
from collections.abc import Callable, Collection, Mapping

from fairlead.drivers.health_targets import StartProbes
from fairlead.drivers.prober import Prober
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.reconcile import Plan
from fairlead.state import State


class StartupPrefetch:
    """`plan` is for the loop that probes; `run` ends when all that there was at the start has been
    handed on."""

    def __init__(
        self,
        plan: Plan[ServiceKey, LoadBalancer],
        prober: Prober,
        precompute_tables: Callable[[Mapping[ServiceKey, LoadBalancer]], None],
    ) -> None:
        """`plan`: costs little for what was planned and has not changed. `precompute_tables`: called in a
        thread, with Services that have just been planned."""
        self._plan = plan
        self._prober = prober
        self._foresee = precompute_tables
        self.handed_on = asyncio.Event()
        """Set when all that there was at the start has been handed on."""
        self._planned: set[ServiceKey] = set()
        self._some = asyncio.Event()
        self._asked: set[str] = set()
        self.newest_s = 0.0
        """When the last of the nodes was asked for the first time, by the event loop's clock."""

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """What the plan says."""
        if not self.handed_on.is_set():
            self._planned.update(keys)
            self._some.set()
        return self._plan(keys)

    async def run(self, state: State) -> None:
        """Hand on what is planned."""
        await state.whole.wait()
        left = set(state.services)
        while left:
            await self._some.wait()
            self._some.clear()
            planned, self._planned = self._planned, set()
            # As it is now: what was planned a moment ago may have changed, and nobody would take
            # back what is asked for it.
            told = self._plan(planned)
            intents = {key: each for key, each in told.items() if isinstance(each, LoadBalancer)}
            await self._ask(intents)
            await asyncio.to_thread(self._foresee, intents)
            left -= planned
        self.handed_on.set()

    async def _ask(self, intents: Mapping[ServiceKey, LoadBalancer]) -> None:
        changes = self._prober.diff(self._prober.render(intents), await self._prober.read(intents))
        if not changes:
            return
        await self._prober.apply(changes)
        starts = (each for each in changes if isinstance(each, StartProbes))
        asked = {target.address for each in starts for target in each.targets}
        if not asked <= self._asked:
            self._asked |= asked
            self.newest_s = asyncio.get_running_loop().time()
