"""Several loops over the same Services, and one place where it is told what became of each.

In: the reports of loops. Out: the same, but for what says nothing: that a loop has nothing to do
with a Service. Of what another loop has told that would be the end."""

from collections.abc import Mapping

from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.reconcile import Report


class SharedReport:
    """`of(loop)` is the report of that loop."""

    def __init__(self, report: Report[ServiceKey, LoadBalancer]) -> None:
        self._report = report
        self._teller: dict[ServiceKey, str] = {}
        """Who told the last thing of each Service that is served, or is to be."""

    def of(self, loop: str) -> Report[ServiceKey, LoadBalancer]:
        def told(
            intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
        ) -> None:
            kept = {
                key: outcome
                for key, outcome in outcomes.items()
                if self._says_something(loop, key, intents, outcome)
            }
            self._report({key: intent for key, intent in intents.items() if key in kept}, kept)

        return told

    def _says_something(
        self,
        loop: str,
        key: ServiceKey,
        intents: Mapping[ServiceKey, LoadBalancer],
        outcome: Outcome,
    ) -> bool:
        if key in intents or outcome.state != "done":
            self._teller[key] = loop
            return True
        if self._teller.get(key, loop) != loop:
            return False
        self._teller.pop(key, None)
        return True
