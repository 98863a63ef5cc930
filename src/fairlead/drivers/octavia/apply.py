"""Carries out the steps of one Service in sequence.

In: Calls in order. Out: the Calls are done, and Octavia has finished all work on the load balancer;
or an error that names the last step. Octavia locks a load balancer while it works on any part of
it, for seconds or minutes, so the driver polls the status until each step is done. The first poll
is made when the step may be done; later polls are rare, because each costs Octavia work. Invariant:
nothing is written after an error; the caller reads the actual state before it continues."""

import asyncio
import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.answers import Id, decode_one
from fairlead.drivers.octavia.balancers import DELETED, ERROR
from fairlead.drivers.octavia.changes import Call
from fairlead.drivers.octavia.cloud import Cloud, Failed
from fairlead.drivers.octavia.paths import url_of
from fairlead.drivers.octavia.read import settled
from fairlead.errors import Unavailable

WAITS_KEPT = 8
"""The number of recent waits for each HTTP method from which the next wait is estimated."""
FIRST_POLL_FRACTION = 0.8
"""The first poll is made after this fraction of the shortest recent wait, so that a cloud that has
become faster is noticed."""


class Pace(msgspec.Struct, frozen=True):
    """The intervals, in seconds, at which Octavia is polled: first after `first_s`, then whenever
    the elapsed time has grown by the factor `growth`, and at least every `last_s`. After
    `timeout_s` the wait ends, so that other Services get their turn."""

    first_s: float = 0.3
    last_s: float = 5.0
    timeout_s: float = 120.0
    growth: float = 1.5


DEFAULT_PACE = Pace()


class PollSchedule:
    """The times of polls, computed from a pace and from the durations of earlier writes with the
    same HTTP method: a change of a load balancer takes half a second in one cloud and a minute in
    another."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._took_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WAITS_KEPT))

    def first_s(self, kind: str) -> float:
        """Return the time until the first poll. It follows the shortest recent duration, because in
        a cloud with two providers one takes seconds and the other a minute."""
        took_s = self._took_s.get(kind)
        return (
            min(max(FIRST_POLL_FRACTION * min(took_s), self.pace.first_s), self.pace.last_s)
            if took_s
            else self.pace.first_s
        )

    def next_s(self, elapsed_s: float) -> float:
        return min(max(elapsed_s * (self.pace.growth - 1), self.pace.first_s), self.pace.last_s)

    def record(self, kind: str, took_s: float) -> None:
        self._took_s[kind].append(took_s)


class StillWorking(Exception):
    """Octavia has not finished within `timeout_s`."""


async def carry_out(
    cloud: Cloud, steps: Sequence[Call], schedule: PollSchedule, fence: Callable[[], None]
) -> None:
    """Make the writes in order, and wait for each. `fence` is called before each write, and raises
    if the write must not be made. Raise StillWorking, the errors of `Cloud.write`, and Unavailable
    for an answer that cannot be decoded."""
    names: dict[str, str] = {}
    for step in steps:
        path, body = _named(step.path, names), _filled(step.body, names)
        async with cloud.creating if step.makes else contextlib.nullcontext():
            fence()
            answer = await cloud.write(step.method, path, body, step.revision)
        if step.at_neutron:
            continue
        made = _made(step, answer)
        if step.saves:
            names[f"${step.saves}"] = made
        balancer_id = step.balancer_id or made
        status = await wait_settled(cloud, balancer_id, schedule, step.method)
        if status == ERROR and not step.ends:
            raise Failed(
                f"{step}: load balancer {balancer_id} went to ERROR", fix="Fairlead repairs it"
            )
        if status == DELETED and not step.ends:
            raise Unavailable(f"{step}: load balancer {balancer_id} has vanished")
        if step.ends and status != DELETED:
            raise Unavailable(
                f"{step}: Octavia has not deleted the load balancer, its status is {status}"
            )


async def wait_settled(
    cloud: Cloud, balancer_id: str, schedule: PollSchedule, kind: str = ""
) -> str:
    """Wait until Octavia has finished all work on the load balancer, and return its status. `kind`:
    the HTTP method of the write that was just made, if any. Raise StillWorking."""
    clock = asyncio.get_running_loop().time
    begun_s, pause_s = clock(), schedule.first_s(kind)
    while True:
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        polled_s = clock()
        status = await settled(cloud, balancer_id)
        if not status.startswith("PENDING"):
            if kind:
                schedule.record(kind, polled_s - begun_s)
            return status
        if clock() - begun_s > schedule.pace.timeout_s:
            raise StillWorking
        pause_s = schedule.next_s(clock() - begun_s)


def _named(text: str, names: Mapping[str, str]) -> str:
    """Replace each part of the path that names an earlier result by the id of that result."""
    return "/".join(names.get(part, part) for part in text.split("/"))


def _filled(
    body: Mapping[str, object] | None, names: Mapping[str, str]
) -> Mapping[str, object] | None:
    """Replace names of earlier results by their ids in the one object of a body."""
    if body is None:
        return None
    return {
        word: {
            name: names.get(value, value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        if isinstance(fields, dict)
        else fields
        for word, fields in body.items()
    }


def _made(step: Call, answer: bytes) -> str:
    """Return the id of the created or changed object. Answers to some writes have no body. Raise
    Unavailable if the answer is not one of the API: the write may not have been made."""
    if not answer and step.balancer_id and not step.saves:
        return ""
    return decode_one(f"{step.method} {url_of(step.path)}", answer, Id).id
