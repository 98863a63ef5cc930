"""`fairlead ingress check`: knock at every entry_point in every variant, and gather what it means.

In: entry_points, and what is known of the balancer before them. Out: a `Report`. All calls go out at once:
they are few, and one that nobody answers must not keep the others waiting."""

import asyncio
from collections.abc import Sequence
from typing import get_args

import msgspec

from fairlead.ingress.call import call
from fairlead.ingress.entrypoint import VARIANTS, Answer, EntryPoint, Variant
from fairlead.ingress.findings import Case, CheckedEntryPoint, findings
from fairlead.ingress.service import Target
from fairlead.ingress.settings import Header
from fairlead.model import Finding, Severity

PROBLEMS = ("security", "error")
WORST_FIRST: tuple[Severity, ...] = tuple(reversed(get_args(Severity)))


class Plan(msgspec.Struct, frozen=True):
    """What to do. `sends`, `echo`, `client`: see `Case`. `known`: findings that came without a
    call."""

    targets: tuple[Target, ...]
    sends: Header | None
    echo: bool
    client: str
    timeout_s: float
    known: tuple[Finding, ...] = ()


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call."""

    place: str
    tls: bool
    variant: Variant
    answer: Answer


class Report(msgspec.Struct, frozen=True):
    """`sends` None: not known. Every call, and what they mean, the worst first."""

    sends: Header | None
    calls: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def has_problems(self) -> bool:
        return any(finding.severity in PROBLEMS for finding in self.findings)


async def check(plan: Plan) -> Report:
    """Make all calls. Never raises for what the other side does."""
    cases = await asyncio.gather(*(_case(plan, target) for target in plan.targets))
    found = [*plan.known, *(finding for case in cases for finding in findings(case))]
    rows = [
        Row(entry_point.place, entry_point.entry_point.tls, variant, answer)
        for case in cases
        for entry_point in (case.front, *case.behind)
        for variant, answer in entry_point.answers.items()
    ]
    unique = sorted(dict.fromkeys(found), key=lambda finding: WORST_FIRST.index(finding.severity))
    return Report(plan.sends, tuple(dict.fromkeys(rows)), tuple(unique))


async def _case(plan: Plan, target: Target) -> Case:
    entry_points = [("load balancer", target.front), *target.behind]
    front, *behind = await asyncio.gather(
        *(
            _check_entry_point(name, entry_point, plan.timeout_s)
            for name, entry_point in entry_points
        )
    )
    return Case(plan.sends, front, tuple(behind), plan.echo, plan.client, target.ready)


async def _check_entry_point(
    name: str, entry_point: EntryPoint, timeout_s: float
) -> CheckedEntryPoint:
    answers: Sequence[Answer] = await asyncio.gather(
        *(call(entry_point, variant, timeout_s) for variant in VARIANTS)
    )
    return CheckedEntryPoint(name, entry_point, dict(zip(VARIANTS, answers, strict=True)))
