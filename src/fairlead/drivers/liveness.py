"""Derives the verdicts for one node from the answers of its health ports, and chooses the next port
to probe. Pure: the time is an argument.

In: targets, and answers with the times at which they came. Out: verdicts when they change; the next
target and when to probe it. Invariants: one probe at a time, for any number of targets; every
verdict rests on answers, or on their absence:

- `up`: one good answer; after `down`, two good answers an interval apart, because a machine that
  boots needs a moment.
- `flapping`: good answers, but the target stopped answering more than once recently. It must first
  answer well for a trial period, which doubles each time. The verdicts below are never delayed.
- `unready`: one bad answer; or two refused connections; or two time-outs while the machine answers
  on another port. A target without a verdict becomes `unready` only after five bad answers or
  refused connections, because its node may still be installing the rules.
- `down`: two time-outs in a row, of any targets; or a check has found during a probe that the
  machine is dead (`silence`). The machine is silent, so all its targets get this verdict.
- `probe_failed`: the probe of a target without a verdict could not be sent, which is a failure on
  our own side."""

from collections.abc import Iterator, Sequence
from itertools import islice

from fairlead.model import Value, Verdict
from fairlead.net.address import join_host_port
from fairlead.net.httpanswer import Answer

SILENCES = 2
"""Time-outs in a row after which a target is `unready`, or the machine `down`."""
REFUSALS = 2
"""Refused connections in a row after which a target is `unready`."""
FIRST_UNREADY_AFTER = 5
"""Bad answers in a row, an interval apart, after which the first verdict is `unready`."""
GOOD_AFTER_DOWN = 2
"""Good answers in a row after which a target that was `down` is `up`."""
STABLE_S = 60.0
"""Previous failures of a target are forgotten after it has been up for this time."""
FIRST_TRIAL_S, MAX_TRIAL_S = 1.0, 30.0
"""The trial period after the second recent failure, and the longest trial period."""
MAX_IN_TURN = 4
"""Up to this number, all targets of a node are probed in turn. With more targets, one of them
represents the machine for `PROBES_IN_A_ROW` probes, then the next one: probing the same target
again is cheap, because its connection is still open."""
PROBES_IN_A_ROW = 10
"""Probes in a row for which one target represents the machine."""
FRESH_FACTOR = 10
"""Targets without a verdict, and all targets of a machine that is back, are probed this many times
as often as the others. A gateway that starts must soon get verdicts for hundreds of Services, but
without a burst of probes."""


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
    """The history of one target. Each of `good`, `bad`, `refused` and `silent` counts such answers
    in a row."""

    __slots__ = ("bad", "failures", "good", "local", "refused", "silent", "since_s", "verdict")

    def __init__(self, local: bool) -> None:
        self.local = local
        self.verdict: Verdict | None = None
        self.good = 0
        self.bad = 0
        self.refused = 0
        self.silent = 0
        self.failures = 0
        """How often the target stopped answering without having been up for `STABLE_S` in
        between."""
        self.since_s = 0.0
        """When the target became up; while it is not up, the time of the first good answer after
        its last bad one."""

    def record_failure(self, now_s: float) -> None:
        """Record that the target stops answering. Do nothing unless the target was up."""
        if self.verdict == "up":
            self.failures = 1 if now_s - self.since_s >= STABLE_S else self.failures + 1

    @property
    def trial_s(self) -> float:
        """How long the target has to answer well before it is up again."""
        return (
            min(FIRST_TRIAL_S * 2 ** (self.failures - 2), MAX_TRIAL_S) if self.failures > 1 else 0.0
        )


