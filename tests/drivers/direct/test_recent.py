"""The record of the flows that a gateway has seen recently."""

import math

from fairlead.drivers.direct.peers.recent import RecentFlows


def test_the_last_time_that_a_flow_was_seen_counts() -> None:
    recent = RecentFlows()
    recent.record([b"a", b"b"], 1.0)
    recent.record([b"a"], 2.0)
    assert [recent.changed_s(flow) for flow in (b"a", b"b", b"c")] == [2.0, 1.0, -math.inf]
    recent.forget_before(1.5)
    assert recent.flows == {b"a"}
    recent.forget_before(3.0)
    assert recent.flows == set()


def test_if_there_are_too_many_flows_the_oldest_are_forgotten() -> None:
    recent = RecentFlows(limit=3)
    recent.record([b"a", b"b"], 1.0)
    recent.record([b"a", b"c", b"d"], 2.0)
    assert recent.flows == {b"a", b"c", b"d"}
    recent.record([b"e", b"f", b"g", b"h"], 3.0)
    assert recent.flows == {b"f", b"g", b"h"}


def test_the_set_of_flows_reflects_later_changes() -> None:
    recent = RecentFlows()
    flows = recent.flows
    recent.record([b"a"], 1.0)
    assert b"a" in flows
