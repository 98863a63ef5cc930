"""The reports of a role about its work: the web view, metrics, and Events for users.

In: the loop's reports. Out: one Event for each change. A failure or a note is written when it
begins or changes, not at every pass that finds it again. It is written again, into the same Event,
before the API server deletes the Event (after an hour). Messages that differ only in numbers belong
to the same problem (`kube.events.without_numbers`); the Event shows the new numbers. When a Warning
has not held for a while, a Normal Event reports that it has ended. Across restarts: `warned`
returns what a process must leave to its successor, which passes it to `resume`."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Generic, TypeVar

from fairlead.kube.events import (
    RECOVERED,
    STAMP,
    Recorder,
    rounded_duration,
    stamp,
    without_numbers,
)
from fairlead.kube.presence import Warned
from fairlead.model import Finding, LoadBalancer, NodeService, Outcome, ServiceKey
from fairlead.state import State
from fairlead.web import View

Problem = tuple[str, str]
"""The reason of an Event, and its message without quantities."""

START_S = 60.0
"""How long pods of a new Service may take to start, including an image pull, before an Event
reports that it has no endpoint."""

REMIND_S = 45 * 60.0
"""A problem that lasts is reported again after this time, because `kubectl describe` does not show
Events that the API server has deleted."""
SETTLE_S = 10.0


IntentT = TypeVar("IntentT", LoadBalancer, NodeService)


class OngoingProblem:
    """A problem that lasts. `timer` writes its next Event."""

    def __init__(self, message: str, timer: asyncio.TimerHandle, *, harmless: bool) -> None:
        self.message = message
        self.timer = timer
        self.harmless = harmless
        """Its Events are Normal, and no Event reports its end."""
        self.written = False
        """Whether its first Event was written."""


class Reporter(Generic[IntentT]):
    """The `report` of a role's loop.

    reason: the reason of Events about failures of this role. removal_reason: the same for Services
    that have no intent any more. who: the prefix of the messages of these Events, unless empty.
    notes: returns the notes of an intent that this role reports. grace_period_s: how long a problem
    that may pass by itself must last before an Event reports it, because many problems during the
    transition between two states of a cluster last only a moment. A refusal is reported at once.
    start_s: a note that is normal at the start (`Finding.at_start`) is not reported before the
    Service has this age. settle_s: how long a Warning must not hold before `Recovered` is written,
    so that a problem that comes and goes is not reported as recovered each time."""

    def __init__(
        self,
        view: View,
        state: State,
        recorder: Recorder,
        *,
        reason: str,
        removal_reason: str = "",
        who: str = "",
        notes: Callable[[IntentT], Iterable[Finding]] | None = None,
        grace_period_s: float = 0.0,
        start_s: float = START_S,
        remind_s: float = REMIND_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._view = view
        self._state = state
        self._recorder = recorder
        self._reason = reason
        self._removal_reason = removal_reason or reason
        self._prefix = f"{who}: " if who else ""
        self._notes: Callable[[IntentT], Iterable[Finding]] | None = notes
        self._grace_period_s = grace_period_s
        self._start_s = start_s
        self._remind_s = remind_s
        self._settle_s = settle_s
        self._ongoing: dict[ServiceKey, dict[Problem, OngoingProblem]] = {}
        self._warned: dict[ServiceKey, dict[str, Warned]] = {}
        """The Warnings that were written and have not been followed by `Recovered`, by the reason
        of the Event."""
        self._ending: dict[tuple[ServiceKey, str], asyncio.TimerHandle] = {}

    def __call__(
        self, intents: Mapping[ServiceKey, IntentT], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        self._view.record(intents, outcomes)
        for key, outcome in outcomes.items():
            self._write_notes(key, outcome.notes)
            known = self._ongoing.pop(key, {})
            still = {
                (each.code, without_numbers(str(each))): each
                for each in self._problems_of(intents.get(key), outcome)
            }
            for ended in known.keys() - still.keys():
                known.pop(ended).timer.cancel()
            grace_period_s = self._grace_period_s if outcome.state != "refused" else 0.0
            for problem, note in sorted(still.items()):
                if (ongoing := known.get(problem)) is None:
                    wait_s = (
                        max(grace_period_s, self._start_left_s(key))
                        if note.at_start
                        else grace_period_s
                    )
                    timer = asyncio.get_running_loop().call_later(
                        wait_s, self._write_due, key, problem
                    )
                    known[problem] = OngoingProblem(
                        str(note), timer, harmless=note.severity == "info"
                    )
                elif ongoing.message != str(note):
                    ongoing.message = str(note)
                    if ongoing.written:
                        self._write(key, note.code, ongoing)
            if known:
                self._ongoing[key] = known
            # A Service that waits is between two states, so its problems are not over yet.
            if outcome.state != "waiting":
                self._end(
                    key,
                    {reason for reason, _ in known},
                    forgotten=key not in intents and outcome.state == "done",
                )

    def _write_notes(self, key: ServiceKey, notes: Iterable[Finding]) -> None:
        """Write an Event for each note about something that happened. Such a note has no end and is
        not repeated."""
        if (service := self._state.services.get(key)) is None:
            return
        for note in notes:
            kind = "Normal" if note.severity == "info" else "Warning"
            self._recorder.event(key, service.metadata.uid, kind, note.code, str(note))

    def close(self) -> None:
        """Stop all reports, because another process writes them now."""
        for known in self._ongoing.values():
            for ongoing in known.values():
                ongoing.timer.cancel()
        for timer in self._ending.values():
            timer.cancel()
        self._ongoing.clear()
        self._warned.clear()
        self._ending.clear()

    def warned(self) -> list[Warned]:
        """Return the Warnings that were written and not yet followed by `Recovered`, the oldest
        first, without Warnings about deleted Services."""
        services = self._state.services if self._state.has_synced.is_set() else self._warned
        found = (
            each
            for key, warnings in self._warned.items()
            if key in services
            for each in warnings.values()
        )
        return sorted(found, key=lambda each: (each.since, each.service, each.reason))

    def resume(self, warned: Iterable[Warned]) -> None:
        """Take over the Warnings of a predecessor, and mark their Services as dirty: the next
        report about a Service shows which of them no longer hold. The state need not contain the
        Services yet."""
        keys = set()
        for each in warned:
            key = ServiceKey.parse(each.service)
            keys.add(key)
            self._warned.setdefault(key, {}).setdefault(each.reason, each)
        self._state.subscribers.mark(keys)

    def _end(self, key: ServiceKey, hold: Collection[str], *, forgotten: bool) -> None:
        """End the Warnings whose reason is not in `hold`. `forgotten`: the Service is gone, so no
        Event is written about it."""
        for reason in list(self._warned.get(key, ())):
            if forgotten or reason in hold:
                if (timer := self._ending.pop((key, reason), None)) is not None:
                    timer.cancel()
            elif (key, reason) not in self._ending:
                loop = asyncio.get_running_loop()
                self._ending[key, reason] = loop.call_later(
                    self._settle_s, self._write_recovered, key, reason
                )
        if forgotten:
            self._warned.pop(key, None)

    def _write_recovered(self, key: ServiceKey, reason: str) -> None:
        del self._ending[key, reason]
        warned = self._warned[key].pop(reason)
        if not self._warned[key]:
            del self._warned[key]
        service = self._state.services.get(key)
        if service is None or service.metadata.uid != warned.uid:
            return
        passed = rounded_duration(warned.since, datetime.now(UTC))
        message = f"{self._prefix}{reason} no longer holds, after {passed}"
        self._recorder.event(key, warned.uid, "Normal", RECOVERED, message)

    def _start_left_s(self, key: ServiceKey) -> float:
        """Return how many more seconds the pods of the Service may be starting; at most `start_s`,
        even if other clocks are ahead."""
        service = self._state.services.get(key)
        try:
            created = datetime.strptime(
                (service and service.metadata.creation_timestamp) or "", STAMP
            ).replace(tzinfo=UTC)
        except ValueError:
            return 0.0
        return min(self._start_s, self._start_s - (datetime.now(UTC) - created).total_seconds())

    def _problems_of(self, intent: IntentT | None, outcome: Outcome) -> Iterable[Finding]:
        if outcome.state in ("refused", "unavailable"):
            # A message that comes from another component, such as kube-proxy, may name the host
            # already.
            named = self._prefix and outcome.message.startswith(self._prefix.removesuffix(": "))
            removing = intent is None and outcome.state == "unavailable"
            reason = outcome.reason or (self._removal_reason if removing else self._reason)
            yield Finding(reason, outcome.message if named else self._prefix + outcome.message)
        if intent is not None and self._notes is not None:
            yield from self._notes(intent)

    def _write_due(self, key: ServiceKey, problem: Problem) -> None:
        ongoing = self._ongoing[key][problem]
        ongoing.written = True
        ongoing.timer = asyncio.get_running_loop().call_later(
            self._remind_s, self._write_due, key, problem
        )
        self._write(key, problem[0], ongoing)

    def _write(self, key: ServiceKey, reason: str, ongoing: OngoingProblem) -> None:
        if (service := self._state.services.get(key)) is not None:
            uid = service.metadata.uid
            if ongoing.harmless:
                self._recorder.event(key, uid, "Normal", reason, ongoing.message)
                return
            self._recorder.event(key, uid, "Warning", reason, ongoing.message)
            warnings = self._warned.setdefault(key, {})
            # A Warning with another uid is about a deleted Service of the same name.
            if reason not in warnings or warnings[reason].uid != uid:
                warnings[reason] = Warned(str(key), reason, stamp(datetime.now(UTC)), uid)
