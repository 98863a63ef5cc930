"""Decide which announcer owns an address. Pure.

In: what one host knows about an address: its holder, and the other announcers on the link. Out: the
owner, and the position of this host among the announcers that may take it over.

Rules: the present holder stays while it is alive and ready, and may announce the address. Otherwise
the announcer with the highest rendezvous rank takes over at once, and each further one waits a
little longer, in case those before it do not act. If two announcers hold an address, after a split
of the network, an announcer that was cut off from all others yields, because its data plane counts
their nodes as dead; otherwise the one with the higher rank stays. So hosts that know the same
announcers decide alike, without a vote; and the loss of one announcer moves only its own addresses
(rendezvous hashing, Thaler and Ravishankar 1998)."""

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

Standing = Literal["starting", "ready", "leaving", "returned", "stale"]
"""The state of an announcer that is alive. `starting`: it does not serve yet. `ready`: it may own
addresses. `leaving`: it hands over its addresses. `returned`: it is ready, but was cut off from all
others a moment ago. `stale`: its kernel answers, but its process has
been away for too long."""


class Decision(NamedTuple):
    """`owner`: the announcer that should own the address; None if there is none. `rank`: the
    position of this host among the announcers that may take over, from 0; None if it may not, or if
    the holder stays."""

    owner: str | None
    rank: int | None


@lru_cache(maxsize=131072)
def weight(address: str, name: str) -> bytes:
    """Return the rendezvous weight of an announcer for an address. The greatest one ranks first."""
    return hashlib.sha256(f"{address}|{name}".encode()).digest()


def may_own(
    name: str, standings: Mapping[str, Standing], candidates: Collection[str] | None
) -> bool:
    """Return whether the announcer may own an address. `standings`: of the announcers that are
    alive. `candidates`: the announcers that may own the address; None: all."""
    able = standings.get(name) in ("ready", "returned")
    return able and (candidates is None or name in candidates)


def decide(
    address: str,
    me: str,
    holder: str | None,
    standings: Mapping[str, Standing],
    candidates: Collection[str] | None,
) -> Decision:
    """Return who should own the address. `standings` includes this host, `me`."""
    if holder is not None and may_own(holder, standings, candidates):
        return Decision(holder, None)
    able = [name for name in standings if may_own(name, standings, candidates)]
    if not able:
        return Decision(None, None)
    best = max(able, key=lambda name: weight(address, name))
    if me not in able:
        return Decision(best, None)
    own = weight(address, me)
    return Decision(best, sum(weight(address, name) > own for name in able))


def outranks(address: str, one: str, other: str) -> bool:
    """Return whether `one` stays if both announcers hold the address."""
    return weight(address, one) > weight(address, other)
