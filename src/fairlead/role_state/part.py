"""A part of `/state`: what one component shows there, and how `fairlead status` prints it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fairlead.model import Value


class Table(NamedTuple):
    """A table for people. `title`: a line above the header; empty: none."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


class Part(Value, frozen=True):
    """The part of `/state` that one component provides. A field of this type in the state of a role
    is the only declaration that a part needs."""

    def shown(self) -> "Iterable[Table | str]":
        """Return the tables and lines in which `fairlead status` prints the part, in their order;
        none if there is nothing to tell."""
        return ()


def listed(counts: Mapping[str, int]) -> str:
    """Return the counts that are not zero, as text."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count) or "none"
