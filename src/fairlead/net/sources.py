"""The connections of each source, and which of them to close first when there are too many.

In: connections that are added, used and removed. Out: the least recently used connection of a
source, or of the source with the most connections. Every operation takes constant time."""

from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionsBySource(Generic[T]):
    """Connections by source."""

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}
        """The connections of each source, the most recently used one last."""
        self._by_count: dict[int, dict[str, None]] = {}
        """The sources by their number of connections, the most recently used one last."""
        self._max_count = 0

    def count(self, source: str) -> int:
        """Return how many connections the source has."""
        return len(self._of.get(source, ()))

    def add(self, source: str, connection: T) -> None:
        """Add a connection."""
        own = self._of.setdefault(source, {})
        own[connection] = None
        self._move(source, len(own) - 1, len(own))

    def remove(self, source: str, connection: T) -> None:
        """Remove a connection."""
        own = self._of[source]
        del own[connection]
        self._move(source, len(own) + 1, len(own))
        if not own:
            del self._of[source]

    def touch(self, source: str, connection: T) -> None:
        """Record that the connection was used."""
        own = self._of[source]
        own[connection] = own.pop(connection)
        self._move(source, len(own), len(own))

    def oldest(self, source: str) -> T:
        """Return the least recently used connection of this source."""
        return next(iter(self._of[source]))

    def oldest_of_largest(self) -> T | None:
        """Return the least recently used connection of the source with the most connections; None
        if there is no connection."""
        return self.oldest(next(iter(self._by_count[self._max_count]))) if self._max_count else None

    def _move(self, source: str, before: int, after: int) -> None:
        """Move the source to its new number of connections. The highest number changes by at most
        one, as `after` does."""
        if before:
            del self._by_count[before][source]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[source] = None
        if after > self._max_count or self._max_count not in self._by_count:
            self._max_count = after
