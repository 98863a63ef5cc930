"""The newest known version of an object: from the watch, or from the answer to the last write of
this process.

The watch lags behind. A driver that looked only at the watch would repeat a write that it has just
made. client-go calls this a mutation cache. Invariant: an answer counts only until the watch shows
that version or a later one, and at most until the next audit. So the watch counts again after the
next audit even if the API server's versions went back (etcd was restored from a backup). Versions
of one resource type can be compared as numbers (KEP-5504), also the versions of an object and of
its successor with the same name."""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from fairlead.kube.objects import ObjectT, Service
from fairlead.model import ServiceKey
from fairlead.state import State

KeyT = TypeVar("KeyT", bound=Hashable)


class MutationCache(Generic[KeyT, ObjectT]):
    """The answers of the API server to the writes of this process, for objects of one type."""

    def __init__(self) -> None:
        self._answers: dict[KeyT, ObjectT] = {}

    @property
    def answered(self) -> Collection[KeyT]:
        """The keys for which an answer is stored."""
        return self._answers.keys()

    def note(self, key: KeyT, answer: ObjectT) -> None:
        """Store the API server's answer to a write, unless a newer one is stored: answers to
        concurrent writes may arrive in any order."""
        known = self._answers.get(key)
        if (
            known is None
            or known.metadata.uid != answer.metadata.uid
            or known.metadata.version < answer.metadata.version
        ):
            self._answers[key] = answer

    def answer(self, key: KeyT) -> ObjectT | None:
        """Return the stored answer, without regard to the watch."""
        return self._answers.get(key)

    def of(self, key: KeyT, watched: ObjectT) -> ObjectT:
        """Return the newer version: `watched`, or the stored answer."""
        answer = self._answers.get(key)
        if answer is None:
            return watched
        if answer.metadata.version > watched.metadata.version:
            return answer
        del self._answers[key]
        return watched

    def forget(self, key: KeyT) -> ObjectT | None:
        """Delete the stored answer for `key` and return it. From now on only the watch is used."""
        return self._answers.pop(key, None)

    def forget_all(self) -> None:
        """Delete all stored answers. From now on only the watch is used."""
        self._answers.clear()


class ServiceCache:
    """The Services as the watch or the last write of this process shows them. Shared by all drivers
    that write to Services. A Service that the watch no longer shows is gone, even if an answer for
    it is stored."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cache = MutationCache[ServiceKey, Service]()

    def note(self, answer: Service) -> None:
        """Store the API server's answer to a write."""
        self._cache.note(answer.key, answer)

    def forget_answers(self) -> None:
        """Delete all stored answers. From now on only the watch is used."""
        self._cache.forget_all()

    def of(self, keys: Iterable[ServiceKey] | None) -> Mapping[ServiceKey, Service]:
        """Return the given Services that exist; with None, all Services as the watch shows them."""
        services = self._state.services
        if keys is None:
            return services
        return {key: self._cache.of(key, services[key]) for key in keys if key in services}
