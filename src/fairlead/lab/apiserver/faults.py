"""Fault injection: which requests fail, how, and how often. Also the log of all requests. No I/O:
the server executes a fault.

In: Faults that a test adds, and each request when it arrives and while it runs. Out: the fault that
applies to it, if any. The faults are failures that clients of a real API server see: priority and
fairness (429), etcd compaction (410), a load balancer that cuts an idle watch, a server that hangs.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from fairlead.errors import Refused, plain
from fairlead.lab.apiserver.failure import ApiFailure

Action = Literal["status", "stall", "reset", "lose", "cut", "end", "expire", "no-bookmarks"]
"""`status`: answer with `code`. `stall`: send no answer, or nothing more, for `stall_s`. `reset`:
drop the connection without executing the request. `lose`: execute the request, and drop the
connection instead of answering. For watches only: `cut` ends one in the middle of a line, `end`
after a whole line, `expire` with an ERROR event 410; `no-bookmarks` suppresses bookmarks while it
is active."""

_WATCH_ACTIONS: Final = ("cut", "end", "expire", "no-bookmarks")
_REASONS: Final = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Fault(msgspec.Struct):
    """A fault and the requests it applies to. `path` is a regular expression that is searched in
    `path?query`; empty strings match all requests."""

    action: Action
    method: str = ""
    path: str = ""
    count: int = 1
    """How often it applies; 0: until it is removed."""
    code: int = 500
    retry_after_s: int | None = None
    stall_s: float | None = None
    """None: until the client gives up or the server stops."""
    after_events: int = 0
    """Applies to a watch once it has sent this many events; 0: at its start, or at once if it runs
    already."""

    def matches(self, method: str, target: str) -> bool:
        return self.method in ("", method) and re.search(self.path, target) is not None

    def failure(self) -> ApiFailure:
        """Return the answer of a `status` fault."""
        reason = _REASONS.get(self.code, "InternalError")
        details = (
            {"retryAfterSeconds": self.retry_after_s} if self.retry_after_s is not None else {}
        )
        return ApiFailure(self.code, reason, f"injected fault: {self.code} {reason}", details)


class Request(NamedTuple):
    """A request as received. `query` is the raw query string; `user_agent` distinguishes
    clients."""

    method: str
    path: str
    query: str
    user_agent: str = ""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class Faults:
    """The active faults. `on_change` is called when faults are added or removed, so that running
    watches check them."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._waiting: list[Fault] = []
        self._on_change = on_change

    def add(self, fault: Fault) -> None:
        """Add a fault. Raise Refused if its path is not a valid regular expression."""
        try:
            re.compile(fault.path)
        except re.error as error:
            raise Refused(
                f"the fault's path {fault.path!r} is not a valid regular expression: {plain(error)}"
            ) from error
        self._waiting.append(fault)
        self._on_change()

    def clear(self) -> None:
        self._waiting.clear()
        self._on_change()

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._waiting)

    def at_start(self, request: Request) -> Fault | None:
        """Return the fault that applies to a new request, and count it as used."""
        return self._take(
            request, lambda fault: fault.action not in _WATCH_ACTIONS and fault.after_events == 0
        )

    def in_watch(self, request: Request, sent: int) -> Fault | None:
        """Return the fault that applies to a watch that has sent `sent` events, and count it as
        used."""
        return self._take(
            request,
            lambda fault: (
                fault.action not in ("no-bookmarks", "status", "lose")
                and sent >= fault.after_events
            ),
        )

    def bookmarks(self, request: Request) -> bool:
        """Return whether this watch may send a bookmark now."""
        return self._take(request, lambda fault: fault.action == "no-bookmarks") is None

    def _take(self, request: Request, fits: Callable[[Fault], bool]) -> Fault | None:
        for fault in self._waiting:
            if fits(fault) and fault.matches(request.method, request.target):
                if fault.count == 1:
                    self._waiting.remove(fault)
                elif fault.count > 1:
                    fault.count -= 1
                return fault
        return None


class RequestLog:
    """The requests, oldest first. Beyond `limit`, the oldest are dropped."""

    def __init__(self, limit: int = 100_000) -> None:
        self._requests: deque[Request] = deque(maxlen=limit)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def clear(self) -> None:
        self._requests.clear()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def count(self, method: str = "", path: str = "") -> int:
        """Return the number of requests with this method whose `path?query` matches the regular
        expression."""
        return sum(
            request.method == (method or request.method) and bool(re.search(path, request.target))
            for request in self
        )


def read_fault(document: Any) -> Fault:
    """Return a Fault from decoded JSON. Raise Refused if it is invalid."""
    try:
        return msgspec.convert(document, Fault)
    except msgspec.ValidationError as error:
        raise Refused(
            f"invalid fault: {plain(error)}",
            fix=f"set `action` to one of {', '.join(get_args(Action))}",
        ) from error
