"""Write Events on Services, so that `kubectl describe` shows what Fairlead reports.

In: calls of `event`, which neither block nor fail. Out: v1 Events, written by the task that runs
`run`. Invariants: a repeated message is one Event whose count rises, written at most once per
interval, however often a retry repeats it. Messages that differ only in their numbers
(`without_numbers`) share one Event, which shows the latest text. The name of an Event is derived
from its content, so that the next process, or another replica, finds the Event and renews it
instead of writing a second one. Memory and queue are bounded. An Event that cannot be written is
logged and dropped. Follows the core/v1 Event reference and client-go's correlator (which counts
repetitions in the same way)."""

import asyncio
import hashlib
import re
import socket
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

import structlog

from fairlead.backoff import Backoff
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.objects import Fields, Object, ObjectKey, ObjectMeta, Resource
from fairlead.model import ServiceKey

log = structlog.get_logger()

MAX_SERIES = 32_768
"""The maximum number of different Events whose repetitions are counted; beyond it, the Event
reported least recently is forgotten."""
MAX_QUEUED = 32_768
"""The maximum number of Events in the queue. They are written one by one; the failure of the last
gateway is reported for 10,000 Services at once, and its recovery perhaps soon after."""
TRIES = 3
RECOVERED = "Recovered"
"""The reason of the Event that ends a Warning."""
MAX_MESSAGE_LENGTH, MAX_REASON_LENGTH = 1024, 128
STAMP = "%Y-%m-%dT%H:%M:%SZ"
STALE = timedelta(seconds=10)
"""If the Event of a Warning that still holds is older than this, a process that finds the Event
renews its time.

The previous process may have reported the recovery, at the earliest this long after the Warning
(`roles.report`). `kubectl describe` sorts by time, so without the renewal it would show the
recovery last. Besides, the server deletes an Event an hour after its last change."""

_QUANTITY = re.compile(
    r"(?<![\w./:-])(?<!\bport )\d+(?:,\d{3})*(?:\.\d+)?(?=(?:ms|s|m|h)?(?!\.?\w)(?![/:-][\w:]))"
)
"""Matches a count, a size, a version or a duration, but not a port, an address or a part of a
name."""


class Event(Fields, frozen=True):
    """The fields of an Event that are read."""

    metadata: ObjectMeta
    reason: str = ""
    message: str = ""
    type: str = ""
    count: int = 0
    last_timestamp: str | None = None


EVENTS = Resource("v1", "Event", "events", True, Event)


class EventKey(NamedTuple):
    """The identity of an Event: messages with equal identities are repetitions."""

    about: tuple[str, str]  # apiVersion and kind
    object_key: ServiceKey | ObjectKey
    uid: str
    kind: str
    reason: str
    text: str

    @property
    def namespace(self) -> str:
        """The namespace of the Event: that of the object, or `default`."""
        return self.object_key.namespace or "default"


class Series:
    """The repetitions of one message and its latest text.

    `name` is the name of the Event; it is empty until the Event has been written."""

    def __init__(self) -> None:
        self.name = ""
        self.message = ""
        self.count = 0
        self.first = datetime.now(UTC)
        self.last = self.first
        self.due_s = 0.0


class Recorder(Protocol):
    """Where a component reports Events."""

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None: ...


