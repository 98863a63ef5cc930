"""Judge one node from the answers of its health ports, and say which port to ask next. Pure: time
comes in.

In: targets, answers with the time they came. Out: verdicts as they change; the next target and when
to ask it. Invariants: one probe at a time, whatever the number of targets; nothing is said of a
target that was not proved:
  up       one good answer; two, an interval apart, if it was down (a machine that boots has to wait a little)
  flapping good answers again, but it ceased to answer more than once of late: it has to go on answering well for a while
           first, twice as long each time. To be taken out never waits
  unready  one answer that is not good; or two refusals, or two silences while the machine answers elsewhere;
           but of a target of which nothing is known yet, five of them: its rules may be on their
           way
  down     two silences in a row, of any targets: it is the machine that is silent, so it is said of all of them
"""

from collections.abc import Iterator, Sequence

from fairlead.model import Value, Verdict
from fairlead.net.address import join_host_port
from fairlead.net.httpanswer import Answer

SILENCES = 2
REFUSALS = 2
PATIENCE = 5
"""So many answers that are not good, an interval apart, before the first verdict is `unready`."""
GOOD_AFTER_DOWN = 2
QUIET_S = 60.0
"""A target that has been up for so long has not fallen of late."""
FIRST_TRIAL_S, LONGEST_TRIAL_S = 1.0, 30.0
"""How long a target has to answer well after its second fall in a short time, and after many."""
IN_TURN = 4
"""Up to so many targets are asked in turn. Where there are more, one stands for the machine for
`DWELL` questions, then the next one: to ask one that was asked before costs little, as its
connection is still there."""
DWELL = 10
HASTE = 10
"""Targets of which nothing is known are asked so many times as often as the others: a gateway that
starts must learn about hundreds of Services soon, but not by a burst."""


class Target(Value, frozen=True, array_like=True):
    """One health port of one node. `routed`: probes follow the host's routes, as connections of
    class proxy do; otherwise probes take the path of forwarded packets, which may be a tunnel."""

    address: str
    port: int
    path: str
    routed: bool = False

    def __str__(self) -> str:
        return f"http://{join_host_port(self.address, self.port)}{self.path}"


class Record:
    """What is known of one target; the counts are of such answers in a row."""

    __slots__ = ("bad", "falls", "good", "local", "refused", "silent", "since_s", "verdict")

    def __init__(self, local: bool) -> None:
        self.local = local
        self.verdict: Verdict | None = None
        self.good = 0
        self.bad = 0
        self.refused = 0
        self.silent = 0
        self.falls = 0
        """How often it ceased to answer, each time before it had been up for `QUIET_S`."""
        self.since_s = 0.0
        """Since when it is up; or, while it is not, since when all its answers are good."""

    def fall(self, now_s: float) -> None:
        """It ceases to answer."""
        if self.verdict == "up":
            self.falls = 1 if now_s - self.since_s >= QUIET_S else self.falls + 1

    @property
    def trial_s(self) -> float:
        """So long it has to answer well before it is up again."""
        return (
            min(FIRST_TRIAL_S * 2 ** (self.falls - 2), LONGEST_TRIAL_S) if self.falls > 1 else 0.0
        )


