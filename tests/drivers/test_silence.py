"""When a machine without an answer is dead."""

from collections.abc import Iterable
from itertools import pairwise

from fairlead.drivers.silence import DEAD_AFTER, HANDSHAKES_AFTER, MAX_PAUSE, Silence, Step

TIMEOUT_S = 1.0
TICK_S = 0.01
FIRST_S = HANDSHAKES_AFTER[0] * TIMEOUT_S
PLANNED_S = [part * TIMEOUT_S for part in (*HANDSHAKES_AFTER, DEAD_AFTER)]


def steps(times_s: Iterable[float]) -> list[tuple[float, Step]]:
    """Step at these times after the probe, until there is a result. Return what had to be done."""
    silence: Silence | None = None
    found: list[tuple[float, Step]] = []
    for now_s in times_s:
        silence = silence or Silence(0.0, TIMEOUT_S, now_s)
        if (step := silence.step(now_s)) != "wait":
            found.append((now_s, step))
        if step in ("dead", "abandon"):
            break
    return found


def ticks(first_s: float) -> list[float]:
    return [first_s + TICK_S * number for number in range(round(2 * TIMEOUT_S / TICK_S))]


def test_a_machine_is_dead_after_a_probe_and_several_handshakes_without_an_answer() -> None:
    found = steps(ticks(FIRST_S))
    assert [step for _, step in found] == ["handshake"] * len(HANDSHAKES_AFTER) + ["dead"]
    assert all(
        planned_s - 1e-9 <= now_s < planned_s + 2 * TICK_S
        for (now_s, _), planned_s in zip(found, PLANNED_S, strict=True)
    )


def test_a_late_handshake_delays_what_follows() -> None:
    late_s = PLANNED_S[1] + 0.2
    found = steps([FIRST_S, late_s - 0.2, late_s, *ticks(late_s + TICK_S)])
    assert found[-1][1] == "dead"
    waited_s = [later - earlier for earlier, later in pairwise(now_s for now_s, _ in found)]
    shortest_s = [later - earlier for earlier, later in pairwise(PLANNED_S)]
    assert all(
        waited >= shortest - 1e-9 for waited, shortest in zip(waited_s, shortest_s, strict=True)
    )


def test_a_pause_of_the_process_gives_no_verdict() -> None:
    paused_s = FIRST_S + MAX_PAUSE * TIMEOUT_S + TICK_S
    assert steps([FIRST_S, paused_s]) == [(FIRST_S, "handshake"), (paused_s, "abandon")]
