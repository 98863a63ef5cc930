"""Exponential back-off after failures, with a ceiling and jitter.

Jitter shortens each wait to between half and all of its length, so that clients that lost the same
server do not reconnect at the same time."""

import random


class Backoff:
    """A sequence of waits that doubles from `floor_s` up to `ceiling_s`, until `reset`."""

    def __init__(self, floor_s: float = 0.2, ceiling_s: float = 30.0) -> None:
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._next_s = floor_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the wait after another failure, in seconds. It is at least `at_least_s`, the
        minimum that the server requested."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._ceiling_s)
        return max(at_least_s, wait_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """Start again with the shortest wait, after a success."""
        self._next_s = self._floor_s
