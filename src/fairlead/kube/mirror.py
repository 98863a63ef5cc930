"""A copy of one collection, and what has changed in it since somebody last asked. Pure.

In: items as a list or a watch brings them. Out: the objects, and change sets. Invariants: a list
takes effect whole, when it is complete, and as the difference to what was there; an object that
cannot be read stays as it was; what was changed but not yet taken is never lost; only what was told
of is told to be gone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic

from fairlead.kube.objects import ObjectKey, ObjectT
from fairlead.kube.watching import Item, same_but_version


class Mirror(Generic[ObjectT]):
    """`keep` may shrink an object, or drop it (None): it then counts as not there."""

    def __init__(self, keep: Callable[[ObjectT], ObjectT | None] | None = None) -> None:
        self._keep = keep
        self._objects: dict[ObjectKey, ObjectT] = {}
        self._listed: dict[ObjectKey, ObjectT] | None = None
        self._changed: dict[ObjectKey, ObjectT | None] = {}
        self._untold: set[ObjectKey] = set()  # those in _changed that nobody was told of before

    @property
    def objects(self) -> Mapping[ObjectKey, ObjectT]:
        return MappingProxyType(self._objects)

    @property
    def listing(self) -> bool:
        """Whether a list has begun and is not complete."""
        return self._listed is not None

    def begin_list(self) -> None:
        """From here on items are those of a new list; one that was begun before and not completed
        is forgotten."""
        self._listed = {}

    def complete_list(self) -> None:
        """The list is whole: what it does not hold is not there any more."""
        listed, self._listed = self._listed or {}, None
        for key in self._objects.keys() - listed.keys():
            self._remove(key)
        for key, object_ in listed.items():
            self._store(key, object_)

    def drop_list(self) -> None:
        """The list will not be completed: as if it had not begun."""
        self._listed = None

    def absorb(self, item: Item[ObjectT]) -> None:
        """Take in one item of the list, or one event."""
        object_ = item.object
        if object_ is None:
            # It exists, that much is known. Of two wrongs, acting on an old state is smaller than
            # tearing it down.
            object_ = self._objects.get(item.key)
        elif self._keep is not None:
            object_ = self._keep(object_)
        gone = item.gone or object_ is None
        if self._listed is not None:
            if gone or object_ is None:
                self._listed.pop(item.key, None)
            else:
                self._listed[item.key] = object_
        elif gone or object_ is None:
            self._remove(item.key)
        else:
            self._store(item.key, object_)

    def take(self) -> Mapping[ObjectKey, ObjectT | None]:
        """What has changed since the last call; None: gone."""
        changed, self._changed = self._changed, {}
        self._untold.clear()
        return changed

    def _store(self, key: ObjectKey, object_: ObjectT) -> None:
        old = self._objects.get(key)
        self._objects[key] = object_
        if old is None and key not in self._changed:
            self._untold.add(key)
        if old is None or not same_but_version(old, object_):
            self._changed[key] = object_

    def _remove(self, key: ObjectKey) -> None:
        if self._objects.pop(key, None) is None:
            return
        if key in self._untold:
            self._untold.discard(key)
            del self._changed[key]
        else:
            self._changed[key] = None
