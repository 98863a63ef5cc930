"""Whether a machine that has not answered a probe yet is dead. Pure: the time is an argument.

In: when the probe was sent and its time limit, and the time at each step. Out: when to attempt a
TCP handshake with the machine, and when all of them have been unanswered for long enough.

The time limit of a probe is long, because the process that answers may be busy. The kernel answers
a handshake at once, however busy the processes are. So a machine is dead before the time limit ends
if neither the probe nor any of several handshakes, which start one after the other, is answered. A
single lost packet gives no verdict, nor does a process that hangs.

Invariant: a pause of this process gives no verdict, and handshakes are never closer to each other
or to the verdict than planned."""

from typing import Literal

HANDSHAKES_AFTER = (0.2, 0.35, 0.5)
"""When the handshakes start, in parts of the time limit after the probe."""
DEAD_AFTER = 0.8
"""When the machine is dead, in parts of the time limit after the probe: with the default time limit
of 0.15 s the probe has waited for 120 ms, and the handshakes for 90, 67 and 45 ms."""
MAX_PAUSE = 0.3
"""The longest time between two steps, in parts of the time limit. After a longer one, this process
or its host was not running, and answers may be late because of that."""

Step = Literal["wait", "handshake", "dead", "abandon"]


class Silence:
    """The search for any sign of life of one machine. `sent_s`: when the probe without an answer
    was sent; `timeout_s`: its time limit. Start it when the first handshake is due."""

    def __init__(self, sent_s: float, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._moments_s = [sent_s + part * timeout_s for part in (*HANDSHAKES_AFTER, DEAD_AFTER)]
        self._stepped_s = now_s
        self._done = 0

    def step(self, now_s: float) -> Step:
        """Return what to do now, if there was no answer until now."""
        if now_s - self._stepped_s > MAX_PAUSE * self._timeout_s:
            return "abandon"
        self._stepped_s = now_s
        late_s = now_s - self._moments_s[self._done]
        if late_s < 0:
            return "wait"
        # What follows is as late as this step.
        self._moments_s = [moment_s + late_s for moment_s in self._moments_s]
        self._done += 1
        return "handshake" if self._done < len(self._moments_s) else "dead"
