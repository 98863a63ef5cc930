"""The report of the doctor: the Services it examined, its findings, and the facts it lacked. Pure.

In: findings. Out: a `Report`, as lines of text for people and as a plain value for programs.
Invariant: a report never calls a Service healthy, because the doctor never sees a whole cluster. It
says that nothing wrong was found, and names the sources of facts that could not be read."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from fairlead.doctor.finding import NotLookedAt, RootCause
from fairlead.doctor.owners import Owner

BEYOND_THE_API = NotLookedAt(
    "packets, kernels of hosts, and clouds", "this version reads the Kubernetes API only"
)


class LookedAt(msgspec.Struct, frozen=True):
    """A Service that was looked at, and the controller that serves it."""

    service: str
    owner: Owner


class Report(msgspec.Struct, frozen=True):
    """The result of an examination."""

    services: tuple[LookedAt, ...]
    findings: tuple[RootCause, ...]
    not_looked_at: tuple[NotLookedAt, ...] = ()


def plain(report: Report) -> dict[str, Any]:
    """Return the report for programs. The fields of a finding are always the same ones."""
    return {
        "services": msgspec.to_builtins(report.services),
        "findings": [
            {
                "code": each.code,
                "severity": each.severity,
                "subject": each.subject,
                "message": each.message,
                "known_by": msgspec.to_builtins(each.known_by),
                "consequences": list(each.consequences),
                "remedy": each.remedy,
                "actor": each.actor,
            }
            for each in report.findings
        ],
        "not_looked_at": msgspec.to_builtins(report.not_looked_at),
    }


def lines(report: Report, width: int) -> Iterator[str]:
    """Yield the lines of the report for people, of at most this width where a line can be
    broken."""
    for each in report.findings:
        yield from _finding(each, width)
        yield ""
    yield summary(report)
    for source, reason in grouped(report.not_looked_at):
        yield from _wrapped(f"not looked at: {source} ({reason})", "", "  ", width)


def summary(report: Report) -> str:
    """Return what was looked at and how much of it is wrong, in one sentence."""
    services, count = len(report.services), len(report.findings)
    looked_at = f"{services} Service{'' if services == 1 else 's'} looked at"
    if 0 < services <= 3:
        names = ", ".join(f"{each.service}, {_served_by(each.owner)}" for each in report.services)
        looked_at += f" ({names})"
    if not count:
        # About no Service there is nothing to say.
        return f"{looked_at}, nothing wrong" if services else looked_at
    return f"{looked_at}, {count} finding{'' if count == 1 else 's'}"


def _served_by(owner: Owner) -> str:
    if owner == "not known":
        return "whose controller is not known"
    return f"served by {'no controller' if owner == 'none' else owner}"


def grouped(not_looked_at: Sequence[NotLookedAt]) -> list[tuple[str, str]]:
    """Return the sources by reason, the sources of each reason in one text."""
    by_reason: dict[str, list[str]] = {}
    for each in not_looked_at:
        by_reason.setdefault(each.reason, []).append(each.source)
    return [(", ".join(sources), reason) for reason, sources in by_reason.items()]


def _finding(each: RootCause, width: int) -> Iterator[str]:
    yield f"{each.severity.upper()}  {each.code}  {each.subject}"
    yield from _wrapped(each.message, "  ", "  ", width)
    for fact in each.known_by:
        yield from _wrapped(str(fact), "  known by  ", "            ", width)
    for text in each.consequences:
        yield from _wrapped(text, "  follows   ", "            ", width)
    # A command is never wrapped, so that it can be copied.
    yield f"  remedy    {each.remedy}"
    yield f"  to do by  {each.actor}"


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