class EventRecorder:
    """Write Events about Services and other objects. `component` is the source that kubectl
    shows."""

    def __init__(self, client: Client, component: str, *, interval_s: float = 60.0) -> None:
        self.dropped = 0
        """The number of Events that were not written."""
        self._client = client
        self._component = component
        self._instance = f"{component}-{socket.gethostname()}"
        self._interval_s = interval_s
        self._known: OrderedDict[EventKey, Series] = OrderedDict()
        self._waiting: OrderedDict[EventKey, None] = OrderedDict()
        self._queued = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of Events in the queue."""
        return len(self._waiting)

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        """Report an Event on the Service with this key and uid. `kind` is `Normal` or `Warning`."""
        self._enqueue(
            EventKey(
                ("v1", "Service"),
                key,
                uid,
                kind,
                reason[:MAX_REASON_LENGTH],
                without_numbers(message),
            ),
            message,
        )

    def event_about(
        self, resource: Resource[Any], object_: Object, kind: str, reason: str, message: str
    ) -> None:
        """Report an Event on an object of any kind. For a cluster-scoped object it is in namespace
        `default`."""
        metadata, about = object_.metadata, (resource.group_version, resource.kind)
        key = ObjectKey(metadata.namespace, metadata.name)
        self._enqueue(
            EventKey(
                about, key, metadata.uid, kind, reason[:MAX_REASON_LENGTH], without_numbers(message)
            ),
            message,
        )

    def _enqueue(self, key: EventKey, message: str) -> None:
        series = self._known.setdefault(key, Series())
        self._known.move_to_end(key)
        if len(self._known) > MAX_SERIES:
            forgotten, _ = self._known.popitem(last=False)
            if forgotten in self._waiting:
                del self._waiting[forgotten]
                self.dropped += 1
        series.count += 1
        series.message = message[:MAX_MESSAGE_LENGTH]
        series.last = datetime.now(UTC)
        if key in self._waiting:
            return
        if len(self._waiting) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._waiting[key] = None
        self._queued.set()

    async def run(self) -> None:
        """Write the Events in the queue, until cancelled."""
        while True:
            due_s = self._next_due_s()
            self._queued.clear()
            if due_s is None or due_s > asyncio.get_running_loop().time():
                await self._wait_for_new(due_s)
                continue
            await self._write_due()

    def _next_due_s(self) -> float | None:
        return min((self._known[key].due_s for key in self._waiting), default=None)

    async def _wait_for_new(self, due_s: float | None) -> None:
        try:
            async with asyncio.timeout_at(due_s):
                await self._queued.wait()
        except TimeoutError:
            return

    async def _write_due(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in [key for key in self._waiting if self._known[key].due_s <= now_s]:
            if key not in self._waiting:
                continue  # dropped while the previous Event was written
            del self._waiting[key]
            series = self._known[key]
            series.due_s = now_s + self._interval_s
            await self._write_with_retries(key, series)

    async def _write_with_retries(self, key: EventKey, series: Series) -> None:
        """Write one Event, with a few attempts if the server is unavailable.

        The other Events wait in the meantime, because the server is unavailable for them too."""
        backoff = Backoff(floor_s=0.5)
        for attempt in range(1, TRIES + 1):
            try:
                await self._write(key, series)
                return
            except NotFound:
                # The namespace is being deleted or is gone, together with its Events.
                self.dropped += 1
                return
            except FairleadError as problem:
                if attempt == TRIES or not isinstance(problem, Unavailable):
                    self.dropped += 1
                    log.warning(
                        "Event not written",
                        object=str(key.object_key),
                        reason=key.reason,
                        problem=str(problem),
                    )
                    return
            await asyncio.sleep(backoff.next_s())

    async def _write(self, key: EventKey, series: Series) -> None:
        count, last = series.count, stamp(series.last)
        if series.name:
            patch = {"count": count, "message": series.message, "lastTimestamp": last}
            try:
                await self._client.patch(EVENTS, (key.namespace, series.name), patch)
                return
            except NotFound:
                # The server forgets Events after an hour.
                series.name, series.first = "", series.last
        name = self._name(key)
        try:
            await self._client.create(EVENTS, self._body(key, series, name))
        except Conflict:
            await self._update_existing(key, series, name)
        series.name = name

    async def _update_existing(self, key: EventKey, series: Series, name: str) -> None:
        """Update an Event that a previous process, or another replica, has created.

        A Warning describes a state that has lasted since then, so repeating it does not count; only
        its time is renewed, so that the server does not delete it. A Normal Event describes an
        action, which has happened again."""
        existing = await self._client.get(EVENTS, (key.namespace, name))
        series.count += existing.count if key.kind == "Normal" else existing.count - 1
        # This write happens at most once per Event and process, so a wrong clock costs one write
        # and not a loop.
        if (
            series.count > existing.count
            or series.message != existing.message
            or is_stale(existing, series.last)
        ):
            patch = {
                "count": series.count,
                "message": series.message,
                "lastTimestamp": stamp(series.last),
            }
            await self._client.patch(EVENTS, (key.namespace, name), patch)

    def _name(self, key: EventKey) -> str:
        words = "\0".join((self._component, key.uid, key.kind, key.reason, key.text))
        return f"{key.object_key.name}.{hashlib.sha256(words.encode()).hexdigest()[:16]}"

    def _body(self, key: EventKey, series: Series, name: str) -> Mapping[str, object]:
        api_version, kind = key.about
        involved = {
            "apiVersion": api_version,
            "kind": kind,
            "name": key.object_key.name,
            "uid": key.uid,
        }
        return {
            "metadata": {"name": name, "namespace": key.namespace},
            "involvedObject": involved
            | ({"namespace": key.object_key.namespace} if key.object_key.namespace else {}),
            "type": key.kind,
            "reason": key.reason,
            "message": series.message,
            "count": series.count,
            "firstTimestamp": stamp(series.first),
            "lastTimestamp": stamp(series.last),
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }


def without_numbers(message: str) -> str:
    """Return the message with its quantities replaced. Messages with equal results share one
    Event."""
    return _QUANTITY.sub("#", message[:MAX_MESSAGE_LENGTH])


def stamp(moment: datetime) -> str:
    """Return the time in UTC, to the second, in the format of metav1.Time (RFC 3339)."""
    return moment.strftime(STAMP)


def is_stale(existing: Event, now: datetime) -> bool:
    """Return whether the Event is older than STALE. An invalid time, or one in the future, counts
    as older."""
    try:
        last = datetime.strptime(existing.last_timestamp or "", STAMP).replace(tzinfo=UTC)
    except ValueError:
        return True
    return abs(now - last) > STALE


def rounded_duration(since: str, now: datetime) -> str:
    """Return the rounded time since `since`: equal texts share one Event. An invalid time counts as
    less than a minute."""
    try:
        passed = now - datetime.strptime(since, STAMP).replace(tzinfo=UTC)
    except ValueError:
        passed = timedelta()
    minutes = round(passed.total_seconds() / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes < 120:
        return "a minute" if minutes == 1 else f"{minutes} minutes"
    return f"{round(minutes / 60)} hours"
