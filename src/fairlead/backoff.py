"""How long to wait after a failure: twice as long after each, up to a ceiling, with jitter.

Jitter takes between half and all of the wait, so that many clients that lost one server do not come
back as one."""

import random


class Backoff:
    """Waits that grow from `floor_s` to `ceiling_s` until `reset`."""

    def __init__(self, floor_s: float = 0.2, ceiling_s: float = 30.0) -> None:
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._next_s = floor_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """The wait after one more failure; never less than what the other side asked for."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._ceiling_s)
        return max(at_least_s, wait_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """All is well again: the next wait is a short one."""
        self._next_s = self._floor_s
