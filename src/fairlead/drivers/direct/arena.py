"""Which chunks of the slot memory are free.

In: sizes to reserve, regions to give back, the time. Out: offsets. First fit; neighbours are joined.
Invariant: a region that was given back is handed out again only after a grace period, because a packet that was looked up
before the change may still be read there. (A program runs for microseconds; the grace is a million times that.)
"""

from collections.abc import Iterable

from fairlead.errors import Unavailable

GRACE_S = 1.0


class Arena:
    """A memory of `size` chunks of which `taken` regions (offset, length) are in use. Times are monotonic seconds."""

    def __init__(self, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = []
        self._resting: list[tuple[float, int, int]] = []
        end = 0
        for offset, length in sorted(taken):
            if offset > end:
                self._free.append((end, offset - end))
            end = max(end, offset + length)
        if size > end:
            self._free.append((end, size - end))

    def reserve(self, length: int, now_s: float) -> int:
        """The offset of `length` chunks that nobody uses. Raises Unavailable when there are none together."""
        self._wake(now_s)
        for i, (offset, room) in enumerate(self._free):
            if room >= length:
                self._free[i : i + 1] = [(offset + length, room - length)] if room > length else []
                return offset
        raise Unavailable(
            f"no room for a table of {length} chunks: {self.free_chunks} of {self.size} chunks are free, not enough together",
            fix="start the gateway with a larger arena",
        )

    def give_back(self, offset: int, length: int, now_s: float) -> None:
        """Nothing new will be looked up here from `now_s` on."""
        if length:
            self._resting.append((now_s, offset, length))

    @property
    def free_chunks(self) -> int:
        """Chunks that can be reserved now."""
        return sum(length for _, length in self._free)

    def _wake(self, now_s: float) -> None:
        rested = [(offset, length) for since, offset, length in self._resting if now_s - since >= GRACE_S]
        if not rested:
            return
        self._resting = [each for each in self._resting if now_s - each[0] < GRACE_S]
        joined: list[tuple[int, int]] = []
        for offset, length in sorted([*self._free, *rested]):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._free = joined
