"""One report for several loops over the same Services.

In: the reports of the loops. Out: the same reports, without the Services for which the reporting
loop has nothing to do: such a report would delete the report of another loop about the Service."""

from collections.abc import Mapping

from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.reconcile import Report


class SharedReport:
    """A report that several loops share. `of(loop)` returns the report function of one loop."""

    def __init__(self, report: Report[ServiceKey, LoadBalancer]) -> None:
        self._report = report
        self._last_reporter: dict[ServiceKey, str] = {}
        """The loop that sent the last report about each Service that is served, or is to be served.
        """

    def of(self, loop: str) -> Report[ServiceKey, LoadBalancer]:
        def report(
            intents: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
        ) -> None:
            kept = {
                key: outcome
                for key, outcome in outcomes.items()
                if self._is_relevant(loop, key, intents, outcome)
            }
            self._report({key: intent for key, intent in intents.items() if key in kept}, kept)

        return report

    def _is_relevant(
        self,
        loop: str,
        key: ServiceKey,
        intents: Mapping[ServiceKey, LoadBalancer],
        outcome: Outcome,
    ) -> bool:
        if key in intents or outcome.state != "done":
            self._last_reporter[key] = loop
            return True
        if self._last_reporter.get(key, loop) != loop:
            return False
        self._last_reporter.pop(key, None)
        return True
