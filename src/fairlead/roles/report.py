"""What a role reports about its work: the web view, metrics, and Events for what users should know.

In: the loop's reports. Out: one Event for each news: a failure or a note is written when it begins
or changes, not at every pass that meets it again. It is written again, into the same Event, before
the API server would forget it (after an hour). A message of which only a number changed is the same
matter (`kube.events.without_numbers`): its Event shows the new number. When a Warning has not held for a
while, a Normal Event says so. Across restarts: `warned` is what a process must leave to its
successor, and `resume` is called by the successor."""

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

Matter = tuple[str, str]
"""Reason of an Event, and its message without quantities."""

START_S = 60.0
"""How long pods of a new Service may take to start, including an image pull, before an Event says
that it has no endpoint."""

REMIND_S = 45 * 60.0
"""What lasts is said again after this time: `kubectl describe` shows nothing of what the API server
has forgotten."""
SETTLE_S = 10.0


IntentT = TypeVar("IntentT", LoadBalancer, NodeService)


class Telling:
    """A matter that lasts. `timer` writes its next Event."""

    def __init__(self, message: str, timer: asyncio.TimerHandle) -> None:
        self.message = message
        self.timer = timer
        self.begun = False
        """Whether an Event was written already."""


class Reporter(Generic[IntentT]):
    """The `report` of a role's loop.

    reason: of Events about what this role could not do. removal_reason: the same, about Services
    for which nothing is wanted any more. who: put before their messages, if not empty. notes: which
    notes of an intent this role is the one to tell. patience_s: so long a thing that may pass by
    itself must last before it is said. Much that looks wrong on the way from one state of a cluster
    to the next is over in a moment, and not worth an Event. A refusal is said at once. start_s: a
    note that is normal at the start (`Finding.at_start`) is not written before the Service has this
    age. settle_s: for how long a Warning must not hold before `Recovered` is written, so that a
    problem that comes and goes is not reported as recovered each time."""

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
        patience_s: float = 0.0,
        start_s: float = START_S,
        remind_s: float = REMIND_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._view = view
        self._state = state
        self._recorder = recorder
        self._reason = reason
        self._removal_reason = removal_reason or reason
        self._who = f"{who}: " if who else ""
        self._notes: Callable[[IntentT], Iterable[Finding]] | None = notes
        self._patience_s = patience_s
        self._start_s = start_s
        self._remind_s = remind_s
        self._settle_s = settle_s
        self._said: dict[ServiceKey, dict[Matter, Telling]] = {}
        self._warned: dict[ServiceKey, dict[str, Warned]] = {}
        """The Warnings that were written and have not been followed by `Recovered`, by the reason
        of the Event."""
        self._ending: dict[tuple[ServiceKey, str], asyncio.TimerHandle] = {}

    def __call__(
        self, intents: Mapping[ServiceKey, IntentT], outcomes: Mapping[ServiceKey, Outcome]
    ) -> None:
        self._view.record(intents, outcomes)
        for key, outcome in outcomes.items():
            self._tell_happened(key, outcome.notes)
            said = self._said.pop(key, {})
            still = {
                (each.code, without_numbers(str(each))): each
                for each in self._to_say(intents.get(key), outcome)
            }
            for over in said.keys() - still.keys():
                said.pop(over).timer.cancel()
            patience_s = self._patience_s if outcome.state != "refused" else 0.0
            for matter, note in sorted(still.items()):
                if (telling := said.get(matter)) is None:
                    wait_s = (
                        max(patience_s, self._start_left_s(key)) if note.at_start else patience_s
                    )
                    timer = asyncio.get_running_loop().call_later(wait_s, self._say, key, matter)
                    said[matter] = Telling(str(note), timer)
                elif telling.message != str(note):
                    telling.message = str(note)
                    if telling.begun:
                        self._tell(key, note.code, telling.message)
            if said:
                self._said[key] = said
            if outcome.state != "waiting":  # a Service that waits is between two states
                self._end(
                    key,
                    {reason for reason, _ in said},
                    forgotten=key not in intents and outcome.state == "done",
                )

    def _tell_happened(self, key: ServiceKey, notes: Iterable[Finding]) -> None:
        """Write what a driver says has happened: each time once, and it never ends."""
        if (service := self._state.services.get(key)) is None:
            return
        for note in notes:
            kind = "Normal" if note.severity == "info" else "Warning"
            self._recorder.event(key, service.metadata.uid, kind, note.code, str(note))

    def close(self) -> None:
        """Say nothing more: another process does now."""
        for said in self._said.values():
            for telling in said.values():
                telling.timer.cancel()
        for timer in self._ending.values():
            timer.cancel()
        self._said.clear()
        self._warned.clear()
        self._ending.clear()

    def warned(self) -> list[Warned]:
        """The Warnings that were written and not yet followed by `Recovered`, the oldest first. Of
        deleted Services, none."""
        services = self._state.services if self._state.whole.is_set() else self._warned
        found = (
            each
            for key, warnings in self._warned.items()
            if key in services
            for each in warnings.values()
        )
        return sorted(found, key=lambda each: (each.since, each.service, each.reason))

    def resume(self, warned: Iterable[Warned]) -> None:
        """Take over the Warnings of a predecessor, and have their Services planned again: the next
        report on a Service shows which of them no longer hold. The Services need not be known
        yet."""
        keys = set()
        for each in warned:
            key = ServiceKey.parse(each.service)
            keys.add(key)
            self._warned.setdefault(key, {}).setdefault(each.reason, each)
        self._state.subscribers.mark(keys)

    def _end(self, key: ServiceKey, hold: Collection[str], *, forgotten: bool) -> None:
        """Only these reasons still hold. `forgotten`: no Event is to be written about this Service
        any more."""
        for reason in list(self._warned.get(key, ())):
            if forgotten or reason in hold:
                if (timer := self._ending.pop((key, reason), None)) is not None:
                    timer.cancel()
            elif (key, reason) not in self._ending:
                loop = asyncio.get_running_loop()
                self._ending[key, reason] = loop.call_later(
                    self._settle_s, self._say_end, key, reason
                )
        if forgotten:
            self._warned.pop(key, None)

    def _say_end(self, key: ServiceKey, reason: str) -> None:
        del self._ending[key, reason]
        warned = self._warned[key].pop(reason)
        if not self._warned[key]:
            del self._warned[key]
        service = self._state.services.get(key)
        if service is None or service.metadata.uid != warned.uid:
            return
        message = f"{self._who}{reason} no longer holds, after {rounded_duration(warned.since, datetime.now(UTC))}"
        self._recorder.event(key, warned.uid, "Normal", RECOVERED, message)

    def _start_left_s(self, key: ServiceKey) -> float:
        """For how long pods of the Service may still be starting; at most `start_s`, even if other
        clocks are ahead."""
        service = self._state.services.get(key)
        try:
            created = datetime.strptime(
                (service and service.metadata.creation_timestamp) or "", STAMP
            ).replace(tzinfo=UTC)
        except ValueError:
            return 0.0
        return min(self._start_s, self._start_s - (datetime.now(UTC) - created).total_seconds())

    def _to_say(self, intent: IntentT | None, outcome: Outcome) -> Iterable[Finding]:
        if outcome.state in ("refused", "unavailable"):
            # Words that are somebody else's, such as kube-proxy's, may name who speaks already.
            named = self._who and outcome.message.startswith(self._who.removesuffix(": "))
            removing = intent is None and outcome.state == "unavailable"
            reason = outcome.reason or (self._removal_reason if removing else self._reason)
            yield Finding(reason, outcome.message if named else self._who + outcome.message)
        if intent is not None and self._notes is not None:
            yield from self._notes(intent)

    def _say(self, key: ServiceKey, matter: Matter) -> None:
        telling = self._said[key][matter]
        telling.begun = True
        telling.timer = asyncio.get_running_loop().call_later(
            self._remind_s, self._say, key, matter
        )
        self._tell(key, matter[0], telling.message)

    def _tell(self, key: ServiceKey, reason: str, message: str) -> None:
        if (service := self._state.services.get(key)) is not None:
            uid = service.metadata.uid
            self._recorder.event(key, uid, "Warning", reason, message)
            warnings = self._warned.setdefault(key, {})
            if (
                reason not in warnings or warnings[reason].uid != uid
            ):  # or else a Service of this name that is gone
                warnings[reason] = Warned(str(key), reason, stamp(datetime.now(UTC)), uid)
