"""What a role tells about its work: the web view, metrics, and Events for what users should know.

In: the loop's reports. Out: each thing that is new, once: a failure or a note is said when it begins or changes, not at
every pass that meets it again; and again, into the same Event, before the API server would forget it (after an hour). A
message of which only a number changed is the same matter (`kube.events.matter_of`): its Event shows the new number.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Generic, TypeVar

from fairlead.kube.events import STAMP, Recorder, matter_of
from fairlead.model import LoadBalancer, NodeService, Note, Outcome, ServiceKey
from fairlead.state import State
from fairlead.web import View

Matter = tuple[str, str]
"""Reason of an Event, and what it is about."""

START_S = 60.0
"""How long pods of a new Service may take to start, with an image to pull, before an Event says that it has none."""

REMIND_S = 45 * 60.0
"""What lasts is said again after this time: `kubectl describe` shows nothing of what the API server has forgotten."""


IntentT = TypeVar("IntentT", LoadBalancer, NodeService)


class Telling:
    """A matter that lasts. `timer` says it next."""

    def __init__(self, message: str, timer: asyncio.TimerHandle) -> None:
        self.message = message
        self.timer = timer
        self.begun = False
        """Whether it was said before."""


class Reporter(Generic[IntentT]):
    """The `report` of a role's loop.

    reason: of Events about what this role could not do. removal_reason: the same, about Services for which nothing is wanted
    any more. who: put before their messages, if not empty. notes: which notes of an intent this role is the one to tell.
    patience_s: so long a thing that may pass by itself must last before it is said. Much that looks wrong on the way from one
    state of a cluster to the next is over in a moment, and not worth an Event. A refusal is said at once.
    start_s: a note that is normal at the start (`Note.at_start`) is not said before the Service is as old as that.
    """

    def __init__(
        self,
        view: View,
        state: State,
        recorder: Recorder,
        *,
        reason: str,
        removal_reason: str = "",
        who: str = "",
        notes: Callable[[IntentT], Iterable[Note]] | None = None,
        patience_s: float = 0.0,
        start_s: float = START_S,
        remind_s: float = REMIND_S,
    ) -> None:
        self._view = view
        self._state = state
        self._recorder = recorder
        self._reason = reason
        self._removal_reason = removal_reason or reason
        self._who = f"{who}: " if who else ""
        self._notes: Callable[[IntentT], Iterable[Note]] | None = notes
        self._patience_s = patience_s
        self._start_s = start_s
        self._remind_s = remind_s
        self._said: dict[ServiceKey, dict[Matter, Telling]] = {}

    def __call__(self, intents: Mapping[ServiceKey, IntentT], outcomes: Mapping[ServiceKey, Outcome]) -> None:
        self._view.record(intents, outcomes)
        for key, outcome in outcomes.items():
            said = self._said.pop(key, {})
            still = {(each.reason, matter_of(each.message)): each for each in self._to_say(intents.get(key), outcome)}
            for over in said.keys() - still.keys():
                said.pop(over).timer.cancel()
            patience_s = self._patience_s if outcome.state != "refused" else 0.0
            for matter, note in sorted(still.items()):
                if (telling := said.get(matter)) is None:
                    wait_s = max(patience_s, self._start_left_s(key)) if note.at_start else patience_s
                    timer = asyncio.get_running_loop().call_later(wait_s, self._say, key, matter)
                    said[matter] = Telling(note.message, timer)
                elif telling.message != note.message:
                    telling.message = note.message
                    if telling.begun:
                        self._tell(key, note.reason, note.message)
            if said:
                self._said[key] = said

    def close(self) -> None:
        """Say nothing more: another process does now."""
        for said in self._said.values():
            for telling in said.values():
                telling.timer.cancel()
        self._said.clear()

    def _start_left_s(self, key: ServiceKey) -> float:
        """For how long pods of the Service may still be starting; `start_s` at most, whatever the clocks of others say."""
        service = self._state.services.get(key)
        try:
            created = datetime.strptime((service and service.metadata.creation_timestamp) or "", STAMP).replace(tzinfo=UTC)
        except ValueError:
            return 0.0
        return min(self._start_s, self._start_s - (datetime.now(UTC) - created).total_seconds())

    def _to_say(self, intent: IntentT | None, outcome: Outcome) -> Iterable[Note]:
        if outcome.state in ("refused", "unavailable"):
            # Words that are somebody else's, such as kube-proxy's, may name who speaks already.
            named = self._who and outcome.message.startswith(self._who.removesuffix(": "))
            removing = intent is None and outcome.state == "unavailable"
            reason = outcome.reason or (self._removal_reason if removing else self._reason)
            yield Note(reason, outcome.message if named else self._who + outcome.message)
        if intent is not None and self._notes is not None:
            yield from self._notes(intent)

    def _say(self, key: ServiceKey, matter: Matter) -> None:
        telling = self._said[key][matter]
        telling.begun = True
        telling.timer = asyncio.get_running_loop().call_later(self._remind_s, self._say, key, matter)
        self._tell(key, matter[0], telling.message)

    def _tell(self, key: ServiceKey, reason: str, message: str) -> None:
        if (service := self._state.services.get(key)) is not None:
            self._recorder.event(key, service.metadata.uid, "Warning", reason, message)
