"""The conditions in the status of a Service.

In: the planned LoadBalancer, if any, and its Outcome. Out: three conditions in the style of the
Gateway API. Accepted is False if the request cannot be fulfilled. Programmed is False if it is not
carried out, or only in part. Ready is False if it is carried out, but no client can connect: no
endpoint can answer, or no gateway serves the Service. If some gateways serve it, Ready is True with
the reason that concerns the others, as Accepted of a Gateway is True with ListenersNotValid.
Invariant: pure; a condition does not change while its cause lasts. Services have no generation, so
the conditions have no observedGeneration. Follows the API conventions, section "Typical status
properties"."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from fairlead.model import Finding, LoadBalancer, Outcome, Value
from fairlead.plan.gateways import PARTLY_SERVED

ACCEPTED = "fairlead.io/Accepted"
PROGRAMMED = "fairlead.io/Programmed"
READY = "fairlead.io/Ready"
CONDITION_TYPES = (ACCEPTED, PROGRAMMED, READY)

REFUSED, PENDING, UNAVAILABLE = "Refused", "Pending", "Unavailable"
"""Reasons of conditions that are False, if the outcome has no reason."""

MAX_MESSAGE_LENGTH = 32_768
"""The maximum length of the message of a condition in the Kubernetes API."""

ConditionStatus = Literal["True", "False", "Unknown"]


class ServiceCondition(Value, frozen=True):
    """A condition of a Service, without its transition time."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def conditions_of(
    intent: LoadBalancer | None, outcome: Outcome, still_served: Sequence[str]
) -> tuple[ServiceCondition, ...]:
    """Return the conditions of a Service of Fairlead. `still_served`: the addresses and ports that
    both its status and its spec have. They stay in service while the Service is refused or
    waits."""
    return tuple(
        msgspec.structs.replace(each, message=each.message[:MAX_MESSAGE_LENGTH])
        if len(each.message) > MAX_MESSAGE_LENGTH
        else each
        for each in _conditions(intent, outcome, still_served)
    )


def _conditions(
    intent: LoadBalancer | None, outcome: Outcome, still_served: Sequence[str]
) -> tuple[ServiceCondition, ...]:
    if intent is not None and outcome.state == "done":
        return _done(intent)
    if outcome.state == "refused":
        accepted = ServiceCondition(ACCEPTED, "False", outcome.reason or REFUSED, outcome.message)
        reason = REFUSED
    else:
        accepted = ServiceCondition(ACCEPTED, "True", "Accepted", "")
        reason = outcome.reason or (PENDING if outcome.state == "waiting" else UNAVAILABLE)
    if still_served:
        before = f"still served on {', '.join(still_served)} as before: {outcome.message}"
        return (
            accepted,
            ServiceCondition(PROGRAMMED, "False", reason, before),
            ServiceCondition(READY, "Unknown", reason, before),
        )
    return (
        accepted,
        *(
            ServiceCondition(type_, "False", reason, outcome.message)
            for type_ in (PROGRAMMED, READY)
        ),
    )


def _done(intent: LoadBalancer) -> tuple[ServiceCondition, ...]:
    where = f"served on {', '.join(intent.addresses)}"
    # If no port is served, no client can connect: what blocks Programmed blocks Ready too.
    blocking = "Ready" if intent.listeners or not intent.unserved_ports else "Programmed"
    unblocking = [note for note in intent.notes if not note.blocks]
    elsewhere = [note for note in unblocking if note.code in PARTLY_SERVED]
    return (
        ServiceCondition(
            ACCEPTED,
            "True",
            "Accepted",
            _joined(note for note in unblocking if note not in elsewhere),
        ),
        _condition(
            PROGRAMMED,
            "Programmed",
            where,
            [note for note in intent.notes if note.blocks == "Programmed"],
        ),
        _condition(
            READY,
            elsewhere[0].code if elsewhere else "EndpointsReady",
            "; ".join([where, *map(str, elsewhere)]),
            [note for note in intent.notes if note.blocks == blocking],
        ),
    )


def _condition(
    type_: str, reason: str, where: str, blocking: Sequence[Finding]
) -> ServiceCondition:
    if not blocking:
        return ServiceCondition(type_, "True", reason, where)
    return ServiceCondition(type_, "False", blocking[0].code, _joined(blocking))


def _joined(notes: Iterable[Finding]) -> str:
    return "; ".join(map(str, notes))
