"""Carries out the steps of one Service, one after the other.

In: Calls in order. Out: they are done, and nothing of the load balancer is being worked on any
more; or an error that says which step was the last. Octavia locks a load balancer while it works on
any part of it, for seconds or minutes, so each step is waited for: by its status, asked first when
it may be done, and rarely where it takes long, as each look is work for Octavia. Invariant: after
an error nothing more is done; whoever goes on looks first at what is there."""

import asyncio
import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.balancers import DELETED, ERROR
from fairlead.drivers.octavia.changes import Call
from fairlead.drivers.octavia.cloud import Cloud, Failed
from fairlead.drivers.octavia.read import settled
from fairlead.errors import Unavailable

WAITS_KEPT = 8
"""So many waits of a kind tell what the next one may take."""
FIRST_POLL_FRACTION = 0.8
"""The first look comes a little before the shortest of them would have ended: so it is seen that
things go faster now."""


class Pace(msgspec.Struct, frozen=True):
    """How often Octavia is asked whether it is done: after `first_s`, then whenever it has taken
    `growth` times as long, at least every `last_s`; for `patience_s`, then others have their
    turn."""

    first_s: float = 0.3
    last_s: float = 5.0
    patience_s: float = 120.0
    growth: float = 1.5


PATIENT = Pace()


class PollSchedule:
    """When to ask, by a pace and by what Octavia took before for writes of the same kind: a change
    of a load balancer takes one cloud half a second, and another one a minute."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._took_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WAITS_KEPT))

    def first_s(self, kind: str) -> float:
        """The shortest of late: where there are two providers, one takes seconds and the other a
        minute."""
        took_s = self._took_s.get(kind)
        return (
            min(max(FIRST_POLL_FRACTION * min(took_s), self.pace.first_s), self.pace.last_s)
            if took_s
            else self.pace.first_s
        )

    def next_s(self, elapsed_s: float) -> float:
        return min(max(elapsed_s * (self.pace.growth - 1), self.pace.first_s), self.pace.last_s)

    def learn(self, kind: str, took_s: float) -> None:
        self._took_s[kind].append(took_s)


class StillWorking(Exception):
    """Octavia takes its time."""


async def carry_out(
    cloud: Cloud, steps: Sequence[Call], schedule: PollSchedule, fence: Callable[[], None]
) -> None:
    """`fence` is called before each write, and raises if it must not be made. Raises StillWorking,
    or as `Cloud.write`."""
    names: dict[str, str] = {}
    for step in steps:
        path, body = _named(step.path, names), _filled(step.body, names)
        async with cloud.creating if step.makes else contextlib.nullcontext():
            fence()
            answer = await cloud.write(step.method, path, body, step.revision)
        if step.at_neutron:
            continue
        made = _id_in(answer)
        if step.saves:
            names[f"${step.saves}"] = made
        balancer_id = step.balancer_id or made
        status = await wait_settled(cloud, balancer_id, schedule, step.method)
        if status == ERROR and not step.ends:
            raise Failed(f"{step}: load balancer {balancer_id} went to ERROR", fix="it is repaired")
        if status == DELETED and not step.ends:
            raise Unavailable(f"{step}: load balancer {balancer_id} has vanished")
        if step.ends and status != DELETED:
            raise Unavailable(f"{step}: Octavia has not deleted it, it is in {status}")


async def wait_settled(
    cloud: Cloud, balancer_id: str, schedule: PollSchedule, kind: str = ""
) -> str:
    """Wait until nothing of the load balancer is being worked on; its status. `kind`: of the write
    that was just made. Raises StillWorking."""
    clock = asyncio.get_running_loop().time
    begun_s, pause_s = clock(), schedule.first_s(kind)
    while True:
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        asked_s = clock()
        status = await settled(cloud, balancer_id)
        if not status.startswith("PENDING"):
            if kind:
                schedule.learn(kind, asked_s - begun_s)
            return status
        if clock() - begun_s > schedule.pace.patience_s:
            raise StillWorking
        pause_s = schedule.next_s(clock() - begun_s)


def _named(text: str, names: Mapping[str, str]) -> str:
    """With the ids of what earlier steps made. A name stands for itself or for a part of a path."""
    return "/".join(names.get(part, part) for part in text.split("/"))


def _filled(
    body: Mapping[str, object] | None, names: Mapping[str, str]
) -> Mapping[str, object] | None:
    """The one object of a body, with those ids."""
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


class _Made(msgspec.Struct):
    id: str = ""


def _id_in(answer: bytes) -> str:
    """The id of what was made or changed; answers to some writes have no body."""
    if not answer:
        return ""
    whole = msgspec.json.decode(answer, type=dict[str, _Made])
    return next(iter(whole.values()), _Made()).id
