"""When a gateway is cut off from the network, and when it announces again."""

from fairlead.plan.cut_off import (
    CONNECTED,
    NODES_S,
    RETURN_S,
    START_S,
    CutOff,
    Phase,
    Seen,
    Start,
    follow,
    follow_start,
)

ALONE = Seen(others=True, alive=False, established=False)
BACK = Seen(others=True, alive=True, established=False, nodes_back=False, peers_back=False)
STEP_S = 0.1


def phases(*seen: tuple[Seen, float]) -> list[Phase]:
    """Return the phases of a gateway that sees this for these times, without repetitions."""
    state, now_s, found = CONNECTED, 100.0, list[Phase]()
    for each, lasts_s in seen:
        end_s = now_s + lasts_s
        while now_s < end_s:
            state = follow(state, each, now_s)
            now_s += STEP_S
            if not found or found[-1] != state.phase:
                found.append(state.phase)
    return found


def test_a_gateway_without_any_other_node_and_without_sessions_is_cut_off() -> None:
    assert follow(CONNECTED, ALONE, 1.0) == CutOff("cut off", 1.0)
    assert follow(CutOff("cut off", 1.0), ALONE, 9.0) == CutOff("cut off", 1.0)


def test_a_gateway_with_an_established_session_announces_although_all_nodes_are_dead() -> None:
    assert follow(CONNECTED, ALONE._replace(established=True), 1.0) == CONNECTED


def test_the_only_node_of_a_cluster_announces_without_sessions() -> None:
    assert follow(CONNECTED, ALONE._replace(others=False), 1.0) == CONNECTED


def test_a_gateway_that_loses_its_sessions_only_announces() -> None:
    assert follow(CONNECTED, ALONE._replace(alive=True), 1.0) == CONNECTED


def test_a_gateway_that_returns_announces_when_nodes_and_peers_are_back() -> None:
    back = BACK._replace(established=True)
    caught_up = back._replace(nodes_back=True, peers_back=True)
    assert phases((ALONE, 3.0), (BACK, 0.5), (back, 0.2), (caught_up, 0.1)) == [
        "cut off",
        "returning",
        "connected",
    ]


def test_a_node_that_died_meanwhile_delays_the_return_a_little() -> None:
    waiting = BACK._replace(peers_back=True)
    assert phases((ALONE, 1.0), (waiting, NODES_S - 0.2)) == ["cut off", "returning"]
    assert phases((ALONE, 1.0), (waiting, NODES_S + 0.2))[-1] == "connected"


def test_a_peer_or_all_nodes_that_died_meanwhile_do_not_prevent_the_return() -> None:
    no_nodes = ALONE._replace(established=True, nodes_back=False)
    for waiting in (BACK._replace(nodes_back=True), no_nodes):
        assert phases((ALONE, 1.0), (waiting, RETURN_S - 0.2)) == ["cut off", "returning"]
        assert phases((ALONE, 1.0), (waiting, RETURN_S + 0.2))[-1] == "connected"


def test_a_gateway_that_is_cut_off_again_while_it_returns_waits_again() -> None:
    assert phases((ALONE, 1.0), (BACK, 1.0), (ALONE, 1.0), (BACK, 1.0)) == [
        "cut off",
        "returning",
        "cut off",
        "returning",
    ]


def test_a_start_without_any_answer_is_cut_off_and_returns_with_a_session() -> None:
    start = Start(100.0)
    for now_s, established, held_back in (
        (100.1, False, False),
        (100 + START_S, False, True),
        (200.0, True, True),
        (200 + RETURN_S - 0.1, True, True),
        (210.0, False, True),
        (220.0, True, True),
        (220 + RETURN_S, True, False),
    ):
        start = follow_start(start, established=established, now_s=now_s)
        assert (now_s, start.held_back) == (now_s, held_back)


def test_a_start_with_a_session_is_not_cut_off() -> None:
    start = Start(100.0)
    for now_s in (100.0, 101.0, 150.0):
        start = follow_start(start, established=True, now_s=now_s)
        assert not start.held_back
