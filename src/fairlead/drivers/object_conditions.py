"""The conditions in the status of an object of group `fairlead.io`, and the Events about them.

In: the conditions that the object shows, and the desired ones. Out: the conditions to write, and
for those that report a problem an Event when the problem begins and when it ends. Invariant:
`lastTransitionTime` of a condition is the time at which its status last changed."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime

from fairlead.kube.events import RECOVERED, rounded_duration
from fairlead.kube.objects import Condition
from fairlead.plan.object_status import HEALTHY_IF_TRUE, ObjectCondition


def same(shown: Collection[Condition], wanted: Collection[ObjectCondition]) -> bool:
    """Return whether an object shows exactly these conditions."""
    return set(map(_content, shown)) == set(map(_content, wanted))


def body_of(
    shown: Collection[Condition], wanted: Sequence[ObjectCondition], generation: int, now: str
) -> Sequence[dict[str, object]]:
    """Return the conditions to write, for an object of this generation. `now`: RFC 3339."""
    before = {each.type: each for each in shown}
    conditions = []
    for each in wanted:
        old = before.get(each.type)
        since = old.last_transition_time if old is not None and old.status == each.status else None
        conditions.append(
            {
                "type": each.type,
                "status": each.status,
                "reason": each.reason,
                "message": each.message,
                "lastTransitionTime": since or now,
                "observedGeneration": generation,
            }
        )
    return conditions


def report(
    event: Callable[[str, str, str], None],
    shown: Collection[Condition],
    wanted: Collection[ObjectCondition],
) -> None:
    """Record an Event for each problem that begins or ends when the conditions of an object change
    from `shown` to `wanted`. `event`: records an Event of this type, reason and message about it.
    """
    before = set(map(_content, shown))
    wrong = [each for each in wanted if _is_problem(each)]
    for each in wrong:
        if _content(each) not in before:
            event("Warning", each.reason, each.message)
    for old in shown:
        if _is_problem(old) and old.reason not in {each.reason for each in wrong}:
            passed = rounded_duration(old.last_transition_time or "", datetime.now(UTC))
            event("Normal", RECOVERED, f"{old.reason} no longer holds, after {passed}")


def _is_problem(condition: ObjectCondition | Condition) -> bool:
    return condition.status == ("False" if condition.type in HEALTHY_IF_TRUE else "True")


def _content(condition: ObjectCondition | Condition) -> tuple[str, str, str, str]:
    return condition.type, condition.status, condition.reason, condition.message
