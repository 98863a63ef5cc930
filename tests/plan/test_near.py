"""Which endpoints a node's clients get where EndpointSlices give hints: kube-proxy's rules
(KEP-2433, KEP-3015)."""

import pytest

from fairlead.kube.objects import EndpointHints, Hint
from fairlead.plan.endpoints import Candidate, near, usable

EAST, WEST = "east", "west"


def candidate(
    number: int, zones: str = "", nodes: str = "", *, ready: bool = True, serving: bool = True
) -> Candidate:
    """Zones and nodes by name, with blanks between. Neither: no hints."""
    hints = (
        EndpointHints(*(tuple(map(Hint, words.split())) or None for words in (zones, nodes)))
        if zones or nodes
        else None
    )
    return Candidate(f"10.0.0.{number}", 80, "", ready, serving, not ready, hints)


A, B = candidate(1, EAST), candidate(2, WEST)
HERE, THERE = candidate(3, WEST, "here"), candidate(4, EAST, "there")
ENDING = (candidate(1, EAST, ready=False), candidate(2, WEST, ready=False))
CASES = {
    "of the zone": ((A, B), (A,)),
    "for both": ((candidate(1, "east west"), B), (candidate(1, "east west"),)),
    "one says nothing": ((A, B, candidate(5)), (A, B, candidate(5))),
    "none for this zone": ((B,), (B,)),
    "of the node, whatever the zone": ((HERE, THERE), (HERE,)),
    "none for this node, so of the zone": ((candidate(3, WEST, "other"), THERE), (THERE,)),
    "not all name nodes, so of the zone": ((A, HERE), (A,)),
    "an unready one does not count": ((A, B, candidate(5, ready=False, serving=False)), (A,)),
    "who is ending is for everybody": (ENDING, ENDING),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_near(name: str) -> None:
    among, expected = CASES[name]
    assert near(usable(among), "here", EAST) == expected


def test_a_node_without_a_zone_gets_all() -> None:
    assert near((A, B), "here", "") == (A, B)
