"""What the driver saw last of each Service, and whether that may still be believed.

In: what a look found. Out: the same, until it is doubted. No I/O. A look at everything replaces
what is known of all Services but of those that were written to since it began: what it saw of them
may be from before or after."""

from collections.abc import Callable, Collection, Mapping

from fairlead.drivers.octavia.balancers import Found
from fairlead.drivers.octavia.changes import Write
from fairlead.model import ServiceKey


class Memory:
    """`clock`: seconds, that only go on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.known: dict[ServiceKey, Found] = {}
        self.whole = False
        """True once everything was listed: a Service that is not in `known` has nothing."""
        self._clock = clock
        self._seen_s: dict[ServiceKey, float] = {}
        self._all_seen_s = self._begun_s = clock()
        self._invalid: set[ServiceKey] = set()
        self._invalidated: set[ServiceKey] = set()
        """Services that were doubted since the last look at everything began."""

    def begin(self) -> None:
        """A look at everything begins."""
        self._invalidated = self._invalid.copy()
        self._begun_s = self._clock()

    def store_all(self, found: Mapping[ServiceKey, Found]) -> Collection[ServiceKey]:
        """The end of that look. The Services about which it is believed."""
        believed = {key: each for key, each in found.items() if key not in self._invalidated}
        kept = {key: each for key, each in self.known.items() if key in self._invalidated}
        self.known = believed | kept
        self.whole = True
        self._all_seen_s = self._begun_s
        return believed.keys()

    def store(self, key: ServiceKey, found: Found | None) -> None:
        """A look at one Service; None: it has nothing."""
        self._invalid.discard(key)
        self.known.pop(key, None)
        self._seen_s.pop(key, None)
        if found is not None:
            self._seen_s[key] = self._clock()
            self.known[key] = found

    def invalidate(self, key: ServiceKey) -> None:
        """Something has changed at the cloud, or may have."""
        self._invalid.add(key)
        self._invalidated.add(key)

    def is_invalid(self, key: ServiceKey) -> bool:
        return key in self._invalid or (key not in self.known and not self.whole)

    def ages_s(self) -> Mapping[ServiceKey, float]:
        """How long ago each Service was seen. May be called from any thread."""
        now_s, seen_s = self._clock(), self._seen_s.copy()
        return {
            key: now_s - max(seen_s.get(key, 0.0), self._all_seen_s) for key in self.known.copy()
        }


class Rounds:
    """Writes that were made for a Service in one pass after the other, until a pass writes nothing.
    A write that is missing again in the next pass has changed nothing."""

    def __init__(self) -> None:
        self._writes: dict[ServiceKey, tuple[Write, ...]] = {}
        self._read: set[ServiceKey] = set()
        """Services that were read since the last of these writes."""

    def add(self, key: ServiceKey, writes: tuple[Write, ...]) -> None:
        self._writes[key] = (*self._writes.get(key, ()), *writes)
        self._read.discard(key)

    def read(self, key: ServiceKey) -> tuple[Write, ...]:
        """The writes before this pass; to be called once in each pass."""
        if key in self._read:  # and the last pass wrote nothing
            self.end(key)
        elif key in self._writes:
            self._read.add(key)
        return self._writes.get(key, ())

    def end(self, key: ServiceKey) -> None:
        self._writes.pop(key, None)
        self._read.discard(key)
