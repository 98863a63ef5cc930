"""The objects, their versions and their history: what etcd and the watch cache are to a real API
server. No HTTP.

In: whole objects, already checked. Out: objects, lists as of a version, and the events since one.
Invariants: the version is one counter over all kinds and rises by one with each write; a stored
object is never changed in place (a write stores another one), so it is encoded once, however many
watchers and lists it goes to; an event older than the compacted version is never given out, the
caller gets ApiFailure 410 instead. Follows
https://kubernetes.io/docs/reference/using-api/api-concepts/ (resource versions, efficient detection
of changes)."""

import asyncio
from collections import deque
from functools import cached_property
from typing import Literal

import msgspec

from fairlead.lab.apiserver.failure import Object, expired, too_old
from fairlead.lab.apiserver.kinds import Kind

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str]

_ENCODE = msgspec.json.Encoder().encode


class Stored:
    """One version of one object. `object` is shared by everybody who reads it and must not be
    changed."""

    def __init__(self, obj: Object, version: int) -> None:
        self.object = obj
        self.version = version

    @cached_property
    def encoded(self) -> bytes:
        return _ENCODE(self.object)

    @cached_property
    def bare(self) -> bytes:
        """As an item of a list, which says once for all of what kind they are."""
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
    """The changes of one kind that somebody has not taken yet."""

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
            # A client that does not read must not hold all of history in memory: it is cut off and
            # lists again.
            self.closed = self.overflowed = True
        else:
            self._waiting.append(change)
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    def wake(self) -> None:
        """Let a `take` that waits return, though there is nothing to take."""
        self._wake.set()

    async def take(self, timeout_s: float) -> list[Change]:
        """All changes that wait, in order; none if `timeout_s` passes or the watcher is woken or
        closed first."""
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
    """All objects in memory. Every method but a Watcher's `take` returns at once."""

    def __init__(self, *, history_limit: int = 20_000, watcher_limit: int = 100_000) -> None:
        self.version = 1
        self.compacted = 0
        """The latest version whose events are gone: a watch may start from here or later."""
        self._history_limit = history_limit
        self._watcher_limit = watcher_limit
        self._objects: dict[Kind, dict[Key, Stored]] = {}
        self._sorted: dict[Kind, list[Stored]] = {}
        self._history: deque[Change] = deque()
        self._watchers: dict[Kind, set[Watcher]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Stored | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of which there is, or was, an object."""
        return tuple(self._objects)

    def all_of(self, kind: Kind) -> list[Stored]:
        """All objects of a kind, sorted by namespace and name. The list is shared: do not change
        it."""
        items = self._sorted.get(kind)
        if items is None:
            objects = self._objects.get(kind, {})
            items = self._sorted[kind] = [objects[key] for key in sorted(objects)]
        return items

    def list_at(self, kind: Kind, version: int) -> list[Stored]:
        """The list as it was at `version`: today's, with everything since undone. Raises ApiFailure
        410 if it is too old."""
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
        """Store a new object or a new state of one, under the next version, and tell the
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
        """Take an object out. `obj` is its last state, which the DELETED event carries."""
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
        """Forget the history now: every version before the present one is too old from here on."""
        self._history.clear()
        self.compacted = self.version

    def since(self, kind: Kind, version: int) -> list[Change]:
        """The changes of a kind after `version`. Raises ApiFailure 410 if they are no longer all
        known."""
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
        """A Watcher with the changes since `version`, or from now on (None). Give it back to
        `unwatch`."""
        backlog = [] if version is None else self.since(kind, version)
        watcher = Watcher(backlog, self._watcher_limit)
        self._watchers.setdefault(kind, set()).add(watcher)
        return watcher

    @property
    def watcher_count(self) -> int:
        """How many watches run now."""
        return sum(len(watchers) for watchers in self._watchers.values())

    def unwatch(self, kind: Kind, watcher: Watcher) -> None:
        self._watchers.get(kind, set()).discard(watcher)

    def wake_watchers(self) -> None:
        """Let every watch look again at what it should do, beside passing changes on."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.wake()

    def close_watchers(self, kind: Kind | None = None) -> None:
        """End every watch, of one kind or (None) of all, as a server does that shuts down."""
        for watchers in (
            self._watchers.values() if kind is None else [self._watchers.get(kind, set())]
        ):
            for watcher in watchers:
                watcher.close()
