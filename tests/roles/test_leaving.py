"""When a gateway gives its addresses away, and when it ends."""

from fairlead.kube.objects import ANNOUNCE_LABEL, Node, ObjectKey, ObjectMeta
from fairlead.plan.gateways import Gateways
from fairlead.roles.leaving import Leaving
from fairlead.state import State


def state(label: str = "", *, synced: bool = True) -> State:
    made = State(())
    labels = {ANNOUNCE_LABEL: label} if label else {}
    made.update_nodes({ObjectKey("", "gw1"): Node(ObjectMeta("gw1", labels=labels))})
    if synced:
        made.has_synced.set()
    return made


def leaving(given: State, *, asked: bool = False) -> Leaving:
    return Leaving(given, "gw1", lambda: asked)


def test_a_gateway_leaves_by_request_or_by_the_label_of_its_node() -> None:
    assert leaving(state()).since() == ""
    assert leaving(state(), asked=True).since() != ""
    assert leaving(state("leave")).since() != ""
    assert leaving(state("anything")).since() == ""


def test_the_last_gateway_that_leaves_has_the_latest_time_also_if_its_clock_is_late() -> None:
    given = state("leave")
    others = {"gw2": "2999-01-01T00:00:00Z", "gw3": "9999-12-31T23:59:59Z", "gw4": "a text"}
    given.gateways = Gateways(frozenset(others), leaving=others)
    assert leaving(given).since() == "2999-01-01T00:00:01Z"


def test_it_ends_with_the_label_and_does_not_begin_again_meanwhile() -> None:
    given = state("leave")
    found = leaving(given)
    since = found.since()
    assert found.since() == since != ""
    given.update_nodes({ObjectKey("", "gw1"): Node(ObjectMeta("gw1"))})
    assert found.since() == ""


def test_the_next_process_continues_until_it_knows_better() -> None:
    """A Node with the label keeps it over a restart; a request ends with its process."""
    given = state("leave", synced=False)
    found = leaving(given)
    found.inherit("2026-01-01T00:00:00Z")
    assert found.since() == "2026-01-01T00:00:00Z"
    given.has_synced.set()
    assert found.since() == "2026-01-01T00:00:00Z"
    given = state(synced=False)
    found = leaving(given)
    found.inherit("2026-01-01T00:00:00Z")
    assert found.since() == "2026-01-01T00:00:00Z"
    given.has_synced.set()
    assert found.since() == ""
