"""What a gateway remembers of flows that it has met."""

import math

from fairlead.drivers.direct.peers.recent import RecentFlows


def test_a_flow_that_is_met_again_was_met_then() -> None:
    recent = RecentFlows()
    recent.record([b"a", b"b"], 1.0)
    recent.record([b"a"], 2.0)
    assert [recent.changed_s(flow) for flow in (b"a", b"b", b"c")] == [2.0, 1.0, -math.inf]
    recent.forget_before(1.5)
    assert recent.flows == {b"a"}
    recent.forget_before(3.0)
    assert recent.flows == set()


def test_what_was_met_first_is_forgotten_when_there_are_too_many() -> None:
    recent = RecentFlows(limit=3)
    recent.record([b"a", b"b"], 1.0)
    recent.record([b"a", b"c", b"d"], 2.0)
    assert recent.flows == {b"a", b"c", b"d"}
    recent.record([b"e", b"f", b"g", b"h"], 3.0)
    assert recent.flows == {b"f", b"g", b"h"}


def test_whoever_holds_the_flows_sees_what_comes_later() -> None:
    recent = RecentFlows()
    flows = recent.flows
    recent.record([b"a"], 1.0)
    assert b"a" in flows
