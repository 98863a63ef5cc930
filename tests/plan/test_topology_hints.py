"""Which endpoints the clients on a node use if EndpointSlices contain topology hints, by the rules
of kube-proxy (KEP-2433, KEP-3015)."""

import pytest

from fairlead.kube.objects import EndpointHints, Hint
from fairlead.plan.endpoints import Candidate, near, usable

EAST, WEST = "east", "west"


def candidate(
    number: int, zones: str = "", nodes: str = "", *, ready: bool = True, serving: bool = True
) -> Candidate:
    """Return a candidate. `zones`, `nodes`: the names in its hints, separated by spaces. If both
    are empty, the candidate has no hints."""
    hints = (
        EndpointHints(*(tuple(map(Hint, words.split())) or None for words in (zones, nodes)))
        if zones or nodes
        else None
    )
    return Candidate(f"10.0.0.{number}", 80, "", ready, serving, not ready, hints)


A, B = candidate(1, EAST), candidate(2, WEST)
LOCAL, ELSEWHERE = candidate(3, WEST, "here"), candidate(4, EAST, "there")
TERMINATING = (candidate(1, EAST, ready=False), candidate(2, WEST, ready=False))
CASES = {
    "only endpoints with a hint for the zone": ((A, B), (A,)),
    "an endpoint with hints for two zones": (
        (candidate(1, "east west"), B),
        (candidate(1, "east west"),),
    ),
    "an endpoint without hints disables the hints of all": (
        (A, B, candidate(5)),
        (A, B, candidate(5)),
    ),
    "no hint for this zone: all endpoints": ((B,), (B,)),
    "hints for the node take precedence over hints for the zone": ((LOCAL, ELSEWHERE), (LOCAL,)),
    "no hint for this node: the hints for the zone apply": (
        (candidate(3, WEST, "other"), ELSEWHERE),
        (ELSEWHERE,),
    ),
    "not all endpoints have node hints: the hints for the zone apply": ((A, LOCAL), (A,)),
    "an unready endpoint without hints disables nothing": (
        (A, B, candidate(5, ready=False, serving=False)),
        (A,),
    ),
    "terminating endpoints are used in spite of their hints": (TERMINATING, TERMINATING),
}


@pytest.mark.parametrize("name", CASES)
def test_topology_hints(name: str) -> None:
    among, expected = CASES[name]
    assert near(usable(among), "here", EAST) == expected


def test_a_node_without_a_zone_uses_all_endpoints() -> None:
    assert near((A, B), "here", "") == (A, B)
