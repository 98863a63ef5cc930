"""Tell of refused connections without letting a stranger fill the log.

In: refusals. Out: a line of the log for the first one of a kind; for what follows within a period one line at its end, which
says how many there were. Kinds are few: the caller sees to that.
"""

import asyncio

import structlog

log = structlog.get_logger()

PERIOD_S = 60.0


class Refusals:
    """To be closed with the event loop's other things."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._untold: dict[str, tuple[int, str, str]] = {}
        """For each kind in its period: how many were not told, and of the last one the address and the reason."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.count = 0
        """All there were."""

    def add(self, kind: str, address: str, why: str) -> None:
        """One more."""
        self.count += 1
        if kind in self._untold:
            self._untold[kind] = self._untold[kind][0] + 1, address, why
            return
        log.warning("refused a connection to gateway.peerListen", address=address, why=why)
        self._begin(kind)

    def close(self) -> None:
        """Tell what is left to tell."""
        for kind, timer in tuple(self._timers.items()):
            timer.cancel()
            self._tell(kind)

    def _begin(self, kind: str) -> None:
        self._untold[kind] = 0, "", ""
        self._timers[kind] = asyncio.get_running_loop().call_later(self._period_s, self._over, kind)

    def _over(self, kind: str) -> None:
        if self._tell(kind):
            self._begin(kind)

    def _tell(self, kind: str) -> int:
        del self._timers[kind]
        count, address, why = self._untold.pop(kind)
        if count:
            log.warning(
                "refused more connections to gateway.peerListen", count=count, within_s=self._period_s, last=address, why=why
            )
        return count
