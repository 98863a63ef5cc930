"""What the answers of a node's health ports prove about it."""

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
    """A NodeLiveness with a clock: `hear` gives an answer to a target and returns what changed."""

    def __init__(self, *targets: Target, local: bool = True) -> None:
        self.liveness = NodeLiveness(INTERVAL_S)
        self.now_s = 100.0
        self.asked_s = float("-inf")
        for target in targets:
            self.liveness.add(target, local=local)

    def hear(self, target: Target, answer: Answer) -> dict[Target, Verdict]:
        self.liveness.probe_started(target)
        return dict(self.liveness.evaluate(target, answer, self.now_s))

    def turn(self, answers: dict[Target, Answer]) -> tuple[Target, dict[Target, Verdict]]:
        """Let the node choose whom to ask; a silent one costs 0.2 s."""
        chosen = self.liveness.next(self.asked_s)
        assert chosen is not None
        due_s, target = chosen
        self.now_s = self.asked_s = max(self.now_s, due_s)
        if answers[target].kind == "silent":
            self.now_s += 0.2
        return target, self.hear(target, answers[target])


def test_one_good_answer_is_enough_at_first() -> None:
    assert Node(A).hear(A, GOOD) == {A: "up"}


def test_no_local_endpoints_is_unready_at_once() -> None:
    node = Node(A)
    node.hear(A, GOOD)
    assert node.hear(A, NONE_LOCAL) == {A: "unready"}
    assert node.hear(A, GOOD) == {A: "up"}


def test_at_first_what_is_not_good_may_still_become_so() -> None:
    node = Node(A)
    assert [node.hear(A, answer) for answer in (NONE_LOCAL, REFUSED, NONE_LOCAL, REFUSED)] == [
        {}
    ] * 4
    assert node.hear(A, GOOD) == {A: "up"}
    node = Node(A)
    assert [node.hear(A, NONE_LOCAL) for _ in range(5)] == [{}, {}, {}, {}, {A: "unready"}]


def test_a_question_that_could_not_be_sent_is_said_only_where_nothing_was_proved() -> None:
    node = Node(A, B)
    node.hear(A, GOOD)
    assert dict(node.liveness.probe_not_sent(A, node.now_s)) == {}
    assert dict(node.liveness.probe_not_sent(B, node.now_s)) == {B: "probe_failed"}
    assert node.hear(B, GOOD) == {B: "up"}


def test_weight_zero_is_unready_even_with_200() -> None:
    node = Node(A)
    node.hear(A, GOOD)
    assert node.hear(A, Answer("answered", 200, 0, False)) == {A: "unready"}


def test_empty_200_proves_nothing_on_a_health_check_node_port() -> None:
    node = Node(A, local=True)
    node.hear(A, GOOD)
    assert node.hear(A, EMPTY) == {A: "unready"}
    assert Node(A, local=False).hear(A, EMPTY) == {A: "up"}


def test_older_proxies_send_a_body_and_no_weight() -> None:
    assert Node(A).hear(A, Answer("answered", 200, None, False)) == {A: "up"}


def test_refusal_needs_two() -> None:
    node = Node(A)
    node.hear(A, GOOD)
    assert node.hear(A, REFUSED) == {}
    assert node.hear(A, GOOD) == {}
    assert node.hear(A, REFUSED) == {}
    assert node.hear(A, REFUSED) == {A: "unready"}


def test_two_silences_in_a_row_take_the_whole_node_down() -> None:
    node = Node(A, B, C)
    for target in (A, B, C):
        node.hear(target, GOOD)
    assert node.hear(A, SILENT) == {}
    assert node.hear(B, SILENT) == {A: "down", B: "down", C: "down"}


def test_new_targets_of_a_dead_node_are_down_with_their_first_silence() -> None:
    node = Node(A)
    node.hear(A, SILENT)
    node.hear(A, SILENT)
    node.liveness.add(B, local=True)
    assert node.hear(B, SILENT) == {B: "down"}


def test_an_answer_in_between_clears_the_machine() -> None:
    node = Node(A, B)
    node.hear(A, GOOD)
    node.hear(B, GOOD)
    for _ in range(5):
        node.hear(A, SILENT)
        node.hear(B, GOOD)
    assert node.liveness.verdict(A) == "unready"
    assert node.liveness.verdict(B) == "up"


def test_two_hanging_targets_do_not_make_a_living_machine_flap() -> None:
    node = Node(A, B, C)
    answers = {A: SILENT, B: SILENT, C: GOOD}
    for _ in range(30):
        node.turn(answers)
    settled = [changes for _ in range(60) for changes in [node.turn(answers)[1]] if changes]
    assert settled == []
    assert [node.liveness.verdict(target) for target in (A, B, C)] == ["unready", "unready", "up"]


def test_back_from_down_takes_two_good_answers_an_interval_apart() -> None:
    node = Node(A)
    node.hear(A, GOOD)
    node.hear(A, SILENT)
    node.hear(A, SILENT)
    assert node.hear(A, GOOD) == {}
    first_s = node.now_s
    node.asked_s = first_s
    assert node.turn({A: GOOD}) == (A, {A: "up"})
    assert node.now_s >= first_s + INTERVAL_S


