"""Failures on demand: which requests are to fail, how, and how often. And the log of all requests.

In: Faults that a test adds, and each request as it comes or goes on. Out: the fault that it meets,
if any. No I/O: the server does what a fault says. Failures are those that clients of a real API
server meet: priority and fairness (429), etcd compaction (410), a load balancer that cuts an idle
watch, a server that hangs."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from fairlead.errors import Refused
from fairlead.lab.apiserver.failure import ApiFailure

Action = Literal["status", "stall", "reset", "lose", "cut", "end", "expire", "no-bookmarks"]
"""`status`: answer `code`. `stall`: answer nothing, or no more, for `stall_s`. `reset`: drop the
connection and do nothing. `lose`: do what is asked, and drop the connection instead of answering.
Of watches alone: `cut` ends one in the middle of a line, `end` after a whole line, `expire` by an
ERROR event 410; `no-bookmarks` leaves the bookmarks out for as long as it lasts."""

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
    """One way to fail. `path` is searched in `path?query` as a regular expression; empty strings
    match all requests."""

    action: Action
    method: str = ""
    path: str = ""
    count: int = 1
    """How many times; 0: until it is removed."""
    code: int = 500
    retry_after_s: int | None = None
    stall_s: float | None = None
    """None: until the client gives up or the server stops."""
    after_events: int = 0
    """A watch meets it once it has sent so many events; 0: at the start, or at once if it runs
    already."""

    def matches(self, method: str, target: str) -> bool:
        return self.method in ("", method) and re.search(self.path, target) is not None

    def failure(self) -> ApiFailure:
        """The answer that a `status` fault gives."""
        reason = _REASONS.get(self.code, "InternalError")
        details = (
            {"retryAfterSeconds": self.retry_after_s} if self.retry_after_s is not None else {}
        )
        return ApiFailure(
            self.code, reason, f"a fault was asked for: {self.code} {reason}", details
        )


class Request(NamedTuple):
    """A request as it came in. `query` is the raw query string; `user_agent` tells clients
    apart."""

    method: str
    path: str
    query: str
    user_agent: str = ""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class Faults:
    """The faults that wait. `on_change` is called when there are new ones, so that running watches
    meet them too."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._waiting: list[Fault] = []
        self._on_change = on_change

    def add(self, fault: Fault) -> None:
        """Raises Refused for a path that is no regular expression."""
        try:
            re.compile(fault.path)
        except re.error as error:
            raise Refused(
                f"the fault's path {fault.path!r} is no regular expression: {error}"
            ) from error
        self._waiting.append(fault)
        self._on_change()

    def clear(self) -> None:
        self._waiting.clear()
        self._on_change()

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._waiting)

    def at_start(self, request: Request) -> Fault | None:
        """The fault that a new request meets; it counts as used."""
        return self._take(
            request, lambda fault: fault.action not in _WATCH_ACTIONS and fault.after_events == 0
        )

    def in_watch(self, request: Request, sent: int) -> Fault | None:
        """The fault that a running watch meets, which has sent so many events; it counts as
        used."""
        return self._take(
            request,
            lambda fault: (
                fault.action not in ("no-bookmarks", "status", "lose")
                and sent >= fault.after_events
            ),
        )

    def bookmarks(self, request: Request) -> bool:
        """Whether this watch may send a bookmark now."""
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
    """The requests so far, oldest first; the oldest go when there are more than `limit`."""

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
        """How many there were of a method whose `path?query` matches the regular expression."""
        return sum(
            request.method == (method or request.method) and bool(re.search(path, request.target))
            for request in self
        )


def read_fault(document: Any) -> Fault:
    """A Fault from decoded JSON. Raises Refused if it is none."""
    try:
        return msgspec.convert(document, Fault)
    except msgspec.ValidationError as error:
        raise Refused(
            f"not a fault: {error}", fix=f"give an action, one of {', '.join(get_args(Action))}"
        ) from error
