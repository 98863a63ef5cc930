"""When every chassis has installed a row.

In: the sequence numbers of table NB_Global: a write increments `nb_cfg`, northd sets `sb_cfg` to
the number that it has processed, and `hv_cfg` to the number that every chassis has reached
(ovn-nb(5)). Out: whether a row is installed. There is no limit to the time for northd, because no
chassis gets a row without it. A chassis that is gone never reaches a number, so the caller gives up
after a time. This time is short from then on, until `hv_cfg` moves again: otherwise every further
row would wait for the same chassis."""

from collections.abc import Callable, Iterable

PATIENCE_S = 5.0
SHORT_PATIENCE_S = 0.5


class Flows:
    """The rows that some chassis may not have installed yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._numbers: dict[str, int] = {}
        self._processed_s: dict[str, float] = {}
        """When northd had processed a row, by `clock`."""
        self._patience_s = PATIENCE_S
        self._processed = self._reached = 0

    @property
    def is_patient(self) -> bool:
        """Whether the caller has not given up since `hv_cfg` moved."""
        return self._patience_s == PATIENCE_S

    @property
    def count(self) -> int:
        """The number of rows that are not installed."""
        return len(self._numbers)

    def written(self, rows: Iterable[str], number: int) -> None:
        """Record that rows were created or attached in the transaction with this number."""
        for row in rows:
            self.forget(row)
            if number > self._reached:
                self._numbers[row] = number
        self._note_processed()

    def forget(self, row: str) -> None:
        """Record that a row is installed or deleted."""
        self._numbers.pop(row, None)
        self._processed_s.pop(row, None)

    def follow(self, processed: int, reached: int) -> tuple[str, ...]:
        """Record the present `sb_cfg` and `hv_cfg`. Return the rows that are installed by them."""
        if reached != self._reached:
            self._patience_s = PATIENCE_S
        self._processed, self._reached = processed, reached
        installed = tuple(row for row, number in self._numbers.items() if number <= reached)
        for row in installed:
            self.forget(row)
        self._note_processed()
        return installed

    def installed(self, row: str) -> bool:
        """Return whether every chassis has the row, as far as the caller has not given up."""
        return row not in self._numbers

    def is_processed(self, row: str) -> bool:
        """Return whether northd has processed the row."""
        return row not in self._numbers or row in self._processed_s

    def left_s(self, row: str) -> float:
        """Return the time until the caller should ask again; 0 if the patience is at its end."""
        if self.installed(row):
            return 0.0
        begun_s = self._processed_s.get(row, self._clock())
        return max(0.0, begun_s + self._patience_s - self._clock())

    def give_up(self, row: str) -> int:
        """Regard the row as installed. Return the number that it waited for."""
        number = self._numbers.get(row, 0)
        self.forget(row)
        self._patience_s = SHORT_PATIENCE_S
        return number

    def _note_processed(self) -> None:
        for row, number in self._numbers.items():
            if number <= self._processed:
                self._processed_s.setdefault(row, self._clock())