def test_the_other_targets_are_asked_as_soon_as_the_node_answers() -> None:
    node = Node(A, B, C)
    silent, good = dict.fromkeys((A, B, C), SILENT), dict.fromkeys((A, B, C), GOOD)
    for _ in range(3):
        node.turn(silent)
    assert {node.liveness.verdict(target) for target in (A, B, C)} == {"down"}
    asked = [node.turn(good)[0] for _ in range(3)]
    assert set(asked) == {A, B, C}
    for _ in range(3):
        node.turn(good)
    assert {node.liveness.verdict(target) for target in (A, B, C)} == {"up"}


def test_new_target_goes_ahead_of_the_rotation_and_soon() -> None:
    node = Node(A, B)
    for _ in range(4):
        node.turn({A: GOOD, B: GOOD})
    node.liveness.add(C, local=True)
    turn = node.liveness.next(node.asked_s)
    assert turn is not None
    due_s, target = turn
    assert target == C
    assert due_s < node.asked_s + INTERVAL_S


def test_rotation_asks_everybody_in_turn() -> None:
    node = Node(A, B, C)
    answers = dict.fromkeys((A, B, C), GOOD)
    for _ in range(3):
        node.turn(answers)
    start_s = node.now_s
    assert [node.turn(answers)[0] for _ in range(6)] == [A, B, C, A, B, C]
    assert node.now_s - start_s >= 5 * INTERVAL_S


def test_removed_while_asked() -> None:
    node = Node(A, B)
    node.liveness.probe_started(A)
    node.liveness.remove(A)
    assert dict(node.liveness.evaluate(A, GOOD, 0.0)) == {}
    assert node.liveness.next(0.0) is not None
    node.liveness.remove(B)
    assert node.liveness.next(0.0) is None


def test_dead_node_is_known_soon_however_many_services() -> None:
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
def test_whatever_was_before_verdicts_settle_on_the_truth(
    before: list[tuple[Target, Answer]], partial: dict[Target, Answer]
) -> None:
    node = Node(A, B, C)
    for target, answer in before:
        node.hear(target, answer)
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


def fall(node: Node) -> None:
    """The machine falls silent, for long enough."""
    node.hear(A, SILENT)
    node.hear(A, SILENT)
    assert node.liveness.verdict(A) == "down"


def recovery_s(node: Node) -> float:
    """How long it has to answer well before it is up again; what is said of it meanwhile is said
    once."""
    began_s = node.now_s
    said: list[Verdict] = []
    while node.liveness.verdict(A) != "up":
        said += node.turn({A: GOOD})[1].values()
    assert said in (["up"], ["flapping", "up"])
    return node.now_s - began_s


def test_one_that_falls_again_and_again_waits_longer_each_time() -> None:
    node = Node(A)
    node.hear(A, GOOD)
    node.now_s += 3600  # whatever was long ago
    waits_s = []
    for _ in range(9):
        fall(node)
        waits_s.append(recovery_s(node))
    assert waits_s[0] <= 2 * INTERVAL_S + 1e-9
    assert [round(each) for each in waits_s[1:]] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_after_a_quiet_time_its_past_is_forgotten() -> None:
    node = Node(A)
    for _ in range(5):
        node.hear(A, GOOD)
        fall(node)
        recovery_s(node)
    node.now_s += 60
    fall(node)
    assert recovery_s(node) <= 2 * INTERVAL_S + 1e-9


def test_a_flapping_one_is_taken_out_as_soon_as_any() -> None:
    node = Node(A)
    for _ in range(4):
        node.hear(A, GOOD)
        fall(node)
        recovery_s(node)
    assert [node.hear(A, SILENT), node.hear(A, SILENT)] == [{}, {A: "down"}]


def test_bad_answers_begin_the_trial_anew() -> None:
    node = Node(A)
    node.hear(A, GOOD)
    for _ in range(3):
        fall(node)
        recovery_s(node)
    fall(node)
    for _ in range(15):
        node.turn({A: GOOD})
    assert node.liveness.verdict(A) == "flapping"
    node.turn({A: Answer("answered", 500)})
    assert node.liveness.verdict(A) == "unready"
    assert recovery_s(node) >= 4 - 1e-9


def test_pods_that_come_and_go_are_no_fault_of_the_node() -> None:
    node = Node(A)
    for _ in range(10):
        assert node.hear(A, GOOD) == {A: "up"}
        assert node.hear(A, NONE_LOCAL) == ({A: "unready"})


def test_of_many_targets_one_stands_for_the_machine_for_a_while() -> None:
    targets = [Target("192.0.2.1", 30000 + number, "/healthz") for number in range(20)]
    node = Node(*targets)
    good = dict.fromkeys(targets, GOOD)
    for _ in targets:
        node.turn(good)
    asked = [node.turn(good)[0] for _ in range(20 * PROBES_IN_A_ROW)]
    assert {asked.count(target) for target in targets} <= {
        PROBES_IN_A_ROW - 1,
        PROBES_IN_A_ROW,
        PROBES_IN_A_ROW + 1,
    }
    assert sum(one != other for one, other in pairwise(asked)) <= 20  # so often another one


def test_of_many_targets_an_unwell_one_is_asked_every_other_time() -> None:
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


def test_among_many_targets_a_hanging_one_hides_no_death() -> None:
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
