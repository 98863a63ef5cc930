"""The newest version of each AddressGrant that we know: from the watch, or from the answer to our
own last write.

As `newest` does for Services. A grant that the watch has never shown counts from the answer to its
creation on; one that we have deleted is gone, until the watch shows another of its name. Invariant:
an answer counts only until the watch shows that version or a later one, and at most until the next
audit."""

from fairlead.drivers.newest import Newest
from fairlead.kube.crds import AddressGrant
from fairlead.model import ServiceKey
from fairlead.state import State

SOURCE = "addressgrants"


class NewestGrants:
    """Shared by those who write AddressGrants and those who need them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._newest = Newest[str, AddressGrant]()
        self._answered: dict[
            ServiceKey, set[str]
        ] = {}  # the names of the answers that name a Service
        self._deleted: dict[str, str] = {}  # the uid of what we deleted, by name

    @property
    def absent(self) -> bool:
        """The API server has no such kind."""
        return SOURCE in self._state.absent

    def note(self, answer: AddressGrant) -> None:
        """What the API server answered to a write."""
        name = answer.metadata.name
        self._deleted.pop(name, None)
        self._unlist(self._newest.answer(name))
        self._newest.note(name, answer)
        self._list(self._newest.answer(name))

    def note_deletion(self, grant: AddressGrant) -> None:
        """It is not there any more."""
        name = grant.metadata.name
        self._unlist(self._newest.forget(name))
        self._deleted[name] = grant.metadata.uid

    def forget_answers(self) -> None:
        """Believe the watch alone."""
        self._newest.forget_all()
        self._answered.clear()
        self._deleted.clear()

    def named(self, name: str) -> AddressGrant | None:
        watched, answer = self._state.grants.get(name), self._newest.answer(name)
        if watched is None:
            self._deleted.pop(name, None)
            return answer
        if self._deleted.get(name) == watched.metadata.uid:
            return None
        self._deleted.pop(name, None)
        newest = self._newest.of(name, watched)
        if newest is watched:
            self._unlist(answer)
        return newest

    def of(self, key: ServiceKey) -> tuple[AddressGrant, ...]:
        """Those that name this Service."""
        names = {grant.metadata.name for grant in self._state.grants_of(key)}
        names |= self._answered.get(key, set())
        found = (self.named(name) for name in sorted(names))
        return tuple(
            grant for grant in found if grant is not None and grant.holder(key) is not None
        )

    def holders(self) -> set[ServiceKey]:
        """All Services that a grant names."""
        return {*self._state.granted, *self._answered}

    def _list(self, answer: AddressGrant | None) -> None:
        if answer is not None:
            for key in {holder.key for holder in answer.spec.holders}:
                self._answered.setdefault(key, set()).add(answer.metadata.name)

    def _unlist(self, answer: AddressGrant | None) -> None:
        if answer is not None:
            for key in {holder.key for holder in answer.spec.holders}:
                self._answered[key].discard(answer.metadata.name)
                if not self._answered[key]:
                    del self._answered[key]
