"""The newest version of an object that we know: from the watch, or from the answer to our own last
write.

The watch is a moment behind. Who looked only there would write again what he has just written.
Invariant: an answer counts only until the watch shows that version or a later one, and at most
until the next audit, so that an API server whose versions went back (etcd was restored) is believed
again. Versions of one kind may be compared as numbers (KEP-5504), also those of an object and of
its successor by the same name."""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from fairlead.kube.objects import ObjectT, Service
from fairlead.model import ServiceKey
from fairlead.state import State

KeyT = TypeVar("KeyT", bound=Hashable)


class Newest(Generic[KeyT, ObjectT]):
    """The answers to our writes of one kind."""

    def __init__(self) -> None:
        self._answers: dict[KeyT, ObjectT] = {}

    @property
    def answered(self) -> Collection[KeyT]:
        """Of what there are answers."""
        return self._answers.keys()

    def note(self, key: KeyT, answer: ObjectT) -> None:
        """What the API server answered to a write. Answers to writes that were made side by side
        may come in any order."""
        known = self._answers.get(key)
        if (
            known is None
            or known.metadata.uid != answer.metadata.uid
            or known.metadata.version < answer.metadata.version
        ):
            self._answers[key] = answer

    def answer(self, key: KeyT) -> ObjectT | None:
        """The last answer, whatever the watch shows."""
        return self._answers.get(key)

    def of(self, key: KeyT, watched: ObjectT) -> ObjectT:
        """The newer one of what the watch shows and what was answered."""
        answer = self._answers.get(key)
        if answer is None:
            return watched
        if answer.metadata.version > watched.metadata.version:
            return answer
        del self._answers[key]
        return watched

    def forget(self, key: KeyT) -> ObjectT | None:
        """Believe the watch alone, about this one. Answers what is forgotten."""
        return self._answers.pop(key, None)

    def forget_all(self) -> None:
        """Believe the watch alone."""
        self._answers.clear()


class NewestServices:
    """Shared by all drivers that write on Services. What the watch shows no more is gone, whatever
    was answered."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._newest = Newest[ServiceKey, Service]()

    def note(self, answer: Service) -> None:
        """What the API server answered to a write."""
        self._newest.note(answer.key, answer)

    def forget_answers(self) -> None:
        """Believe the watch alone."""
        self._newest.forget_all()

    def of(self, keys: Iterable[ServiceKey] | None) -> Mapping[ServiceKey, Service]:
        """Those of these Services that there are; None: of all."""
        services = self._state.services
        if keys is None:
            return services
        return {key: self._newest.of(key, services[key]) for key in keys if key in services}
