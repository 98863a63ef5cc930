"""A node with ready pods that gives the gateway no answer is named in a Finding, with the path by
which it was asked."""

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
    ("kind", "way", "remedy"),
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
def test_one_that_is_silent_while_others_answer(kind: str, way: str, remedy: str) -> None:
    ((reason, message),) = notes(
        {ONE.address: "up", TWO.address: "down"}, {TWO.address: kind} if kind else {}
    )
    assert reason == NODE_NOT_ANSWERING
    assert (
        f"no answer from the health port 10256 of {way} new connections are sent there" in message
    )
    assert remedy in message


def test_if_all_are_silent_the_note_says_who_is_believed_and_which_tunnels_to_look_at() -> None:
    ((reason, message),) = notes({ONE.address: "down", TWO.address: "down"}, {TWO.address: "ipip"})
    assert reason == HEALTH_CHECKS_FAILING
    assert "(node1 (192.0.2.21), node2 (198.18.0.22) through the ipip tunnel)" in message
    assert "allow IP protocols 4 and 41" in message


@pytest.mark.parametrize("verdict", ["up", "assumed_up", "unready", "probe_failed"])
def test_nothing_is_said_of_nodes_that_answer_or_were_not_asked(verdict: Verdict) -> None:
    assert notes({ONE.address: "up", TWO.address: verdict}, {TWO.address: "ipip"}) == []


def test_nothing_is_said_while_all_pods_are_on_their_way_out() -> None:
    assert notes({ONE.address: "up", TWO.address: "down"}, {}, any_ready=False) == []


def test_the_remedy_is_told_however_many_nodes_are_silent() -> None:
    """An Event has no more than 1,024 characters."""
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
