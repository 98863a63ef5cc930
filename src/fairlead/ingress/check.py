"""`fairlead ingress check`: send every variant of a request to every entry point, and evaluate the
answers.

In: entry points, and the known settings of the load balancer in front of them. Out: a `Report`. All
requests are sent at once: they are few, and a request without an answer must not delay the others.
"""

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
    """The parameters of a check. `sends`, `echo` and `client` are those of `Case`. `known` are
    findings that need no request; the report contains them too."""

    targets: tuple[Target, ...]
    sends: Header | None
    echo: bool
    client: str
    timeout_s: float
    known: tuple[Finding, ...] = ()


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request and its answer."""

    place: str
    tls: bool
    variant: Variant
    answer: Answer


class Report(msgspec.Struct, frozen=True):
    """The result of a check: all requests, and the findings, most severe first. `sends` is None if
    it is unknown which PROXY header the load balancer sends. `tested` is False if no port speaks
    HTTP, so that nothing was tested."""

    sends: Header | None
    calls: tuple[Row, ...]
    findings: tuple[Finding, ...]
    tested: bool = True

    @property
    def has_problems(self) -> bool:
        return any(finding.severity in PROBLEMS for finding in self.findings)


async def check(plan: Plan) -> Report:
    """Send all requests and return the report. Failures of the network or of a server do not raise;
    they are in the report."""
    cases = await asyncio.gather(*(_case(plan, target) for target in plan.targets))
    found = [*plan.known, *(finding for case in cases for finding in findings(case))]
    rows = [
        Row(entry_point.place, entry_point.entry_point.tls, variant, answer)
        for case in cases
        for entry_point in (case.front, *case.behind)
        for variant, answer in entry_point.answers.items()
    ]
    unique = sorted(dict.fromkeys(found), key=lambda finding: WORST_FIRST.index(finding.severity))
    tested = any(case.is_tested for case in cases)
    return Report(plan.sends, tuple(dict.fromkeys(rows)), tuple(unique), tested)


async def _case(plan: Plan, target: Target) -> Case:
    entry_points = [("load balancer", target.front), *target.behind]
    front, *behind = await asyncio.gather(
        *(
            _check_entry_point(name, entry_point, plan.timeout_s)
            for name, entry_point in entry_points
        )
    )
    return Case(
        plan.sends, front, tuple(behind), plan.echo, plan.client, target.ready, target.is_web
    )


async def _check_entry_point(
    name: str, entry_point: EntryPoint, timeout_s: float
) -> CheckedEntryPoint:
    answers: Sequence[Answer] = await asyncio.gather(
        *(call(entry_point, variant, timeout_s) for variant in VARIANTS)
    )
    return CheckedEntryPoint(name, entry_point, dict(zip(VARIANTS, answers, strict=True)))
