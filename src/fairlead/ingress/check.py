"""`fairlead ingress check`: knock at every door in every way, and gather what it means.

In: doors, and what is known of the balancer before them. Out: a `Report`. All calls go out at once:
they are few, and one that nobody answers must not keep the others waiting."""

import asyncio
from collections.abc import Sequence
from typing import get_args

import msgspec

from fairlead.ingress.call import call
from fairlead.ingress.door import WAYS, Answer, Door, Way
from fairlead.ingress.findings import Case, Knocked, findings
from fairlead.ingress.service import Entrance
from fairlead.ingress.settings import Header
from fairlead.model import Finding, Severity

WRONG = ("security", "error")
WORST_FIRST: tuple[Severity, ...] = tuple(reversed(get_args(Severity)))


class Plan(msgspec.Struct, frozen=True):
    """What to do. `sends`, `echo`, `client`: see `Case`. `known`: findings that came without a
    call."""

    entrances: tuple[Entrance, ...]
    sends: Header | None
    echo: bool
    client: str
    timeout_s: float
    known: tuple[Finding, ...] = ()


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call."""

    place: str
    tls: bool
    way: Way
    answer: Answer


class Report(msgspec.Struct, frozen=True):
    """`sends` None: not known. Every call, and what they mean, the worst first."""

    sends: Header | None
    calls: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> bool:
        return any(finding.severity in WRONG for finding in self.findings)


async def check(plan: Plan) -> Report:
    """Make all calls. Never raises for what the other side does."""
    cases = await asyncio.gather(*(_case(plan, entrance) for entrance in plan.entrances))
    found = [*plan.known, *(finding for case in cases for finding in findings(case))]
    rows = [
        Row(door.place, door.door.tls, way, answer)
        for case in cases
        for door in (case.front, *case.behind)
        for way, answer in door.answers.items()
    ]
    unique = sorted(dict.fromkeys(found), key=lambda finding: WORST_FIRST.index(finding.severity))
    return Report(plan.sends, tuple(dict.fromkeys(rows)), tuple(unique))


async def _case(plan: Plan, entrance: Entrance) -> Case:
    doors = [("load balancer", entrance.front), *entrance.behind]
    front, *behind = await asyncio.gather(
        *(_knock(name, door, plan.timeout_s) for name, door in doors)
    )
    return Case(plan.sends, front, tuple(behind), plan.echo, plan.client, entrance.ready)


async def _knock(name: str, door: Door, timeout_s: float) -> Knocked:
    answers: Sequence[Answer] = await asyncio.gather(*(call(door, way, timeout_s) for way in WAYS))
    return Knocked(name, door, dict(zip(WAYS, answers, strict=True)))