class NodeLiveness:
    """The targets of one node address, and the verdicts on them. `interval_s` is the time from the
    start of one probe to the start of the next."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._records: dict[Target, Record] = {}
        # Ordered sets of targets: the first one is probed first. Every target is in the rotation.
        # The other sets take precedence over it: `_fresh` holds targets to be probed without delay,
        # `_to_confirm` targets that need another answer before their verdict, with the time at
        # which it is due, and `_unready` targets with the verdict `unready`.
        self._fresh: dict[Target, None] = {}
        self._to_confirm: dict[Target, float] = {}
        self._rotation: dict[Target, None] = {}
        self._unready: dict[Target, None] = {}
        self._probed_unready = False
        self._representative: Target | None = None
        self._representative_record: Record | None = None
        """The record of the target that represents the machine; None if that target was removed."""
        self._probes_in_a_row = 0
        self._silences = 0
        self._down = False

    def verdict(self, target: Target) -> Verdict | None:
        """Return the verdict on the target; None if there is none yet."""
        record = self._records.get(target)
        return None if record is None else record.verdict

    def is_local(self, target: Target) -> bool:
        """Whether the target was added as a healthCheckNodePort."""
        record = self._records.get(target)
        return record is not None and record.local

    def add(self, target: Target, *, local: bool) -> None:
        """Probe this target too. `local`: it is a healthCheckNodePort, so a 200 must report the
        number of endpoints."""
        if target in self._records:
            self._records[target].local = local
            return
        self._records[target] = Record(local)
        self._rotation[target] = self._fresh[target] = None

    def remove(self, target: Target) -> None:
        """Stop probing this target."""
        for place in (self._records, self._fresh, self._to_confirm, self._rotation, self._unready):
            place.pop(target, None)
        if target == self._representative:
            self._representative = self._representative_record = None

    def next(self, sent_s: float) -> tuple[float, Target] | None:
        """Return when to probe which target next, if the last probe started at `sent_s`; None
        without targets."""
        if self._fresh:
            return sent_s + self._interval_s / FRESH_FACTOR, next(iter(self._fresh))
        turn_s = sent_s + self._interval_s
        for target, due_s in self._to_confirm.items():
            if self._records[target].verdict == "down":
                # The machine is back. It may have hundreds of targets.
                confirm_s = max(due_s, sent_s + self._interval_s / FRESH_FACTOR)
                if confirm_s <= turn_s:
                    return confirm_s, target
            elif due_s <= turn_s:
                return turn_s, target
            break  # the others are due later
        if len(self._rotation) > MAX_IN_TURN:
            # Every second probe is for targets that are `unready`: they may recover at any time.
            if self._unready and not self._probed_unready:
                return turn_s, next(iter(self._unready))
            if (
                self._representative_record is not None
                and self._representative
                and self._probes_in_a_row < PROBES_IN_A_ROW
                and self._representative_record.verdict == "up"
            ):
                return turn_s, self._representative
        return next(((turn_s, target) for target in self._rotation), None)

    def repeat(self, sent_s: float) -> tuple[float, Target] | None:
        """Return when to probe the same target again, only to see whether the machine is alive,
        while no other target can be probed; None if the target was removed."""
        return (
            (sent_s + self._interval_s, self._representative)
            if self._representative is not None
            else None
        )

    def probe_started(self, target: Target) -> None:
        """Record that a probe of this target starts, and move the target to the end of the
        rotation."""
        if target is self._representative and not (
            self._fresh or self._to_confirm or self._unready
        ):
            # The usual case: the target is at the end of the rotation already.
            self._probes_in_a_row += 1
            self._probed_unready = False
            return
        self._fresh.pop(target, None)
        self._to_confirm.pop(target, None)
        self._rotation.pop(target, None)
        self._rotation[target] = None
        self._probed_unready = target in self._unready
        if self._probed_unready:
            self._unready.pop(target)
            self._unready[target] = None
            return
        self._probes_in_a_row = self._probes_in_a_row + 1 if target == self._representative else 1
        self._representative, self._representative_record = target, self._records.get(target)

    def evaluate(
        self, target: Target, answer: Answer, now_s: float
    ) -> Sequence[tuple[Target, Verdict]]:
        """Record an answer, and return the verdicts that it changes."""
        record = self._records.get(target)
        if answer.kind == "silent":
            return tuple(self._evaluate_silence(target, record, now_s))
        self._silences = 0
        if self._down:
            # The machine is back. The verdict `down` of its targets was about the machine, so probe
            # each target now.
            self._down = False
            self._fresh = {other: None for other in self._records if other != target}
        if record is None:
            return ()  # the target was removed during the probe
        verdict = verdict_of(record, answer, now_s)
        if verdict in (None, "flapping"):
            self._to_confirm[target] = now_s + self._interval_s
        if verdict == "unready":
            self._unready[target] = None
        elif verdict is not None:
            self._unready.pop(target, None)
        if verdict is None or verdict == record.verdict:
            return ()
        record.verdict = verdict
        return ((target, verdict),)

    def probe_not_sent(self, target: Target, now_s: float) -> Iterator[tuple[Target, Verdict]]:
        """Record that a probe could not be sent. An earlier verdict stays; a target without a
        verdict gets `probe_failed`."""
        record = self._records.get(target)
        if record is None:
            return
        self._to_confirm[target] = now_s + self._interval_s
        if record.verdict is None:
            record.verdict = "probe_failed"
            yield target, "probe_failed"

    def to_check(self, target: Target) -> Sequence[Target]:
        """Return targets of the machine, the most suitable first, at which a check may find out
        whether it is dead while a probe of `target` has no answer. Return none if the machine is
        already `down`, or if the target never answers in time."""
        record = self._records.get(target)
        if self._down or record is None or record.verdict is None or record.silent:
            return ()
        others = (other for other in self._rotation if other != target)
        return (*islice(others, MAX_IN_TURN - 1), target)

    def machine_dead(self, now_s: float) -> Sequence[tuple[Target, Verdict]]:
        """Record that a check has found the machine dead, and return the verdicts that change."""
        self._silences = SILENCES
        return tuple(self._set_down(now_s))

    def _evaluate_silence(
        self, target: Target, record: Record | None, now_s: float
    ) -> Iterator[tuple[Target, Verdict]]:
        # A time-out of a target that is known to hang proves nothing about the machine. Otherwise
        # two hanging targets would look like a dead machine.
        if record is None or record.silent < SILENCES:
            self._silences += 1
        if record is not None:
            record.silent, record.good, record.refused = record.silent + 1, 0, 0
        if self._down or self._silences >= SILENCES:
            yield from self._set_down(now_s)
        elif record is not None and record.silent < SILENCES:
            self._to_confirm[target] = now_s + self._interval_s
        elif record is not None and record.verdict != "unready":
            record.record_failure(now_s)
            record.verdict = "unready"
            self._unready[target] = None
            yield target, "unready"

    def _set_down(self, now_s: float) -> Iterator[tuple[Target, Verdict]]:
        self._down = True
        self._fresh, self._to_confirm, self._unready = {}, {}, {}
        for other, known in self._records.items():
            known.good = known.refused = 0
            known.record_failure(now_s)
            if known.verdict != "down":
                known.verdict = "down"
                yield other, "down"


def verdict_of(record: Record, answer: Answer, now_s: float) -> Verdict | None:
    """Return the verdict that follows from this answer (not a time-out) and the previous ones; None
    if more answers are needed."""
    record.silent = 0
    if answer.kind == "answered" and is_good(answer, record.local):
        return _verdict_of_good(record, now_s)
    record.good = 0
    record.bad += 1
    record.refused = record.refused + 1 if answer.kind == "refused" else 0
    if record.verdict in (None, "probe_failed"):
        return "unready" if record.bad >= FIRST_UNREADY_AFTER else None
    if answer.kind == "refused" and record.refused < REFUSALS:
        return None
    if answer.weight != 0:  # a target that reports zero endpoints has not failed
        record.record_failure(now_s)
    return "unready"


def _verdict_of_good(record: Record, now_s: float) -> Verdict | None:
    """Return the verdict that follows from a good answer; None if more answers are needed."""
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
    """Whether the answer means that the node takes traffic. On a healthCheckNodePort, kube-proxy
    gives an empty 200 for a Service that is just being removed (its server returns without
    writing), so an empty 200 does not count there."""
    if answer.status != 200 or answer.weight == 0:
        return False
    return answer.weight is not None or not (local and answer.empty)
