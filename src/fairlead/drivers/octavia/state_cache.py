"""The state of each Service that the driver read last, and whether it is still valid.

In: the results of reads. Out: the same, until it is invalidated. No I/O. A read of everything
replaces the state of all Services, except for Services that were written to since the read began:
the result for such a Service may be from before or after the write."""

from collections.abc import Callable, Collection, Mapping

from fairlead.drivers.octavia.balancers import Found
from fairlead.drivers.octavia.changes import Write
from fairlead.model import ServiceKey


class StateCache:
    """The known state of all Services. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.known: dict[ServiceKey, Found] = {}
        self.is_complete = False
        """True once everything was read: a Service that is not in `known` has no objects."""
        self._clock = clock
        self._seen_s: dict[ServiceKey, float] = {}
        self._all_seen_s = self._begun_s = clock()
        self._invalid: set[ServiceKey] = set()
        self._invalidated: set[ServiceKey] = set()
        """Services that were invalidated since the last read of everything began."""

    def begin(self) -> None:
        """Begin a read of everything."""
        self._invalidated = self._invalid.copy()
        self._begun_s = self._clock()

    def store_all(self, found: Mapping[ServiceKey, Found]) -> Collection[ServiceKey]:
        """Finish the read of everything. Return the Services whose state was replaced."""
        replaced = {key: each for key, each in found.items() if key not in self._invalidated}
        kept = {key: each for key, each in self.known.items() if key in self._invalidated}
        self.known = replaced | kept
        self.is_complete = True
        self._all_seen_s = self._begun_s
        return replaced.keys()

    def store(self, key: ServiceKey, found: Found | None) -> None:
        """Store the state of one Service; None: it has no objects."""
        self._invalid.discard(key)
        self.known.pop(key, None)
        self._seen_s.pop(key, None)
        if found is not None:
            self._seen_s[key] = self._clock()
            self.known[key] = found

    def invalidate(self, key: ServiceKey) -> None:
        """Mark the known state as invalid: it has changed, or may have."""
        self._invalid.add(key)
        self._invalidated.add(key)

    def is_invalid(self, key: ServiceKey) -> bool:
        return key in self._invalid or (key not in self.known and not self.is_complete)

    def ages_s(self) -> Mapping[ServiceKey, float]:
        """Return how many seconds ago each Service was read. May be called from any thread."""
        now_s, seen_s = self._clock(), self._seen_s.copy()
        return {
            key: now_s - max(seen_s.get(key, 0.0), self._all_seen_s) for key in self.known.copy()
        }


class WriteHistory:
    """The writes that were made for each Service in successive passes, until a pass writes nothing.
    A write that the next pass would make again had no effect."""

    def __init__(self) -> None:
        self._writes: dict[ServiceKey, tuple[Write, ...]] = {}
        self._read: set[ServiceKey] = set()
        """Services that were read since their last write."""

    def add(self, key: ServiceKey, writes: tuple[Write, ...]) -> None:
        self._writes[key] = (*self._writes.get(key, ()), *writes)
        self._read.discard(key)

    def read(self, key: ServiceKey) -> tuple[Write, ...]:
        """Return the writes of the passes before this one. Call it once in each pass."""
        if key in self._read:  # and the last pass wrote nothing
            self.end(key)
        elif key in self._writes:
            self._read.add(key)
        return self._writes.get(key, ())

    def end(self, key: ServiceKey) -> None:
        self._writes.pop(key, None)
        self._read.discard(key)
