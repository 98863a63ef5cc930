"""Checks by TCP handshakes whether a machine is dead, while a probe of it has no answer.

In: a probe without an answer, and the targets of the machine. Out: the result of each step; the
caller steps every few milliseconds and ends the check when the probe is answered. `silence` decides
when. Invariant: no socket is left open when the check is closed."""

from collections.abc import Sequence
from typing import Literal

from fairlead.drivers.liveness import Target
from fairlead.drivers.silence import Silence
from fairlead.errors import Unavailable
from fairlead.net.handshake import Handshake

Result = Literal["waiting", "alive", "dead", "unknown"]


class SilenceCheck:
    """The check of one machine. `targets`: where handshakes are attempted, in turn: a single port
    may be closed by a firewall. `mark`: the SO_MARK of its sockets."""

    def __init__(self, silence: Silence, targets: Sequence[Target], mark: int) -> None:
        self._silence = silence
        self._targets = targets
        self._mark = mark
        self._handshakes: list[Handshake] = []

    def step(self, now_s: float) -> Result:
        """Do what is due. `unknown`: the check gives no result, because this process was late or
        could not connect."""
        if any(each.state() == "answered" for each in self._handshakes):
            return "alive"
        match self._silence.step(now_s):
            case "wait":
                return "waiting"
            case "dead":
                return "dead"
            case "abandon":
                return "unknown"
            case "handshake":
                target = self._targets[len(self._handshakes) % len(self._targets)]
                try:
                    made = Handshake(target.address, target.port, self._mark)
                except Unavailable:
                    return "unknown"
                self._handshakes.append(made)
                return "waiting"

    def close(self) -> None:
        """End the handshakes."""
        for each in self._handshakes:
            each.close()
        self._handshakes.clear()
