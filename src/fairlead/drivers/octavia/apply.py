"""Carries out the steps of one Service, one after the other.

In: Calls in order. Out: they are done, and nothing of the load balancer is being worked on any more; or an error that says
which step was the last. Octavia locks a load balancer while it works on any part of it, for seconds or minutes, so each step is
waited for: by its status, asked rarely where it takes long.
Invariant: after an error nothing more is done; whoever goes on looks first at what is there.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fairlead.drivers.octavia.changes import Call
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.read import settled
from fairlead.drivers.octavia.tree import DELETED, ERROR
from fairlead.errors import Unavailable


class Pace(msgspec.Struct, frozen=True):
    """How often Octavia is asked whether it is done: after `first_s`, then rarer, at last every `last_s`; for `patience_s`,
    then others have their turn."""

    first_s: float = 0.3
    last_s: float = 5.0
    patience_s: float = 120.0
    growth: float = 1.3


PATIENT = Pace()


class StillWorking(Exception):
    """Octavia takes its time."""


async def carry_out(cloud: Cloud, steps: Sequence[Call], pace: Pace, fence: Callable[[], None]) -> None:
    """`fence` is called before each write, and raises if it must not be made. Raises StillWorking, or as `Cloud.write`."""
    names: dict[str, str] = {}
    for step in steps:
        fence()
        path, body = _named(step.path, names), _filled(step.body, names)
        answer = await cloud.write(step.method, path, body)
        made = _id_in(answer)
        if step.saves:
            names[f"${step.saves}"] = made
        balancer = step.tree or made
        status = await wait_settled(cloud, balancer, pace)
        if status == ERROR and not step.ends:
            raise Unavailable(f"{step}: load balancer {balancer} went to ERROR", fix="it is repaired")
        if status == DELETED and not step.ends:
            raise Unavailable(f"{step}: load balancer {balancer} has vanished")
        if status == ERROR:
            raise Unavailable(f"{step}: Octavia could not delete it, it is in ERROR")


async def wait_settled(cloud: Cloud, balancer: str, pace: Pace) -> str:
    """Wait until nothing of the load balancer is being worked on; its status. Raises StillWorking."""
    clock = asyncio.get_running_loop().time
    begun_s, pause_s = clock(), pace.first_s
    while True:
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        status = await settled(cloud, balancer)
        if not status.startswith("PENDING"):
            return status
        if clock() - begun_s > pace.patience_s:
            raise StillWorking
        pause_s = min(pause_s * pace.growth, pace.last_s)


def _named(text: str, names: Mapping[str, str]) -> str:
    """With the ids of what earlier steps made. A name stands for itself or for a part of a path."""
    return "/".join(names.get(part, part) for part in text.split("/"))


def _filled(body: Mapping[str, object] | None, names: Mapping[str, str]) -> Mapping[str, object] | None:
    """The one object of a body, with those ids."""
    if body is None:
        return None
    return {
        word: {name: names.get(value, value) if isinstance(value, str) else value for name, value in fields.items()}
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
