"""Which chunks of the slot memory are free.

In: sizes to reserve, regions to give back, the time. Out: offsets. Best fit; neighbours are joined.
The cost of a call does not grow with the number of regions, only with that of different lengths
among the free ones. Invariant: a region that was given back is handed out again only after a grace
period, because a packet that was looked up before the change may still be read there. (A program
runs for microseconds; the grace is a million times that.)"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from fairlead.drivers.direct.maps.quota import OutOfMemory

GRACE_S = 1.0


class Arena:
    """A memory of `size` chunks of which `taken` regions (offset, length) are in use. Times are
    monotonic seconds.

    in_grace: regions that were given back a moment ago, as `in_grace` of another says; those that are
    taken again are not."""

    def __init__(
        self,
        size: int,
        taken: Iterable[tuple[int, int]] = (),
        in_grace: Iterable[tuple[float, int, int]] = (),
    ) -> None:
        self.size = size
        self._ends: dict[int, int] = {}
        """Free regions: where each begins, by where it ends."""
        self._begins: dict[int, int] = {}
        """The same the other way round."""
        self._by_length: dict[int, dict[int, None]] = {}
        """Where the free regions of each length begin; a dictionary for its order."""
        self._lengths: list[int] = []
        in_use = sorted(taken)
        self._in_grace = deque(each for each in in_grace if not _overlaps(in_use, *each[1:]))
        self.free_chunks = 0
        """Chunks that can be reserved now."""
        end = 0
        for offset, length in sorted([*in_use, *(each[1:] for each in self._in_grace)]):
            if offset > end:
                self._add_free(end, offset - end)
            end = max(end, offset + length)
        if size > end:
            self._add_free(end, size - end)

    @property
    def in_grace(self) -> tuple[tuple[float, int, int], ...]:
        """Since when, offset, length of the regions that wait for the end of the grace period."""
        return tuple(self._in_grace)

    def reserve(self, length: int, now_s: float) -> int:
        """The offset of `length` free chunks in a row. Raises OutOfMemory if there are none: memory in
        its grace period may be free later."""
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
        """Nothing new will be looked up here from `now_s` on."""
        if length:
            self._in_grace.append((now_s, offset, length))

    def _add_free(self, offset: int, length: int) -> None:
        """Free a region, as one with the free ones beside it."""
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
    """Whether one of these regions, which are sorted, has a chunk of this one. They do not overlap
    each other."""
    at = bisect_left(regions, (offset + length, 0))
    return at > 0 and sum(regions[at - 1]) > offset
