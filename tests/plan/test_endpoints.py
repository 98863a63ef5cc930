"""Which endpoints of a Service port get new connections."""

from itertools import product

import pytest
from tests.makers import CONDITIONS, make_slice

from fairlead.plan.endpoints import candidates, usable


@pytest.mark.parametrize(
    ("states", "used"),
    [
        (["ready", "draining", "serving", "unready"], ["ready"]),
        (["draining", "serving", "unready", "dying"], ["draining"]),
        (["serving", "unready", "dying"], []),
        (["unknown", "draining"], ["unknown"]),
        ([], []),
    ],
    ids=[
        "a ready endpoint: only ready ones",
        "no ready endpoint: terminating ones that serve",
        "serving without terminating is not enough",
        "an unknown condition counts as ready",
        "no endpoint",
    ],
)
def test_ready_endpoints_are_used_or_else_endpoints_that_serve_while_they_terminate(
    states: list[str], used: list[str]
) -> None:
    rows = [(f"10.0.0.{number}", "node1", state) for number, state in enumerate(states, 1)]
    found = usable(candidates([make_slice(rows)], port_name="", protocol="TCP", family="IPv4"))
    assert [states[int(each.address.rpartition(".")[2]) - 1] for each in found] == used


@pytest.mark.parametrize(("one", "other"), list(product(CONDITIONS, repeat=2)))
def test_an_endpoint_that_is_neither_ready_nor_serving_while_it_terminates_is_not_used(
    one: str, other: str
) -> None:
    rows = [("10.0.0.1", "node1", one), ("10.0.0.2", "node1", other)]
    for each in usable(candidates([make_slice(rows)], port_name="", protocol="TCP", family="IPv4")):
        assert each.ready or (each.serving and each.terminating)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("ready", "draining"),
        ("ready", "unready"),
        ("serving", "draining"),
        ("unready", "dying"),
        ("serving", "unready"),
        ("draining", "dying"),
    ],
)
@pytest.mark.parametrize("better_first", [True, False])
def test_an_endpoint_in_two_slices_counts_once_with_its_better_conditions(
    better: str, worse: str, better_first: bool
) -> None:
    slices = [
        make_slice([("10.0.0.1", "node1", state)], name=f"web-{state}") for state in (better, worse)
    ]
    if not better_first:
        slices.reverse()
    (found,) = candidates(slices, port_name="", protocol="TCP", family="IPv4")
    wanted = CONDITIONS[better]
    assert (found.ready, found.serving, found.terminating) == (
        wanted.ready,
        wanted.serving,
        wanted.terminating,
    )
