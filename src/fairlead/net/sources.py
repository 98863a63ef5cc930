"""Which connections each source has, and which one goes first where there are too many.

In: connections as they come, are used and go. Out: the one of a source, or of the source with the most, that was used least
recently. Every operation takes the same time however many there are.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Crowd(Generic[T]):
    """Connections by source."""

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}
        """The connections of each source; the one that was used last stands last."""
        self._by_count: dict[int, dict[str, None]] = {}
        """The sources with so many connections; the one that was used last stands last."""
        self._most = 0

    def count(self, source: str) -> int:
        """How many connections the source has."""
        return len(self._of.get(source, ()))

    def add(self, source: str, connection: T) -> None:
        """One more."""
        own = self._of.setdefault(source, {})
        own[connection] = None
        self._move(source, len(own) - 1, len(own))

    def remove(self, source: str, connection: T) -> None:
        """One less."""
        own = self._of[source]
        del own[connection]
        self._move(source, len(own) + 1, len(own))
        if not own:
            del self._of[source]

    def touch(self, source: str, connection: T) -> None:
        """It was used just now."""
        own = self._of[source]
        own[connection] = own.pop(connection)
        self._move(source, len(own), len(own))

    def oldest(self, source: str) -> T:
        """The connection of this source that was used least recently."""
        return next(iter(self._of[source]))

    def crowded(self) -> T | None:
        """The same of the source with the most connections; None: there is no connection."""
        return self.oldest(next(iter(self._by_count[self._most]))) if self._most else None

    def _move(self, source: str, before: int, after: int) -> None:
        """Into another place by count. The highest count changes by one at most, as `after` does."""
        if before:
            del self._by_count[before][source]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[source] = None
        if after > self._most or self._most not in self._by_count:
            self._most = after
