"""The findings of the doctor. Pure values.

A finding is one root cause: something that a person changed, forgot or lost. Its consequences are
listed under it. Invariant: a rule that cannot see a fact it needs returns no finding, and the
report names the source that could not be read."""

from typing import Literal

import msgspec

Severity = Literal["broken", "degraded", "risk"]
"""`broken`: traffic is lost now. `degraded`: it works, but not as requested. `risk`: traffic will
be lost under a condition that the finding names."""
SEVERITIES: tuple[Severity, ...] = ("broken", "degraded", "risk")
Actor = Literal["Service owner", "cluster operator", "network operator", "cloud operator"]


class Evidence(msgspec.Struct, frozen=True):
    """A fact on which a finding rests. `origin`: the object and field from which it was read."""

    fact: str
    value: str
    origin: str


class RootCause(msgspec.Struct, frozen=True):
    """A finding. `object`: the object that has to be changed or examined, such as `Service
    default/web`. `remedy`: a command or manifest. `actor`: who can carry it out."""

    id: str
    severity: Severity
    object: str
    message: str
    evidence: tuple[Evidence, ...]
    remedy: str
    actor: Actor
    consequences: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.id, self.object


class NotExamined(msgspec.Struct, frozen=True):
    """A source of facts that was not read, and why."""

    source: str
    reason: str


class Report(msgspec.Struct, frozen=True):
    """The result of an examination. `services`: the examined Services."""

    services: tuple[str, ...]
    findings: tuple[RootCause, ...]
    not_examined: tuple[NotExamined, ...] = ()
