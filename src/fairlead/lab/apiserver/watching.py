"""Watches: the events of a collection, as lines, until the client or the server ends the watch.

In: the store, the watched collection and the start version. Out: lines as events occur; each is one
JSON document. Invariants: from the client's start version to the last event that it receives, no
event is missing or duplicated; a watch from a compacted version gets an ERROR event 410 and nothing
else; a bookmark is sent only when every event up to its version has been sent. Follows KEP-365
(pages), KEP-956 (bookmarks), KEP-3157 (watch-list) and the watch cache of the API server.
"""

import math
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.failure import ApiFailure
from fairlead.lab.apiserver.kinds import Kind
from fairlead.lab.apiserver.listing import in_scope, select
from fairlead.lab.apiserver.request import ListOptions, Target
from fairlead.lab.apiserver.selectors import Selection
from fairlead.lab.apiserver.store import Change, Store, Stored, Watcher, event_line
from fairlead.lab.apiserver.table import table

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
DEFAULT_TIMEOUT_S = 3600.0
"""Duration of a watch without `timeoutSeconds`. The API server uses 30 to 60 minutes."""

_TICK_S = 5.0


class Line(msgspec.Struct, frozen=True):
    """A line of a watch. `sort` is the event's type. A `WAKE`, without data, lets the sender check
    for faults."""

    sort: str
    data: bytes


class Printer(msgspec.Struct, frozen=True):
    """How objects are written: unchanged, or (for kubectl) as a Table of one row. `include` is the
    Table's option."""

    kind: Kind
    now: Callable[[], datetime]
    as_table: bool = False
    include: str = "Metadata"

    def event(self, event: str, stored: Stored) -> Line:
        if not self.as_table:
            return Line(event, event_line(event, stored.encoded))
        metadata = {"resourceVersion": str(stored.version)}
        row = table(self.kind, [stored.object], metadata, self.now(), self.include)
        return Line(event, event_line(event, msgspec.json.encode(row)))

    def change(self, event: str, change: Change) -> Line:
        """Return the line of a change. Lines that are equal for all watchers are encoded once."""
        if not self.as_table and event == change.event:
            return Line(event, change.line)
        return self.event(event, change.stored)

    def bookmark(self, version: int, *, initial_events_end: bool = False) -> Line:
        metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
        if initial_events_end:
            metadata["annotations"] = {INITIAL_EVENTS_END: "true"}
        if self.as_table:
            obj = table(self.kind, [], metadata, self.now())
        else:
            obj = {
                "kind": self.kind.kind,
                "apiVersion": self.kind.group_version,
                "metadata": metadata,
            }
        return Line("BOOKMARK", event_line("BOOKMARK", msgspec.json.encode(obj)))


def error_line(failure: ApiFailure) -> Line:
    return Line("ERROR", event_line("ERROR", msgspec.json.encode(failure.status())))


class View(msgspec.Struct, frozen=True):
    """The collection that a client watches, and the format of its events."""

    target: Target
    selection: Selection
    printer: Printer

    def line(self, change: Change) -> Line | None:
        event = event_for(self.target, self.selection, change)
        if event is None:
            return None
        return (
            _deletion(self.printer, change)
            if event == "DELETED"
            else self.printer.change(event, change)
        )


async def watch(
    store: Store,
    target: Target,
    options: ListOptions,
    printer: Printer,
    *,
    bookmark_interval_s: float,
) -> AsyncIterator[Line]:
    """Yield every line of one watch. It ends at its timeout, when the store closes its watchers, or
    after an ERROR event."""
    selection = select(target, options)
    deadline = time.monotonic() + (
        DEFAULT_TIMEOUT_S if options.timeout_s is None else options.timeout_s
    )
    # Without a version (or with 0) a watch begins with the existing objects, as ADDED events.
    from_start = options.initial_events or not options.version
    try:
        watcher = store.watch(target.kind, None if from_start else options.version)
    except ApiFailure as failure:
        yield error_line(failure)
        return
    try:
        if from_start:
            version = store.version
            for stored in list(store.all_of(target.kind)):
                if in_scope(target, selection, stored):
                    yield printer.event("ADDED", stored)
            if options.initial_events and options.bookmarks:
                yield printer.bookmark(version, initial_events_end=True)
        view = View(target, selection, printer)
        interval_s = bookmark_interval_s if options.bookmarks else math.inf
        async for line in _follow(store, watcher, view, deadline, interval_s):
            yield line
        if options.bookmarks and not watcher.pending and not watcher.overflowed:
            yield printer.bookmark(store.version)
    finally:
        store.unwatch(target.kind, watcher)


async def _follow(
    store: Store, watcher: Watcher, view: View, deadline: float, bookmark_interval_s: float
) -> AsyncIterator[Line]:
    """Yield the changes as they occur, and bookmarks in between, until the deadline."""
    next_bookmark = time.monotonic() + bookmark_interval_s
    while not watcher.closed and (now := time.monotonic()) < deadline:
        for change in await watcher.take(
            max(0.001, min(deadline - now, next_bookmark - now, _TICK_S))
        ):
            line = view.line(change)
            if line is not None:
                yield line
        if time.monotonic() >= next_bookmark:
            next_bookmark = time.monotonic() + bookmark_interval_s
            if not watcher.pending:
                yield view.printer.bookmark(store.version)
        yield Line("WAKE", b"")


def event_for(target: Target, selection: Selection, change: Change) -> str | None:
    """Return the type of a change for one watcher, None if it does not concern it. An object that
    starts to match its selectors is ADDED, an object that no longer matches is DELETED."""
    now = change.event != "DELETED" and in_scope(target, selection, change.stored)
    before = change.previous is not None and in_scope(target, selection, change.previous)
    match now, before:
        case True, True:
            return "MODIFIED"
        case True, False:
            return "ADDED"
        case False, True:
            return "DELETED"
        case _:
            return None


def _deletion(printer: Printer, change: Change) -> Line:
    """Return the line of a deletion. A removed object is sent in its last state; an object that
    only left the selection is sent in the last state that matched."""
    if change.event == "DELETED" or change.previous is None:
        return printer.change("DELETED", change)
    last = change.previous.object
    stamped = last | {"metadata": last["metadata"] | {"resourceVersion": str(change.version)}}
    return printer.event("DELETED", Stored(stamped, change.version))
