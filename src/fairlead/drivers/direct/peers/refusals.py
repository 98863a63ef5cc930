"""Log refused connections in a bounded number of lines.

In: refused connections. Out: a log line for the first connection of a kind; then, at the end of
each period, one line with the number of further connections. The caller must use few kinds.
"""

import asyncio

import structlog

log = structlog.get_logger()

PERIOD_S = 60.0


class Refusals:
    """The log of refused connections. Close it before the event loop ends."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._unlogged: dict[str, tuple[int, str, str]] = {}
        """For each kind in its period: the number of connections that were not logged, and address
        and reason of the last one."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.count = 0
        """The number of all refused connections."""

    def add(self, kind: str, address: str, why: str) -> None:
        """Record a refused connection."""
        self.count += 1
        if kind in self._unlogged:
            self._unlogged[kind] = self._unlogged[kind][0] + 1, address, why
            return
        log.warning("refused a connection to gateway.peerListen", address=address, why=why)
        self._begin_period(kind)

    def close(self) -> None:
        """Log the connections that were not logged yet."""
        for kind, timer in tuple(self._timers.items()):
            timer.cancel()
            self._log(kind)

    def _begin_period(self, kind: str) -> None:
        self._unlogged[kind] = 0, "", ""
        self._timers[kind] = asyncio.get_running_loop().call_later(
            self._period_s, self._end_period, kind
        )

    def _end_period(self, kind: str) -> None:
        if self._log(kind):
            self._begin_period(kind)

    def _log(self, kind: str) -> int:
        del self._timers[kind]
        count, address, why = self._unlogged.pop(kind)
        if count:
            log.warning(
                "refused more connections to gateway.peerListen",
                count=count,
                within_s=self._period_s,
                last=address,
                why=why,
            )
        return count