class NodeLiveness:
    """The targets of one node address. `interval_s` is the time from the beginning of one probe to
    that of the next."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._records: dict[Target, Record] = {}
        # Ordered sets, first come first asked. Every target is in the rotation; the others go ahead
        # of it.
        self._fresh: dict[Target, None] = {}
        self._doubtful: dict[Target, float] = {}
        self._rotation: dict[Target, None] = {}
        self._unwell: dict[Target, None] = {}
        self._asked_unwell = False
        self._standing: Target | None = None
        self._stands: Record | None = None
        """What is known of the one that stands for the machine; None: nothing, it has been
        removed."""
        self._stood = 0
        self._silences = 0
        self._down = False

    def verdict(self, target: Target) -> Verdict | None:
        """What is known of it; None: nothing yet."""
        record = self._records.get(target)
        return None if record is None else record.verdict

    def is_local(self, target: Target) -> bool:
        """Whether it is known as a healthCheckNodePort."""
        record = self._records.get(target)
        return record is not None and record.local

    def add(self, target: Target, *, local: bool) -> None:
        """Ask this target too. `local`: it is a healthCheckNodePort, whose 200 must say how many
        endpoints there are."""
        if target in self._records:
            self._records[target].local = local
            return
        self._records[target] = Record(local)
        self._rotation[target] = self._fresh[target] = None

    def remove(self, target: Target) -> None:
        """Ask it no more."""
        for place in (self._records, self._fresh, self._doubtful, self._rotation, self._unwell):
            place.pop(target, None)
        if target == self._standing:
            self._standing = self._stands = None

    def next(self, asked_s: float) -> tuple[float, Target] | None:
        """When and what to ask next, if the last probe began at `asked_s`. None: there is no
        target."""
        if self._fresh:
            return asked_s + self._interval_s / HASTE, next(iter(self._fresh))
        turn_s = asked_s + self._interval_s
        for target, due_s in self._doubtful.items():
            if due_s <= turn_s:
                return turn_s, target
            break  # they are in the order of their times
        if len(self._rotation) > IN_TURN:
            if (
                self._unwell and not self._asked_unwell
            ):  # every other question: these may be well again any time
                return turn_s, next(iter(self._unwell))
            if (
                self._stands is not None
                and self._standing
                and self._stood < DWELL
                and self._stands.verdict == "up"
            ):
                return turn_s, self._standing
        return next(((turn_s, target) for target in self._rotation), None)

    def again(self, asked_s: float) -> tuple[float, Target] | None:
        """When the one that was asked last may be asked again, for the machine's sake, while none
        but it can be asked."""
        return (asked_s + self._interval_s, self._standing) if self._standing is not None else None

    def asking(self, target: Target) -> None:
        """It is being asked now: it goes to the end of the line."""
        if target is self._standing and not (self._fresh or self._doubtful or self._unwell):
            self._stood += 1  # as mostly: it is there already
            self._asked_unwell = False
            return
        self._fresh.pop(target, None)
        self._doubtful.pop(target, None)
        self._rotation.pop(target, None)
        self._rotation[target] = None
        self._asked_unwell = target in self._unwell
        if self._asked_unwell:
            self._unwell.pop(target)
            self._unwell[target] = None
            return
        self._stood = self._stood + 1 if target == self._standing else 1
        self._standing, self._stands = target, self._records.get(target)

    def judge(
        self, target: Target, answer: Answer, now_s: float
    ) -> Sequence[tuple[Target, Verdict]]:
        """Take an answer in; gives the verdicts that it changes."""
        record = self._records.get(target)
        if answer.kind == "silent":
            return tuple(self._judge_silence(target, record, now_s))
        self._silences = 0
        if self._down:
            # The machine is back: all that was said of its targets was said of it, so ask each of
            # them.
            self._down = False
            self._fresh = {other: None for other in self._records if other != target}
        if record is None:
            return ()  # it was removed while it was asked
        verdict = weigh(record, answer, now_s)
        if verdict in (None, "flapping"):
            self._doubtful[target] = now_s + self._interval_s
        if verdict == "unready":
            self._unwell[target] = None
        elif verdict is not None:
            self._unwell.pop(target, None)
        if verdict is None or verdict == record.verdict:
            return ()
        record.verdict = verdict
        return ((target, verdict),)

    def could_not_ask(self, target: Target, now_s: float) -> Iterator[tuple[Target, Verdict]]:
        """The question could not be sent. What was proved before stands; where nothing was, this is
        said."""
        record = self._records.get(target)
        if record is None:
            return
        self._doubtful[target] = now_s + self._interval_s
        if record.verdict is None:
            record.verdict = "unasked"
            yield target, "unasked"

    def _judge_silence(
        self, target: Target, record: Record | None, now_s: float
    ) -> Iterator[tuple[Target, Verdict]]:
        # A target that is known to hang proves nothing about the machine; else two that hang would
        # look like its death.
        if record is None or record.silent < SILENCES:
            self._silences += 1
        if record is not None:
            record.silent, record.good, record.refused = record.silent + 1, 0, 0
        if self._silences >= SILENCES:
            self._down = True
        if self._down:
            self._fresh, self._doubtful, self._unwell = {}, {}, {}
            for other, known in self._records.items():
                known.good = known.refused = 0
                known.fall(now_s)
                if known.verdict != "down":
                    known.verdict = "down"
                    yield other, "down"
        elif record is not None and record.silent < SILENCES:
            self._doubtful[target] = now_s + self._interval_s
        elif record is not None and record.verdict != "unready":
            record.fall(now_s)
            record.verdict = "unready"
            self._unwell[target] = None
            yield target, "unready"


def weigh(record: Record, answer: Answer, now_s: float) -> Verdict | None:
    """What an answer that is not silence proves about its target, after those before it. None:
    nothing yet."""
    record.silent = 0
    if answer.kind == "answered" and is_good(answer, record.local):
        return _weigh_good(record, now_s)
    record.good = 0
    record.bad += 1
    record.refused = record.refused + 1 if answer.kind == "refused" else 0
    if record.verdict in (None, "unasked"):
        return "unready" if record.bad >= PATIENCE else None
    if answer.kind == "refused" and record.refused < REFUSALS:
        return None
    if answer.weight != 0:  # that it has no pods is nothing that it did wrong
        record.fall(now_s)
    return "unready"


def _weigh_good(record: Record, now_s: float) -> Verdict | None:
    record.bad = record.refused = 0
    if record.verdict != "up" and not record.good:
        record.since_s = now_s
    record.good += 1
    if record.verdict == "up":
        return "up"
    if record.verdict == "down" and record.good < GOOD_AFTER_DOWN:
        return None
    if now_s - record.since_s < record.trial_s:
        return "flapping"
    record.since_s = now_s
    return "up"


def is_good(answer: Answer, local: bool) -> bool:
    """Whether it says "send me traffic". kube-proxy answers an empty 200 on a healthCheckNodePort
    whose Service is just being removed (its server returns without writing), so there an empty one
    says nothing."""
    if answer.status != 200 or answer.weight == 0:
        return False
    return answer.weight is not None or not (local and answer.empty)
