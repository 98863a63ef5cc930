"""The values of the decisions about ownership: an address on an interface, an interface, and the
effects of decisions. `engine` makes the decisions, `process` carries the effects out."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from fairlead.drivers.l2.ownership import Standing
from fairlead.drivers.l2.records import Place

Phase = Literal["learning", "silent", "owned", "conflict", "down"]


class Want(NamedTuple):
    """How an address is wanted: by which candidates (None: all members), and whether this host
    hands it over."""

    candidates: tuple[str, ...] | None = None
    leaving: bool = False


class SetState(NamedTuple):
    """Let the kernel answer for the address, or let it be silent."""

    place: Place
    owned: bool


class Forget(NamedTuple):
    """The kernel does not handle the address any more."""

    place: Place


class Announce(NamedTuple):
    """Announce the address now and repeatedly. `urgent`: neighbors would otherwise send to a host
    that does not serve the address."""

    place: Place
    urgent: bool = True


class Cease(NamedTuple):
    """Do not announce the address any more."""

    place: Place


class Probe(NamedTuple):
    """Ask whether any station has the address."""

    place: Place


class Withdraw(NamedTuple):
    """Tell other members that this host does not answer for the address any more."""

    place: Place


Effect = SetState | Forget | Announce | Cease | Probe | Withdraw


class Entry(msgspec.Struct):
    """An address on one interface. `holder`: the last known owner. `cause`: why this host began to
    own it. `taken`: this process has taken it, instead of a previous process of this host.
    `foreign`: the MAC address of a station outside of Fairlead that uses it; empty: none."""

    want: Want
    phase: Phase = "learning"
    holder: str | None = None
    cause: str = ""
    taken: bool = False
    foreign: bytes = b""
    foreign_s: float = 0.0
    """When that station was heard last."""
    suspect_s: float = 0.0
    """Until when a station that uses it may still show that it is a member."""
    probes: int = 0
    next_s: float | None = None
    """When the entry has to be judged again without an event."""
    lost_s: float | None = None
    """Since when the holder is lost, or the address is known to be free."""
    held_until_s: float = 0.0
    claimed_s: float = 0.0
    """When the holder claimed the address last."""
    yield_s: float | None = None
    """When this host ceases to answer, after another one has taken over."""
    resume_s: float | None = None
    """When this host, which was cut off, announces the address again unless another one has taken
    it over."""
    claimant: str = ""
    """The member that has claimed the address at the end of a cut, before it answered this host."""
    announced_s: float = float("-inf")
    """When this host last announced again because another station used the address."""
    before: str = ""
    """The former holder, for the cause of a move."""


class Link(msgspec.Struct):
    """An interface with the members that this host hears there."""

    standings: Mapping[str, Standing] = {}
    usable: bool = True
    settled_s: float = 0.0
    former: dict[str, str] = {}
    """Why the holders of addresses that were alive may not own addresses any more."""
    lost: dict[str, float] = {}
    """When members that are gone were lost, for the last second."""
    cut_off_until_s: float = 0.0
    """Until when this host counts as cut off; infinite while it hears no member."""


def cause_of(name: str, standing: Standing | None) -> str:
    """Return why a member may not own an address. `standing`: None if it does not answer."""
    match standing:
        case None:
            return f"{name} does not answer"
        case "leaving":
            return f"{name} is leaving"
        case "stale":
            return f"the process of {name} is away"
        case _:
            return f"{name} is not ready"


def cause_of_move(entry: Entry, link: Link) -> str:
    """Return why this host takes the address; empty if no other member had it before."""
    name = entry.before
    if not name:
        return ""
    if link.standings.get(name) in ("ready", "returned"):
        return f"{name} may not announce it any more"
    return link.former.get(name) or cause_of(name, link.standings.get(name))
