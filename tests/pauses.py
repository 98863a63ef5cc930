"""The pauses of a test that waits for a condition.

They become longer, because a look costs processor time, which what is waited for needs as well: a
call of kubectl takes 50 ms of it."""

from collections.abc import Iterator

FIRST_S, LAST_S, GROWTH = 0.05, 0.3, 1.25


def pauses() -> Iterator[float]:
    """Yield the pauses between looks, in seconds, without end."""
    pause_s = FIRST_S
    while True:
        yield pause_s
        pause_s = min(pause_s * GROWTH, LAST_S)
