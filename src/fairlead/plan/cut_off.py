"""Whether this gateway was cut off from the network, and has to catch up before it announces again.

In: whether other nodes answer its probes, whether a BGP session is established, whether the gateway
has caught up, and the time. Out: the phase. Pure: the time is an argument.

A gateway that is cut off sees all other nodes fail, and does not learn of the connections that
begin elsewhere. Its BIRD would announce the addresses as soon as a session is established again,
when its tables still send every connection to the pods of its own host. So nothing is announced
from the moment at which neither another node nor a neighbor of BGP answers, which costs nothing,
until the gateway has caught up.

A process that starts cannot compare with before. It counts as cut off if for `START_S` neither the
API server nor a neighbor of BGP has answered it. If only the API server stays away, its BIRD
exports what an earlier process announced: a gateway that is alone must work without the API server.

Invariants: a gateway with an established session is never cut off, whatever the nodes do. A gateway
with a single node, its own, is never cut off. The return ends after `RETURN_S` at the latest, and
after `NODES_S` if only nodes are missing: they may have died meanwhile."""

from typing import Literal, NamedTuple

NODES_S = 1.0
"""How long a gateway that returns waits for further nodes."""
RETURN_S = 5.0
"""How long a gateway that returns waits for its peers, or for the API server if it has started
while it was cut off."""
START_S = 5.0
"""How long a start waits for an answer of the API server or a session before it counts as cut off.
Longer than BIRD takes to establish its sessions: in a graceful restart, neighbors delete the routes
that are not exported then."""

Phase = Literal["connected", "cut off", "returning"]


class Seen(NamedTuple):
    """What a gateway sees of the network.

    - `others`: nodes other than its own are probed;
    - `alive`: at least one of them answers;
    - `established`: at least one BGP session is;
    - `nodes_back`: every node that was lost by the cut answers again;
    - `peers_back`: every peer that was connected before has sent its state again."""

    others: bool
    alive: bool
    established: bool
    nodes_back: bool = True
    peers_back: bool = True


class CutOff(NamedTuple):
    """The phase, and since when it lasts."""

    phase: Phase = "connected"
    since_s: float = 0.0


CONNECTED = CutOff()


def follow(before: CutOff, seen: Seen, now_s: float) -> CutOff:
    """Return the next phase."""
    if seen.others and not seen.alive and not seen.established:
        return before if before.phase == "cut off" else CutOff("cut off", now_s)
    if before.phase == "cut off":
        before = CutOff("returning", now_s)
    if before.phase == "returning":
        passed_s = now_s - before.since_s
        nodes = seen.nodes_back or (seen.alive and passed_s >= NODES_S)
        if not (nodes and seen.peers_back) and passed_s < RETURN_S:
            return before
        return CutOff("connected", now_s)
    return before


class Start(NamedTuple):
    """A start without an answer of the API server. `held_back`: nothing is exported.
    `established_s`: since when a session is established, None if none is."""

    begun_s: float
    held_back: bool = False
    established_s: float | None = None


def follow_start(before: Start, *, established: bool, now_s: float) -> Start:
    """Return the next state of a start, while the API server does not answer."""
    if not established:
        return Start(before.begun_s, before.held_back or now_s - before.begun_s >= START_S)
    since_s = before.established_s if before.established_s is not None else now_s
    return Start(before.begun_s, before.held_back and now_s - since_s < RETURN_S, since_s)
