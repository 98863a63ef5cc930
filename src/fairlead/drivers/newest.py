"""The newest version of each Service that we know: from the watch, or from the answer to our own last write.

The watch is a moment behind. A driver that looked only there would write again what it has just written.
Invariant: an answer counts only until the watch shows that version or a later one, and at most until the next audit, so
that an API server whose versions went back (etcd was restored) is believed again.
"""

from collections.abc import Iterable, Mapping

from fairlead.kube.objects import Service
from fairlead.model import ServiceKey
from fairlead.state import State


class NewestServices:
    """Shared by all drivers that write on Services."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._answers: dict[ServiceKey, Service] = {}

    def note(self, answer: Service) -> None:
        """What the API server answered to a write. Answers to writes that were made side by side may come in any order."""
        known = self._answers.get(answer.key)
        if known is None or known.metadata.uid != answer.metadata.uid or _version(known) < _version(answer):
            self._answers[answer.key] = answer

    def forget_answers(self) -> None:
        """Believe the watch alone."""
        self._answers.clear()

    def of(self, keys: Iterable[ServiceKey] | None) -> Mapping[ServiceKey, Service]:
        """Those of these Services that there are; None: of all."""
        services = self._state.services
        if keys is None:
            return services
        return {key: self._newer(key, services[key]) for key in keys if key in services}

    def _newer(self, key: ServiceKey, watched: Service) -> Service:
        answer = self._answers.get(key)
        if answer is None:
            return watched
        if answer.metadata.uid == watched.metadata.uid and _version(answer) > _version(watched):
            return answer
        del self._answers[key]
        return watched


def _version(service: Service) -> int:
    """Versions of one kind may be compared as numbers (KEP-5504)."""
    return int(service.metadata.resource_version or 0)
