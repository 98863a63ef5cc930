"""The verdicts about a node that follow from the answers of its health ports."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.liveness import PROBES_IN_A_ROW, NodeLiveness, Target
from fairlead.model import Verdict
from fairlead.net.httpanswer import REFUSED, SILENT, Answer

A, B, C = (Target("192.0.2.1", port, "/healthz") for port in (30001, 30002, 30003))
GOOD = Answer("answered", 200, 2, False)
NONE_LOCAL = Answer("answered", 503, 0, False)
EMPTY = Answer("answered", 200)
INTERVAL_S = 0.1


class Node:
    """A NodeLiveness with a clock. `record_answer` stores the answer of a target and returns the
    changed verdicts."""

    def __init__(self, *targets: Target, local: bool = True) -> None:
        self.liveness = NodeLiveness(INTERVAL_S)
        self.now_s = 100.0
        self.probed_s = float("-inf")
        for target in targets:
            self.liveness.add(target, local=local)

    def record_answer(self, target: Target, answer: Answer) -> dict[Target, Verdict]:
        self.liveness.probe_started(target)
        return dict(self.liveness.evaluate(target, answer, self.now_s))

    def turn(self, answers: dict[Target, Answer]) -> tuple[Target, dict[Target, Verdict]]:
        """Send the next probe to the target that the node chooses. A silent target takes 0.2 s."""
        chosen = self.liveness.next(self.probed_s)
        assert chosen is not None
        due_s, target = chosen
        self.now_s = self.probed_s = max(self.now_s, due_s)
        if answers[target].kind == "silent":
            self.now_s += 0.2
        return target, self.record_answer(target, answers[target])


def test_one_good_answer_is_enough_at_first() -> None:
    assert Node(A).record_answer(A, GOOD) == {A: "up"}


def test_no_local_endpoints_is_unready_at_once() -> None:
    node = Node(A)
    node.record_answer(A, GOOD)
    assert node.record_answer(A, NONE_LOCAL) == {A: "unready"}
    assert node.record_answer(A, GOOD) == {A: "up"}


def test_the_first_bad_answers_give_no_verdict_at_once() -> None:
    node = Node(A)
    assert [
        node.record_answer(A, answer) for answer in (NONE_LOCAL, REFUSED, NONE_LOCAL, REFUSED)
    ] == [{}] * 4
    assert node.record_answer(A, GOOD) == {A: "up"}
    node = Node(A)
    assert [node.record_answer(A, NONE_LOCAL) for _ in range(5)] == [{}, {}, {}, {}, {A: "unready"}]


def test_a_probe_that_was_not_sent_is_reported_only_without_an_earlier_verdict() -> None:
    node = Node(A, B)
    node.record_answer(A, GOOD)
    assert dict(node.liveness.probe_not_sent(A, node.now_s)) == {}
    assert dict(node.liveness.probe_not_sent(B, node.now_s)) == {B: "probe_failed"}
    assert node.record_answer(B, GOOD) == {B: "up"}


def test_weight_zero_is_unready_even_with_200() -> None:
    node = Node(A)
    node.record_answer(A, GOOD)
    assert node.record_answer(A, Answer("answered", 200, 0, False)) == {A: "unready"}


def test_empty_200_proves_nothing_on_a_health_check_node_port() -> None:
    node = Node(A, local=True)
    node.record_answer(A, GOOD)
    assert node.record_answer(A, EMPTY) == {A: "unready"}
    assert Node(A, local=False).record_answer(A, EMPTY) == {A: "up"}


def test_older_proxies_send_a_body_and_no_weight() -> None:
    assert Node(A).record_answer(A, Answer("answered", 200, None, False)) == {A: "up"}


def test_two_refusals_in_a_row_make_a_target_unready() -> None:
    node = Node(A)
    node.record_answer(A, GOOD)
    assert node.record_answer(A, REFUSED) == {}
    assert node.record_answer(A, GOOD) == {}
    assert node.record_answer(A, REFUSED) == {}
    assert node.record_answer(A, REFUSED) == {A: "unready"}


def test_two_silences_in_a_row_take_the_whole_node_down() -> None:
    node = Node(A, B, C)
    for target in (A, B, C):
        node.record_answer(target, GOOD)
    assert node.record_answer(A, SILENT) == {}
    assert node.record_answer(B, SILENT) == {A: "down", B: "down", C: "down"}


def test_new_targets_of_a_dead_node_are_down_with_their_first_silence() -> None:
    node = Node(A)
    node.record_answer(A, SILENT)
    node.record_answer(A, SILENT)
    node.liveness.add(B, local=True)
    assert node.record_answer(B, SILENT) == {B: "down"}


def test_a_silent_target_does_not_take_down_a_node_that_answers_elsewhere() -> None:
    node = Node(A, B)
    node.record_answer(A, GOOD)
    node.record_answer(B, GOOD)
    for _ in range(5):
        node.record_answer(A, SILENT)
        node.record_answer(B, GOOD)
    assert node.liveness.verdict(A) == "unready"
    assert node.liveness.verdict(B) == "up"


def test_two_hanging_targets_do_not_make_a_live_node_flap() -> None:
    node = Node(A, B, C)
    answers = {A: SILENT, B: SILENT, C: GOOD}
    for _ in range(30):
        node.turn(answers)
    settled = [changes for _ in range(60) for changes in [node.turn(answers)[1]] if changes]
    assert settled == []
    assert [node.liveness.verdict(target) for target in (A, B, C)] == ["unready", "unready", "up"]


def test_a_node_is_up_again_after_two_good_answers_an_interval_apart() -> None:
    node = Node(A)
    node.record_answer(A, GOOD)
    node.record_answer(A, SILENT)
    node.record_answer(A, SILENT)
    assert node.record_answer(A, GOOD) == {}
    first_s = node.now_s
    node.probed_s = first_s
    assert node.turn({A: GOOD}) == (A, {A: "up"})
    assert node.now_s >= first_s + INTERVAL_S


def test_all_targets_are_probed_as_soon_as_a_node_answers_again() -> None:
    node = Node(A, B, C)
    silent, good = dict.fromkeys((A, B, C), SILENT), dict.fromkeys((A, B, C), GOOD)
    for _ in range(3):
        node.turn(silent)
    assert {node.liveness.verdict(target) for target in (A, B, C)} == {"down"}
    probed = [node.turn(good)[0] for _ in range(3)]
    assert set(probed) == {A, B, C}
    for _ in range(3):
        node.turn(good)
    assert {node.liveness.verdict(target) for target in (A, B, C)} == {"up"}


def test_a_new_target_is_probed_next_and_soon() -> None:
    node = Node(A, B)
    for _ in range(4):
        node.turn({A: GOOD, B: GOOD})
    node.liveness.add(C, local=True)
    turn = node.liveness.next(node.probed_s)
    assert turn is not None
    due_s, target = turn
    assert target == C
    assert due_s < node.probed_s + INTERVAL_S


def test_targets_are_probed_in_rotation() -> None:
    node = Node(A, B, C)
    answers = dict.fromkeys((A, B, C), GOOD)
    for _ in range(3):
        node.turn(answers)
    start_s = node.now_s
    assert [node.turn(answers)[0] for _ in range(6)] == [A, B, C, A, B, C]
    assert node.now_s - start_s >= 5 * INTERVAL_S


def test_the_answer_of_a_removed_target_is_ignored() -> None:
    node = Node(A, B)
    node.liveness.probe_started(A)
    node.liveness.remove(A)
    assert dict(node.liveness.evaluate(A, GOOD, 0.0)) == {}
    assert node.liveness.next(0.0) is not None
    node.liveness.remove(B)
    assert node.liveness.next(0.0) is None


def test_a_dead_node_with_many_services_is_detected_soon() -> None:
    targets = [Target("192.0.2.1", 30000 + number, "/healthz") for number in range(500)]
    node = Node(*targets)
    good, silent = dict.fromkeys(targets, GOOD), dict.fromkeys(targets, SILENT)
    for _ in targets:
        node.turn(good)
    died_s = node.now_s
    while node.liveness.verdict(targets[0]) != "down":
        node.turn(silent)
    assert node.now_s - died_s <= 0.5 + 1e-9
    assert {node.liveness.verdict(target) for target in targets} == {"down"}


ANSWERS = st.sampled_from([GOOD, NONE_LOCAL, EMPTY, REFUSED, SILENT])


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), ANSWERS), max_size=60),
    st.dictionaries(st.sampled_from([A, B, C]), ANSWERS),
)
def test_after_any_history_verdicts_settle_on_the_actual_state(
    before: list[tuple[Target, Answer]], partial: dict[Target, Answer]
) -> None:
    node = Node(A, B, C)
    for target, answer in before:
        node.record_answer(target, answer)
    truth = {target: partial.get(target, GOOD) for target in (A, B, C)}
    for _ in range(60):
        node.turn(truth)
    if all(answer is SILENT for answer in truth.values()):
        expected: dict[Target, Verdict] = dict.fromkeys(truth, "down")
    else:
        expected = {
            target: "up" if answer is GOOD else "unready" for target, answer in truth.items()
        }
    assert {target: node.liveness.verdict(target) for target in truth} == expected


def fail_node(node: Node) -> None:
    """Let the node be silent until it is down."""
    node.record_answer(A, SILENT)
    node.record_answer(A, SILENT)
    assert node.liveness.verdict(A) == "down"


def recovery_s(node: Node) -> float:
    """Return the time for which a node must give good answers until it is up. Check that each
    verdict is reported once meanwhile."""
    began_s = node.now_s
    verdicts: list[Verdict] = []
    while node.liveness.verdict(A) != "up":
        verdicts += node.turn({A: GOOD})[1].values()
    assert verdicts in (["up"], ["flapping", "up"])
    return node.now_s - began_s


def test_a_node_that_fails_repeatedly_waits_longer_each_time() -> None:
    node = Node(A)
    node.record_answer(A, GOOD)
    # Earlier failures are long ago.
    node.now_s += 3600
    waits_s = []
    for _ in range(9):
        fail_node(node)
        waits_s.append(recovery_s(node))
    assert waits_s[0] <= 2 * INTERVAL_S + 1e-9
    assert [round(each) for each in waits_s[1:]] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_earlier_failures_are_forgotten_after_a_stable_time() -> None:
    node = Node(A)
    for _ in range(5):
        node.record_answer(A, GOOD)
        fail_node(node)
        recovery_s(node)
    node.now_s += 60
    fail_node(node)
    assert recovery_s(node) <= 2 * INTERVAL_S + 1e-9


def test_a_flapping_node_is_down_as_soon_as_any_other() -> None:
    node = Node(A)
    for _ in range(4):
        node.record_answer(A, GOOD)
        fail_node(node)
        recovery_s(node)
    assert [node.record_answer(A, SILENT), node.record_answer(A, SILENT)] == [{}, {A: "down"}]


def test_a_bad_answer_restarts_the_waiting_time_of_a_flapping_node() -> None:
    node = Node(A)
    node.record_answer(A, GOOD)
    for _ in range(3):
        fail_node(node)
        recovery_s(node)
    fail_node(node)
    for _ in range(15):
        node.turn({A: GOOD})
    assert node.liveness.verdict(A) == "flapping"
    node.turn({A: Answer("answered", 500)})
    assert node.liveness.verdict(A) == "unready"
    assert recovery_s(node) >= 4 - 1e-9


def test_changes_of_pods_do_not_count_as_failures_of_the_node() -> None:
    node = Node(A)
    for _ in range(10):
        assert node.record_answer(A, GOOD) == {A: "up"}
        assert node.record_answer(A, NONE_LOCAL) == ({A: "unready"})


def test_one_of_many_targets_is_probed_several_times_in_a_row() -> None:
    targets = [Target("192.0.2.1", 30000 + number, "/healthz") for number in range(20)]
    node = Node(*targets)
    good = dict.fromkeys(targets, GOOD)
    for _ in targets:
        node.turn(good)
    probed = [node.turn(good)[0] for _ in range(20 * PROBES_IN_A_ROW)]
    assert {probed.count(target) for target in targets} <= {
        PROBES_IN_A_ROW - 1,
        PROBES_IN_A_ROW,
        PROBES_IN_A_ROW + 1,
    }
    # The number of changes of the probed target.
    assert sum(one != other for one, other in pairwise(probed)) <= 20


def test_an_unready_target_of_many_gets_every_second_probe() -> None:
    targets = [Target("192.0.2.1", 30000 + number, "/healthz") for number in range(100)]
    node = Node(*targets)
    answers = dict.fromkeys(targets, GOOD) | {targets[7]: NONE_LOCAL}
    for _ in range(110):
        node.turn(answers)
    assert node.liveness.verdict(targets[7]) == "unready"
    assert 9 <= [node.turn(answers)[0] for _ in range(20)].count(targets[7]) <= 11
    began_s, answers[targets[7]] = node.now_s, GOOD
    while node.liveness.verdict(targets[7]) != "up":
        node.turn(answers)
    assert node.now_s - began_s <= 2 * INTERVAL_S + 1e-9
    assert [node.turn(answers)[0] for _ in range(20)].count(targets[7]) <= PROBES_IN_A_ROW


def test_a_hanging_target_of_many_does_not_delay_the_detection_of_a_dead_node() -> None:
    targets = [Target("192.0.2.1", 30000 + number, "/healthz") for number in range(50)]
    node = Node(*targets)
    answers = dict.fromkeys(targets, GOOD) | {targets[3]: SILENT}
    for _ in range(200):
        node.turn(answers)
    assert node.liveness.verdict(targets[3]) == "unready"
    assert node.liveness.verdict(targets[4]) == "up"
    died_s = node.now_s
    while node.liveness.verdict(targets[4]) != "down":
        node.turn(dict.fromkeys(targets, SILENT))
    assert node.now_s - died_s <= 5 * 0.2 + 1e-9


def test_a_machine_that_a_check_finds_dead_is_down_at_once_and_returns_as_usual() -> None:
    node = Node(A, B)
    for target in (A, B):
        node.record_answer(target, GOOD)
    assert dict(node.liveness.machine_dead(node.now_s)) == {A: "down", B: "down"}
    assert node.liveness.to_check(A) == ()
    changes: dict[Target, Verdict] = {}
    while len(changes) < 2:
        changes |= node.turn({A: GOOD, B: GOOD})[1]
    assert changes == {A: "up", B: "up"}


def test_only_a_target_that_answered_its_last_probe_starts_a_check() -> None:
    node = Node(A, B)
    assert node.liveness.to_check(A) == ()
    node.record_answer(A, GOOD)
    node.record_answer(B, GOOD)
    assert node.liveness.to_check(A) == (B, A)
    node.record_answer(A, SILENT)
    assert node.liveness.to_check(A) == ()
    assert node.liveness.to_check(B) == (A, B)


def test_many_targets_of_a_machine_that_is_back_are_up_within_a_few_intervals() -> None:
    targets = [Target("192.0.2.1", port, "/healthz") for port in range(30000, 30100)]
    node = Node(*targets)
    for target in targets:
        node.record_answer(target, GOOD)
    assert len(node.liveness.machine_dead(node.now_s)) == len(targets)
    began_s, up = node.now_s, set[Target]()
    while len(up) < len(targets):
        up |= node.turn(dict.fromkeys(targets, GOOD))[1].keys()
    assert node.now_s - began_s < 30 * INTERVAL_S
