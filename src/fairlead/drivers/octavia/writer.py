"""Makes the writes of one Service, with each of its load balancers locked meanwhile.

In: Writes in order. Out: they are made, or an error names the last one. Several Services may be on
one load balancer, and Octavia accepts one write to it at a time. Invariants: a load balancer is
deleted, or left, only if the number of other listeners on it is as expected; a creation that
Octavia rejected is not repeated at each pass."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from fairlead.drivers.octavia.apply import PollSchedule
from fairlead.drivers.octavia.attempts import Attempts
from fairlead.drivers.octavia.changes import Call, Write
from fairlead.drivers.octavia.cloud import Cloud, Failed
from fairlead.drivers.octavia.network import Network
from fairlead.drivers.octavia.read import listeners_on
from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.model import ServiceKey


class Writer:
    """Makes writes. `fence` is called before each write, and raises if no write must be made."""

    def __init__(
        self,
        cloud: Cloud,
        network: Network,
        attempts: Attempts,
        schedule: PollSchedule,
        fence: Callable[[], None],
    ) -> None:
        self._cloud = cloud
        self._network = network
        self._attempts = attempts
        self._schedule = schedule
        self._fence = fence
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by the id of the load balancer; if none exists yet, by the name of the Service."""

    async def carry_out(self, key: ServiceKey, writes: Sequence[Write]) -> None:
        """Make the writes. Raise StillWorking, Conflict, Refused or Unavailable."""
        calls = [each for each in writes if isinstance(each, Call)]
        names = {each.balancer_id for each in writes} - {""}
        async with AsyncExitStack() as held:
            for name in sorted(names) or [str(key)]:
                await held.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
            if creation := next((each for each in calls if each.makes), None):
                self._attempts.stop_if_refused(creation)
            await self._check_listeners(key, calls)
            repairs = any(each.repairs for each in calls)
            if repairs:
                self._attempts.count(key)
            try:
                await self._network.carry_out(writes, self._schedule, self._fence)
            except Failed:
                if creation is not None and not repairs:
                    self._attempts.count(key)
                raise
            except Refused as error:
                if creation is not None:
                    self._attempts.refused(creation, error)
                elif repairs:
                    # Failover may be reserved for the cloud's operators. Recreation is still
                    # possible.
                    raise Unavailable(str(error)) from error
                raise

    async def _check_listeners(self, key: ServiceKey, calls: Sequence[Call]) -> None:
        """Raise Conflict if listeners of others have been added or deleted on a load balancer that
        is to be deleted or left: the last Service on a load balancer deletes it."""
        expected_by_id = {
            each.balancer_id: each.expected_listeners
            for each in calls
            if each.expected_listeners is not None
        }
        for id_, expected_listeners in expected_by_id.items():
            others = await listeners_on(self._cloud, id_) - set(expected_listeners.own)
            if len(others) != expected_listeners.others:
                raise Conflict(f"the listeners on the load balancer of Service {key} have changed")
