"""A finding names each node with ready pods that does not answer the probes of the gateway, and the
probe path."""

from collections.abc import Mapping

import pytest

from fairlead.kube.events import MAX_MESSAGE_LENGTH
from fairlead.model import HealthMonitor, Member, Verdict
from fairlead.plan.members import (
    HEALTH_CHECKS_FAILING,
    NODE_NOT_ANSWERING,
    UnconfirmedMembers,
    confirm,
)

MONITOR = HealthMonitor(10256, "/healthz")
ONE, TWO = Member("node1", "192.0.2.21", 1), Member("node2", "198.18.0.22", 2)


def notes(
    verdicts: Mapping[str, Verdict], tunnels: Mapping[str, str], *, any_ready: bool = True
) -> list[tuple[str, str]]:
    found = UnconfirmedMembers((ONE, TWO), {}, any_ready, any_usable=True)
    _, made = confirm(found, MONITOR, lambda address, _: verdicts[address], tunnels)
    return [(note.code, str(note)) for note in made]


@pytest.mark.parametrize(
    ("kind", "path", "remedy"),
    [
        ("", "node2 (198.18.0.22): no", "check the gateway's routes to the nodes"),
        ("ipip", "node2 (198.18.0.22) through the ipip tunnel: no", "allow IP protocols 4 and 41"),
        (
            "vxlan",
            "node2 (198.18.0.22) through the vxlan tunnel: no",
            "allow the tunnel's UDP port",
        ),
    ],
)
def test_a_node_that_does_not_answer_while_others_do_is_reported_with_its_probe_path(
    kind: str, path: str, remedy: str
) -> None:
    ((reason, message),) = notes(
        {ONE.address: "up", TWO.address: "down"}, {TWO.address: kind} if kind else {}
    )
    assert reason == NODE_NOT_ANSWERING
    assert (
        f"no answer from the health port 10256 of {path} new connections are sent there" in message
    )
    assert remedy in message


def test_if_no_node_answers_the_finding_names_all_nodes_and_the_tunnels_to_check() -> None:
    ((reason, message),) = notes({ONE.address: "down", TWO.address: "down"}, {TWO.address: "ipip"})
    assert reason == HEALTH_CHECKS_FAILING
    assert "(node1 (192.0.2.21), node2 (198.18.0.22) through the ipip tunnel)" in message
    assert "allow IP protocols 4 and 41" in message


@pytest.mark.parametrize("verdict", ["up", "assumed_up", "unready", "probe_failed"])
def test_nodes_that_answer_or_were_not_probed_are_not_reported(verdict: Verdict) -> None:
    assert notes({ONE.address: "up", TWO.address: verdict}, {TWO.address: "ipip"}) == []


def test_no_node_is_reported_while_all_pods_terminate() -> None:
    assert notes({ONE.address: "up", TWO.address: "down"}, {}, any_ready=False) == []


def test_the_finding_contains_the_remedy_however_many_nodes_do_not_answer() -> None:
    """The message of an Event has at most 1,024 characters."""
    silent = [
        Member(f"worker-{i:03}.rack-7.example.net", f"198.18.0.{i}", 1) for i in range(1, 101)
    ]
    found = UnconfirmedMembers((ONE, *silent), {}, any_ready=True, any_usable=True)
    tunnels = dict.fromkeys([each.address for each in silent], "ipip")
    _, (note,) = confirm(
        found, MONITOR, lambda address, _: "up" if address == ONE.address else "down", tunnels
    )
    assert (
        "worker-005.rack-7.example.net (198.18.0.5) through the ipip tunnel and 95 more: no new "
        "connections"
    ) in str(note)
    assert "allow IP protocols 4 and 41" in str(note)[:MAX_MESSAGE_LENGTH]
