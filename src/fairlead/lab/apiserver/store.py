"""The objects, their versions and their history: the parts of etcd and the watch cache of a real
API server. No HTTP.

In: complete, validated objects. Out: objects, lists as of a version, and the events since a
version. Invariants: one version counter for all kinds rises by one with each write; a stored object
is never modified (a write stores a new one), so it is encoded once for all watchers and lists; an
event older than the compacted version is never returned, the caller gets ApiFailure 410 instead.
Follows https://kubernetes.io/docs/reference/using-api/api-concepts/ (resource versions, efficient
detection of changes).
"""

import asyncio
from collections import deque
from functools import cached_property
from typing import Literal

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.failure import expired, too_old
from fairlead.lab.apiserver.kinds import Kind

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str]

_ENCODE = msgspec.json.Encoder().encode


class Stored:
    """One version of one object. All readers share `object`: it must not be modified."""

    def __init__(self, obj: Object, version: int) -> None:
        self.object = obj
        self.version = version

    @cached_property
    def encoded(self) -> bytes:
        return _ENCODE(self.object)

    @cached_property
    def list_item(self) -> bytes:
        """The encoded object without apiVersion and kind, which a list states once for all its
        items."""
        return _ENCODE(
            {
                name: value
                for name, value in self.object.items()
                if name not in ("apiVersion", "kind")
            }
        )

    @property
    def key(self) -> Key:
        return key_of(self.object)


class Change:
    """One write as watchers see it. `previous` is None for a creation; for a deletion `stored` is
    the last state."""

    def __init__(
        self, kind: Kind, event: EventType, stored: Stored, previous: Stored | None
    ) -> None:
        self.kind = kind
        self.event = event
        self.stored = stored
        self.previous = previous

    @property
    def version(self) -> int:
        return self.stored.version

    @cached_property
    def line(self) -> bytes:
        """The event as one line of a watch, encoded once for all watchers."""
        return event_line(self.event, self.stored.encoded)


def event_line(event: str, encoded: bytes) -> bytes:
    return b'{"type":"' + event.encode() + b'","object":' + encoded + b"}\n"


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Watcher:
    """The changes of one kind that a watch has not sent yet."""

    def __init__(self, backlog: list[Change], limit: int) -> None:
        self._waiting = deque(backlog)
        self.limit = limit
        self._wake = asyncio.Event()
        self.closed = False
        self.overflowed = False

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def offer(self, change: Change) -> None:
        if len(self._waiting) >= self.limit:
            # A client that does not read must not keep the whole history in memory. Its watch ends,
            # and it lists again.
            self.closed = self.overflowed = True
        else:
            self._waiting.append(change)
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    def wake(self) -> None:
        """Make a waiting `take` return, even with no changes."""
        self._wake.set()

    async def take(self, timeout_s: float) -> list[Change]:
        """Return all pending changes, in order. Return none if `timeout_s` passes, or if the
        watcher is woken or closed first."""
        if not self._waiting and not self.closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        self._wake.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class Store:
    """All objects, in memory. No method blocks, except a Watcher's `take`."""

    def __init__(self, *, history_limit: int = 20_000, watcher_limit: int = 100_000) -> None:
        self.version = 1
        self.compacted = 0
        """The latest version whose events are gone: a watch may start at this version or later."""
        self._history_limit = history_limit
        self._watcher_limit = watcher_limit
        self._objects: dict[Kind, dict[Key, Stored]] = {}
        self._sorted: dict[Kind, list[Stored]] = {}
        self._history: deque[Change] = deque()
        self._watchers: dict[Kind, set[Watcher]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Stored | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds that have, or had, an object."""
        return tuple(self._objects)

    def all_of(self, kind: Kind) -> list[Stored]:
        """Return all objects of a kind, sorted by namespace and name. The list is shared: do not
        modify it."""
        items = self._sorted.get(kind)
        if items is None:
            objects = self._objects.get(kind, {})
            items = self._sorted[kind] = [objects[key] for key in sorted(objects)]
        return items

    def list_at(self, kind: Kind, version: int) -> list[Stored]:
        """Return the list as of `version`: the current one with all later changes undone. Raise
        ApiFailure 410 if the version is compacted."""
        if version >= self.version:
            return self.all_of(kind)
        if version < self.compacted:
            raise expired(
                "The provided continue parameter is too old to display a consistent list result."
            )
        objects = dict(self._objects.get(kind, {}))
        for change in reversed(self._history):
            if change.version <= version:
                break
            if change.kind is not kind:
                continue
            if change.previous is None:
                objects.pop(change.stored.key, None)
            else:
                objects[change.stored.key] = change.previous
        return [objects[key] for key in sorted(objects)]

    def put(self, kind: Kind, obj: Object) -> Stored:
        """Store a new object or a new state of an object, under the next version, and notify the
        watchers."""
        objects = self._objects.setdefault(kind, {})
        key = key_of(obj)
        previous = objects.get(key)
        stored = self._stamp(obj)
        objects[key] = stored
        self._sorted.pop(kind, None)
        self._record(Change(kind, "MODIFIED" if previous else "ADDED", stored, previous))
        return stored

    def remove(self, kind: Kind, obj: Object) -> Stored:
        """Remove an object. `obj` is its last state, which the DELETED event carries."""
        previous = self._objects[kind].pop(key_of(obj))
        stored = self._stamp(obj)
        self._sorted.pop(kind, None)
        self._record(Change(kind, "DELETED", stored, previous))
        return stored

    def _stamp(self, obj: Object) -> Stored:
        self.version += 1
        return Stored(
            {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}},
            self.version,
        )

    def _record(self, change: Change) -> None:
        self._history.append(change)
        if len(self._history) > self._history_limit:
            self.compacted = self._history.popleft().version
        for watcher in self._watchers.get(change.kind, ()):
            watcher.offer(change)

    def compact(self) -> None:
        """Drop the history: every version before the current one is too old from now on."""
        self._history.clear()
        self.compacted = self.version

    def since(self, kind: Kind, version: int) -> list[Change]:
        """Return the changes of a kind after `version`. Raise ApiFailure 410 if some of them are
        compacted."""
        if version < self.compacted:
            raise too_old(version, self.compacted)
        changes = []
        for change in reversed(self._history):
            if change.version <= version:
                break
            if change.kind is kind:
                changes.append(change)
        changes.reverse()
        return changes

    def watch(self, kind: Kind, version: int | None) -> Watcher:
        """Return a Watcher with the changes since `version`, or from now on (None). Release it with
        `unwatch`."""
        backlog = [] if version is None else self.since(kind, version)
        watcher = Watcher(backlog, self._watcher_limit)
        self._watchers.setdefault(kind, set()).add(watcher)
        return watcher

    @property
    def watcher_count(self) -> int:
        """The number of running watches."""
        return sum(len(watchers) for watchers in self._watchers.values())

    def unwatch(self, kind: Kind, watcher: Watcher) -> None:
        self._watchers.get(kind, set()).discard(watcher)

    def wake_watchers(self) -> None:
        """Make every watch check its faults, even without changes."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.wake()

    def close_watchers(self, kind: Kind | None = None) -> None:
        """End every watch of one kind or (None) of all kinds, as a server does on shutdown."""
        for watchers in (
            self._watchers.values() if kind is None else [self._watchers.get(kind, set())]
        ):
            for watcher in watchers:
                watcher.close()
