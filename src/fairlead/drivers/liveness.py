"""Judge one node from the answers of its health ports, and say which port to ask next. Pure: time comes in.

In: targets, answers with the time they came. Out: verdicts as they change; the next target and when to ask it.
Invariants: one probe at a time, whatever the number of targets; nothing is said of a target that was not proved:
  up       one good answer; two, an interval apart, if it was down (a machine that boots or flaps has to wait a little)
  unready  one answer that is not good; or two refusals, or two silences while the machine answers elsewhere;
           but of a target of which nothing is known yet, five of them: its rules may be on their way
  down     two silences in a row, of any targets: it is the machine that is silent, so it is said of all of them
"""

from collections.abc import Iterator

from fairlead.model import Value, Verdict
from fairlead.net.httpprobe import Answer

SILENCES = 2
REFUSALS = 2
PATIENCE = 5
"""So many answers that are not good, an interval apart, before the first verdict is `unready`."""
GOOD_AFTER_DOWN = 2
HASTE = 10
"""Targets of which nothing is known are asked so many times as often as the others: a gateway that starts must learn about
hundreds of Services soon, but not by a burst."""


class Target(Value, frozen=True):
    """One health port of one node."""

    address: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}{self.path}"


class Record:
    """What is known of one target; the counts are of such answers in a row."""

    def __init__(self, local: bool) -> None:
        self.local = local
        self.verdict: Verdict | None = None
        self.good = 0
        self.bad = 0
        self.refused = 0
        self.silent = 0


class NodeLiveness:
    """The targets of one node address. `interval_s` is the time from the beginning of one probe to that of the next."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._records: dict[Target, Record] = {}
        # Ordered sets, first come first asked. Every target is in the rotation; the others go ahead of it.
        self._fresh: dict[Target, None] = {}
        self._doubtful: dict[Target, float] = {}
        self._rotation: dict[Target, None] = {}
        self._silences = 0
        self._down = False

    def verdict(self, target: Target) -> Verdict | None:
        """What is known of it; None: nothing yet."""
        record = self._records.get(target)
        return None if record is None else record.verdict

    def add(self, target: Target, *, local: bool) -> None:
        """Ask this target too. `local`: it is a healthCheckNodePort, whose 200 must say how many endpoints there are."""
        if target in self._records:
            self._records[target].local = local
            return
        self._records[target] = Record(local)
        self._rotation[target] = self._fresh[target] = None

    def remove(self, target: Target) -> None:
        """Ask it no more."""
        for place in (self._records, self._fresh, self._doubtful, self._rotation):
            place.pop(target, None)

    def next(self, asked_s: float) -> tuple[float, Target] | None:
        """When and what to ask next, if the last probe began at `asked_s`. None: there is no target."""
        if self._fresh:
            return asked_s + self._interval_s / HASTE, next(iter(self._fresh))
        turn_s = asked_s + self._interval_s
        for target, due_s in self._doubtful.items():
            if due_s <= turn_s:
                return turn_s, target
            break  # they are in the order of their times
        return next(((turn_s, target) for target in self._rotation), None)

    def asking(self, target: Target) -> None:
        """It is being asked now: it goes to the end of the line."""
        self._fresh.pop(target, None)
        self._doubtful.pop(target, None)
        self._rotation.pop(target, None)
        self._rotation[target] = None

    def judge(self, target: Target, answer: Answer, now_s: float) -> Iterator[tuple[Target, Verdict]]:
        """Take an answer in; gives the verdicts that it changes."""
        record = self._records.get(target)
        if answer.kind == "silent":
            yield from self._judge_silence(target, record, now_s)
            return
        self._silences = 0
        if self._down:
            # The machine is back: all that was said of its targets was said of it, so ask each of them.
            self._down = False
            self._fresh = {other: None for other in self._records if other != target}
        if record is None:
            return  # it was removed while it was asked
        verdict = weigh(record, answer)
        if verdict is None:
            self._doubtful[target] = now_s + self._interval_s
        elif verdict != record.verdict:
            record.verdict = verdict
            yield target, verdict

    def could_not_ask(self, target: Target, now_s: float) -> Iterator[tuple[Target, Verdict]]:
        """The question could not be sent. What was proved before stands; where nothing was, this is said."""
        record = self._records.get(target)
        if record is None:
            return
        self._doubtful[target] = now_s + self._interval_s
        if record.verdict is None:
            record.verdict = "unasked"
            yield target, "unasked"

    def _judge_silence(self, target: Target, record: Record | None, now_s: float) -> Iterator[tuple[Target, Verdict]]:
        # A target that is known to hang proves nothing about the machine; else two that hang would look like its death.
        if record is None or record.silent < SILENCES:
            self._silences += 1
        if record is not None:
            record.silent, record.good, record.refused = record.silent + 1, 0, 0
        if self._silences >= SILENCES:
            self._down = True
        if self._down:
            self._fresh, self._doubtful = {}, {}
            for other, known in self._records.items():
                known.good = known.refused = 0
                if known.verdict != "down":
                    known.verdict = "down"
                    yield other, "down"
        elif record is not None and record.silent < SILENCES:
            self._doubtful[target] = now_s + self._interval_s
        elif record is not None and record.verdict != "unready":
            record.verdict = "unready"
            yield target, "unready"


def weigh(record: Record, answer: Answer) -> Verdict | None:
    """What an answer that is not silence proves about its target, after those before it. None: nothing yet."""
    record.silent = 0
    if answer.kind == "answered" and is_good(answer, record.local):
        record.bad = record.refused = 0
        record.good += 1
        return None if record.verdict == "down" and record.good < GOOD_AFTER_DOWN else "up"
    record.good = 0
    record.bad += 1
    record.refused = record.refused + 1 if answer.kind == "refused" else 0
    if record.verdict in (None, "unasked"):
        return "unready" if record.bad >= PATIENCE else None
    return "unready" if answer.kind != "refused" or record.refused >= REFUSALS else None


def is_good(answer: Answer, local: bool) -> bool:
    """Whether it says "send me traffic". kube-proxy answers an empty 200 on a healthCheckNodePort whose Service is just
    being removed (its server returns without writing), so there an empty one says nothing."""
    if answer.status != 200 or answer.weight == 0:
        return False
    return answer.weight is not None or not (local and answer.empty)
