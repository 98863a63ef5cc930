"""The findings of the doctor. Pure values.

In: nothing. Out: `RootCause`, a Finding with the facts that it rests on. A finding is one root
cause: something that a person changed, forgot or lost. What follows from it is listed under it.
Invariant: a rule that cannot see a fact that it needs returns no finding, and the report names the
source that could not be read."""

from typing import Literal

import msgspec

from fairlead.model import Finding

Actor = Literal["Service owner", "cluster operator"]
"""Who can carry out a remedy."""


class Fact(msgspec.Struct, frozen=True):
    """A fact on which a finding rests: its name, its value, and the object and field from which it
    was read."""

    name: str
    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} [{self.origin}]"


class RootCause(Finding, frozen=True, kw_only=True):
    """A Finding of the doctor. `subject`: the object that has to be changed or examined, such as
    `Service default/web`. `remedy`: a command, or a part of a manifest; a text after `#` says what
    to change. Severity `error`: traffic is lost now; `warning`: it is served, but not as its owner
    expects, or only until something happens that the message names."""

    known_by: tuple[Fact, ...]
    actor: Actor
    consequences: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.code, self.subject


class NotLookedAt(msgspec.Struct, frozen=True):
    """A source of facts that was not read, and why."""

    source: str
    reason: str
