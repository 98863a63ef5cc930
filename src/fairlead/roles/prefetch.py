"""Work of a starting gateway that begins as soon as a part of the plan is known.

In: the plan of the loop that probes, slice by slice. Out: the same plan. The nodes of each slice
are probed at once, and the tables that its Services need if the probes succeed, as most do, are
computed in a thread. So the first answers arrive when the plan is complete, or soon after.
Invariant: this only saves time; the loops do everything that was not done ahead."""

import asyncio
from collections.abc import Callable, Collection, Mapping

from fairlead.drivers.health_targets import StartProbes
from fairlead.drivers.prober import Prober
from fairlead.errors import Refused
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.reconcile import Plan
from fairlead.state import State


class StartupPrefetch:
    """The prefetch of one start. `plan` is the plan for the loop that probes. `run` ends when
    everything that existed at the start was processed."""

    def __init__(
        self,
        plan: Plan[ServiceKey, LoadBalancer],
        prober: Prober,
        precompute_tables: Callable[[Mapping[ServiceKey, LoadBalancer]], None],
    ) -> None:
        """`plan`: cheap for Services that were planned before and have not changed.
        `precompute_tables`: called in a thread, with Services that have just been planned."""
        self._plan = plan
        self._prober = prober
        self._precompute_tables = precompute_tables
        self.done = asyncio.Event()
        """Set when everything that existed at the start was processed."""
        self._planned: set[ServiceKey] = set()
        self._some = asyncio.Event()
        self._probed: set[str] = set()
        self.last_first_probe_s = 0.0
        """The time at which the last node was probed for the first time, by the clock of the event
        loop."""

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer | Refused]:
        """Return the plan of these Services."""
        if not self.done.is_set():
            self._planned.update(keys)
            self._some.set()
        return self._plan(keys)

    async def run(self, state: State) -> None:
        """Probe the nodes of planned Services and precompute their tables."""
        await state.has_synced.wait()
        left = set(state.services)
        while left:
            await self._some.wait()
            self._some.clear()
            planned, self._planned = self._planned, set()
            # Plan again, because Services may have changed since: a probe that is started for an
            # outdated plan would not be stopped by the loop.
            planned_now = self._plan(planned)
            intents = {
                key: each for key, each in planned_now.items() if isinstance(each, LoadBalancer)
            }
            await self._probe(intents)
            await asyncio.to_thread(self._precompute_tables, intents)
            left -= planned
        self.done.set()

    async def _probe(self, intents: Mapping[ServiceKey, LoadBalancer]) -> None:
        changes = self._prober.diff(self._prober.render(intents), await self._prober.read(intents))
        if not changes:
            return
        await self._prober.apply(changes)
        starts = (each for each in changes if isinstance(each, StartProbes))
        addresses = {target.address for each in starts for target in each.targets}
        if not addresses <= self._probed:
            self._probed |= addresses
            self.last_first_probe_s = asyncio.get_running_loop().time()
