"""How old this process's view of the cluster is: an age for each watch, and a log line when a watch
is stale.

In: the watches of the process, and the time of the API server's last response to any request. Out:
ages in seconds; which watches are stale; one log line when watches become stale and one when all
are current again. An event, a bookmark, a list or the start of a watch proves that the watch is
current. kube-apiserver sends bookmarks about once a minute. Between two bookmarks an open watch
counts as current when the API server answers any other request: this process renews its Lease
(`roles.presence`) every few seconds. That request may reach another API server than the watch does;
therefore the reflector ends a watch that has received nothing for the time of two bookmarks
(`IDLE_S`). Invariant: only the monotonic clock of this process is used. Follows KEP-956 (watch
bookmarks)."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

log = structlog.get_logger()

STALE_S = 20.0
"""A watch whose last proof is older than this is stale: the time of two renewals of the Lease
(every 10 s). If the configuration makes renewals less frequent, see `stale_after_s`."""
CHECK_INTERVAL_S = 1.0
LOG_INTERVAL_S = 60.0
"""The minimum time between two log lines about stale watches."""


class Watch(Protocol):
    """The properties of a watch that its age depends on; see `Reflector`."""

    @property
    def last_contact_s(self) -> float: ...

    @property
    def watching(self) -> bool: ...


def confirmed_s(watch: Watch, answered_s: float) -> float:
    """Return when this watch was last proved to be current.

    `answered_s`: when the API server last responded to a request."""
    return max(watch.last_contact_s, answered_s) if watch.watching else watch.last_contact_s


def stale_after_s(lease_duration_s: float) -> float:
    """Return the age at which a watch is stale in a process that renews its presence every third of
    this duration. In a quiet cluster these renewals may be the only proof that a watch is
    current."""
    return max(STALE_S, lease_duration_s * 2 / 3)


class Freshness:
    """The ages of the watches of one process.

    `answered_s` returns when the API server last responded to a request of this process."""

    def __init__(
        self,
        answered_s: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_s: float = STALE_S,
        log_interval_s: float = LOG_INTERVAL_S,
    ) -> None:
        self._answered_s = answered_s
        self._clock = clock
        self._stale_s = stale_s
        self._log_interval_s = log_interval_s
        self._watches: dict[str, Watch] = {}
        self._logged_s = -math.inf
        self._stale_since_s: float | None = None

    def add(self, name: str, watch: Watch) -> None:
        """Include a watch. `name`: what it watches, such as `services`."""
        self._watches[name] = watch

    @property
    def answer_age_s(self) -> float:
        """Seconds since the API server last responded to a request."""
        return max(0.0, self._clock() - self._answered_s())

    @property
    def reachable(self) -> bool:
        """Whether the API server answers."""
        return self.answer_age_s <= self._stale_s

    def ages(self) -> Mapping[str, float]:
        """Return for each watch the seconds since it was last proved to be current."""
        now_s, answered_s = self._clock(), self._answered_s()
        return {
            name: max(0.0, now_s - confirmed_s(watch, answered_s))
            for name, watch in self._watches.items()
        }

    def stale(self) -> Mapping[str, float]:
        """Return the stale watches, with their ages in seconds."""
        return {name: age_s for name, age_s in self.ages().items() if age_s > self._stale_s}

    async def run(self) -> None:
        """Write to the log when watches become stale, and when all are current again, until
        cancelled."""
        while True:
            self.log_changes()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def log_changes(self) -> None:
        """Log a change since the last call. Watches that repeatedly become stale are logged once
        per `log_interval_s`."""
        stale, now_s = self.stale(), self._clock()
        if stale and self._stale_since_s is None and now_s - self._logged_s >= self._log_interval_s:
            self._logged_s, self._stale_since_s = now_s, now_s - max(stale.values())
            log.warning(
                "watches of the API server are stale: continuing with the last known state",
                watches={name: f"{age_s:.0f} s" for name, age_s in stale.items()},
                api_server_answered=f"{self.answer_age_s:.0f} s ago",
            )
        if not stale and self._stale_since_s is not None:
            log.info(
                "watches of the API server are current again",
                stale_for=f"{now_s - self._stale_since_s:.0f} s",
            )
            self._stale_since_s = None
