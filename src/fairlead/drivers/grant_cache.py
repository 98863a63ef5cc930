"""The newest known version of each AddressGrant: from the watch, or from the answer to the last
write of this process.

Works as `mutation_cache.ServiceCache` does for Services, with two additions. A grant that this
process created exists as soon as the API server has answered, before the watch shows it. A grant
that this process deleted is gone until the watch shows another one with its name. Invariant: an
answer counts only until the watch shows that version or a later one, and at most until the next
audit."""

from fairlead.drivers.mutation_cache import MutationCache
from fairlead.kube.crds import AddressGrant
from fairlead.model import ServiceKey
from fairlead.state import State

SOURCE = "addressgrants"


class GrantCache:
    """The AddressGrants as the watch or the last write of this process shows them. Shared by the
    drivers that write AddressGrants and the drivers that read them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cache = MutationCache[str, AddressGrant]()
        self._answered: dict[ServiceKey, set[str]] = {}
        """The names of the grants with a stored answer, keyed by the Services that they name."""
        self._deleted: dict[str, str] = {}
        """The uids of the grants that this process deleted, keyed by their names."""

    @property
    def absent(self) -> bool:
        """Whether the CRD AddressGrant is not installed."""
        return SOURCE in self._state.absent

    def note(self, answer: AddressGrant) -> None:
        """Store the API server's answer to a write."""
        name = answer.metadata.name
        self._deleted.pop(name, None)
        self._unlist(self._cache.answer(name))
        self._cache.note(name, answer)
        self._list(self._cache.answer(name))

    def note_deletion(self, grant: AddressGrant) -> None:
        """Record that this process deleted the grant, or found that it was already deleted."""
        name = grant.metadata.name
        self._unlist(self._cache.forget(name))
        self._deleted[name] = grant.metadata.uid

    def forget_answers(self) -> None:
        """Delete all stored answers. From now on only the watch is used."""
        self._cache.forget_all()
        self._answered.clear()
        self._deleted.clear()

    def named(self, name: str) -> AddressGrant | None:
        """Return the grant of this name, if it exists."""
        watched, answer = self._state.grants.get(name), self._cache.answer(name)
        if watched is None:
            self._deleted.pop(name, None)
            return answer
        if self._deleted.get(name) == watched.metadata.uid:
            return None
        self._deleted.pop(name, None)
        newest = self._cache.of(name, watched)
        if newest is watched:
            self._unlist(answer)
        return newest

    def of(self, key: ServiceKey) -> tuple[AddressGrant, ...]:
        """Return the grants that name this Service, sorted by name."""
        names = {grant.metadata.name for grant in self._state.grants_of(key)}
        names |= self._answered.get(key, set())
        found = (self.named(name) for name in sorted(names))
        return tuple(
            grant for grant in found if grant is not None and grant.holder(key) is not None
        )

    def holders(self) -> set[ServiceKey]:
        """Return the keys of all Services that a grant names."""
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
