"""The newest version of each AddressGrant that we know: from the watch, or from the answer to our own last write.

As `newest` does for Services. A grant that the watch has never shown counts from the answer to its creation on; one that we
have deleted is gone, until the watch shows another of its name.
Invariant: an answer counts only until the watch shows that version or a later one, and at most until the next audit.
"""

from fairlead.kube.own import AddressGrant
from fairlead.model import ServiceKey
from fairlead.state import State

SOURCE = "addressgrants"


class NewestGrants:
    """Shared by those who write AddressGrants and those who need them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._answers: dict[str, AddressGrant] = {}
        self._answered: dict[ServiceKey, set[str]] = {}  # the names of the answers that name a Service
        self._deleted: dict[str, str] = {}  # the uid of what we deleted, by name

    @property
    def absent(self) -> bool:
        """The API server has no such kind."""
        return SOURCE in self._state.absent

    def note(self, answer: AddressGrant) -> None:
        """What the API server answered to a write."""
        self._forget(answer.metadata.name)
        self._answers[answer.metadata.name] = answer
        for holder in answer.spec.holders:
            self._answered.setdefault(holder.key, set()).add(answer.metadata.name)
        self._deleted.pop(answer.metadata.name, None)

    def note_deletion(self, grant: AddressGrant) -> None:
        """It is not there any more."""
        self._forget(grant.metadata.name)
        self._deleted[grant.metadata.name] = grant.metadata.uid

    def forget_answers(self) -> None:
        """Believe the watch alone."""
        self._answers.clear()
        self._answered.clear()
        self._deleted.clear()

    def named(self, name: str) -> AddressGrant | None:
        watched, answer = self._state.grants.get(name), self._answers.get(name)
        if watched is None:
            self._deleted.pop(name, None)
            return answer
        if self._deleted.get(name) == watched.metadata.uid:
            return None
        self._deleted.pop(name, None)
        if answer is None or _version(answer) > _version(watched):
            return answer or watched
        self._forget(name)
        return watched

    def of(self, key: ServiceKey) -> tuple[AddressGrant, ...]:
        """Those that name this Service."""
        names = {grant.metadata.name for grant in self._state.grants_of(key)}
        names |= self._answered.get(key, set())
        found = (self.named(name) for name in sorted(names))
        return tuple(grant for grant in found if grant is not None and grant.holder(key) is not None)

    def holders(self) -> set[ServiceKey]:
        """All Services that a grant names."""
        return {*self._state.granted, *self._answered}

    def _forget(self, name: str) -> None:
        answer = self._answers.pop(name, None)
        for holder in answer.spec.holders if answer is not None else ():
            self._answered[holder.key].discard(name)
            if not self._answered[holder.key]:
                del self._answered[holder.key]


def _version(grant: AddressGrant) -> int:
    return int(grant.metadata.resource_version or 0)
