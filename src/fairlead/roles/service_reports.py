"""Passes the outcome of each Service from the loop that serves it to the loop that writes its
conditions.

In: the reports of one loop. Out: Services with their conditions, as the source and the plan of
another loop. So the failures of all drivers can be shown, and a failed write of conditions is
retried without calling these drivers. Invariant: a Service is dirty only when its conditions
change, not at every report."""

import asyncio
from collections.abc import Collection, Mapping

from fairlead.drivers.conditions import Conditions
from fairlead.drivers.mutation_cache import ServiceCache
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.plan.addresses import still_served
from fairlead.plan.status import conditions_of
from fairlead.state import Subscribers


class ServiceReports:
    """The `report` of one loop. `has_synced`, `services` and `subscribers` make it the source of
    another loop."""

    def __init__(self, service_cache: ServiceCache) -> None:
        self.has_synced = asyncio.Event()
        self.has_synced.set()
        self.services: dict[ServiceKey, Conditions] = {}
        self._service_cache = service_cache
        self.subscribers = Subscribers[ServiceKey]()

    def __call__(
        self, intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        changed = set()
        for key, outcome in outcomes.items():
            known = self.services.get(key)
            if (new := self._conditions(key, intents.get(key), outcome, known)) != known:
                changed.add(key)
                if new is not None:
                    self.services[key] = new
                else:
                    del self.services[key]
        self.subscribers.mark(changed)

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, Conditions]:
        """Return the conditions of these Services, without those that Fairlead does not serve."""
        return {key: self.services[key] for key in keys if key in self.services}

    def _conditions(
        self,
        key: ServiceKey,
        intent: LoadBalancer | None,
        outcome: Outcome,
        known: Conditions | None,
    ) -> Conditions | None:
        service = self._service_cache.of([key]).get(key)
        if service is None or (intent is None and outcome.state != "refused"):
            return None
        if outcome.state == "waiting" and known is not None and known.uid == service.metadata.uid:
            # The Service is between two states; its conditions stay until the next state is
            # reached.
            return known
        return Conditions(
            service.metadata.uid, conditions_of(intent, outcome, still_served(service))
        )
