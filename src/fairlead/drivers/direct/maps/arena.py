"""The free chunks of the slot memory.

In: sizes to reserve, regions to release, the time. Out: offsets. The allocation is best fit, and
adjacent free regions are merged. The cost of a call depends on the number of different lengths
among the free regions, not on the number of regions.

Invariant: a released region is reserved again only after a grace period, because a packet whose
lookup began before the change may still read it. (A program runs for microseconds; the grace period
is a million times longer.)
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from fairlead.drivers.direct.maps.quota import OutOfMemory

GRACE_S = 1.0
"""Time from the release of a region until it can be reserved again."""


class Arena:
    """A memory of `size` chunks, of which the regions `taken` (offset, length) are in use.

    Times are monotonic seconds. `in_grace`: regions that were released recently, as the property
    `in_grace` of another Arena returns them; regions that are in `taken` as well are ignored.
    """

    def __init__(
        self,
        size: int,
        taken: Iterable[tuple[int, int]] = (),
        in_grace: Iterable[tuple[float, int, int]] = (),
    ) -> None:
        self.size = size
        self._ends: dict[int, int] = {}
        """The start of each free region, keyed by its end."""
        self._begins: dict[int, int] = {}
        """The end of each free region, keyed by its start."""
        self._by_length: dict[int, dict[int, None]] = {}
        """The starts of the free regions of each length, in the order in which they became free."""
        self._lengths: list[int] = []
        """The lengths in `_by_length`, sorted."""
        in_use = sorted(taken)
        self._in_grace = deque(each for each in in_grace if not _overlaps(in_use, *each[1:]))
        self.free_chunks = 0
        """The number of chunks that can be reserved now."""
        end = 0
        for offset, length in sorted([*in_use, *(each[1:] for each in self._in_grace)]):
            if offset > end:
                self._add_free(end, offset - end)
            end = max(end, offset + length)
        if size > end:
            self._add_free(end, size - end)

    @property
    def in_grace(self) -> tuple[tuple[float, int, int], ...]:
        """The regions in their grace period: time of the release, offset, length."""
        return tuple(self._in_grace)

    def reserve(self, length: int, now_s: float) -> int:
        """Return the offset of `length` contiguous free chunks, and reserve them.

        Raise OutOfMemory if no region is long enough. Regions in their grace period may be free
        later.
        """
        while self._in_grace and now_s - self._in_grace[0][0] >= GRACE_S:
            _, offset, freed = self._in_grace.popleft()
            self._add_free(offset, freed)
        at = bisect_left(self._lengths, length)
        if at == len(self._lengths):
            raise OutOfMemory(
                "this gateway's table memory is used up",
                fix="raise gateway.tableMemoryMiB",
                retry_after_s=GRACE_S,
            )
        found = self._lengths[at]
        offset = next(iter(self._by_length[found]))
        self._remove_free(offset, found)
        if found > length:
            self._add_free(offset + length, found - length)
        return offset

    def release(self, offset: int, length: int, now_s: float) -> None:
        """Release a region in which no lookup begins after `now_s`."""
        if length:
            self._in_grace.append((now_s, offset, length))

    def _add_free(self, offset: int, length: int) -> None:
        """Add a free region, merged with the free regions next to it."""
        if (before := self._ends.get(offset)) is not None:
            self._remove_free(before, offset - before)
            offset, length = before, length + offset - before
        if (after := self._begins.get(offset + length)) is not None:
            self._remove_free(offset + length, after - offset - length)
            length = after - offset
        self._begins[offset], self._ends[offset + length] = offset + length, offset
        if length not in self._by_length:
            self._by_length[length] = {}
            insort(self._lengths, length)
        self._by_length[length][offset] = None
        self.free_chunks += length

    def _remove_free(self, offset: int, length: int) -> None:
        del self._begins[offset], self._ends[offset + length], self._by_length[length][offset]
        if not self._by_length[length]:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_chunks -= length


def _overlaps(regions: Sequence[tuple[int, int]], offset: int, length: int) -> bool:
    """Return whether the region shares a chunk with one of `regions`, which are sorted and
    disjoint."""
    at = bisect_left(regions, (offset + length, 0))
    return at > 0 and sum(regions[at - 1]) > offset
