"""A copy of one collection, and the changes to it since they were last taken. Pure.

In: items from a list or a watch. Out: the objects, and change sets. Invariants: a list takes effect
only when it is complete, as the difference to the previous objects; an object that cannot be
decoded keeps its previous state; a change that has not been taken is never lost; an object is
reported as deleted only if its existence was reported."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic

from fairlead.kube.objects import ObjectKey, ObjectT
from fairlead.kube.watch_events import Item, same_but_version


class ObjectCache(Generic[ObjectT]):
    """A copy of one collection.

    `transform` may shorten an object before it is stored, or drop it (None): it then counts as
    absent."""

    def __init__(self, transform: Callable[[ObjectT], ObjectT | None] | None = None) -> None:
        self._transform = transform
        self._objects: dict[ObjectKey, ObjectT] = {}
        self._listed: dict[ObjectKey, ObjectT] | None = None
        self._changed: dict[ObjectKey, ObjectT | None] = {}
        self._unreported: set[ObjectKey] = set()
        """The keys in `_changed` whose objects have never been reported as existing."""

    @property
    def objects(self) -> Mapping[ObjectKey, ObjectT]:
        return MappingProxyType(self._objects)

    @property
    def listing(self) -> bool:
        """Whether a list has begun and is not complete."""
        return self._listed is not None

    def begin_list(self) -> None:
        """Start a new list, to which the following items belong. An incomplete list is
        discarded."""
        self._listed = {}

    def complete_list(self) -> None:
        """End the list: objects that are not in it are deleted."""
        listed, self._listed = self._listed or {}, None
        for key in self._objects.keys() - listed.keys():
            self._remove(key)
        for key, object_ in listed.items():
            self._store(key, object_)

    def drop_list(self) -> None:
        """Discard an incomplete list."""
        self._listed = None

    def process(self, item: Item[ObjectT]) -> None:
        """Process one item of the list, or one event."""
        object_ = item.object
        if object_ is None:
            # The object exists but cannot be decoded. Acting on its previous state does less harm
            # than treating it as deleted.
            object_ = self._objects.get(item.key)
        elif self._transform is not None:
            object_ = self._transform(object_)
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
        """Return the changes since the last call; None stands for a deleted object."""
        changed, self._changed = self._changed, {}
        self._unreported.clear()
        return changed

    def _store(self, key: ObjectKey, object_: ObjectT) -> None:
        old = self._objects.get(key)
        self._objects[key] = object_
        if old is None and key not in self._changed:
            self._unreported.add(key)
        if old is None or not same_but_version(old, object_):
            self._changed[key] = object_

    def _remove(self, key: ObjectKey) -> None:
        if self._objects.pop(key, None) is None:
            return
        if key in self._unreported:
            self._unreported.discard(key)
            del self._changed[key]
        else:
            self._changed[key] = None
