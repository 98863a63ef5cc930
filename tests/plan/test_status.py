"""Conditions from outcomes."""

import msgspec
import pytest

from fairlead.model import DONE, Finding, LoadBalancer, Outcome, ServiceKey, UnservedPort
from fairlead.plan.status import CONDITION_TYPES, conditions_of


def balancer(*notes: Finding) -> LoadBalancer:
    return LoadBalancer(
        ServiceKey("default", "web"), "uid", "fairlead.io/direct", ("203.0.113.1",), (), notes=notes
    )


PORT = Finding("PortConflict", "port 80 is another's; use another one", blocks="Programmed")
NOBODY = Finding("NoReadyEndpoints", "nobody is ready; look at the pods", blocks="Ready")
WORD = Finding("LoadBalancerSourceRanges", "pods are in no range; add them")
FALSE, UNKNOWN = "False", "Unknown"

ROWS: dict[str, tuple[LoadBalancer | None, Outcome, tuple[str, ...], tuple[str, str, str]]] = {
    "all is well": (
        balancer(),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "True/EndpointsReady"),
    ),
    "a word to the owner": (
        balancer(WORD),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "True/EndpointsReady"),
    ),
    "partly served": (
        balancer(PORT),
        DONE,
        (),
        ("True/Accepted", "False/PortConflict", "True/EndpointsReady"),
    ),
    "nobody answers": (
        balancer(NOBODY),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "False/NoReadyEndpoints"),
    ),
    "no port is served": (
        msgspec.structs.replace(
            balancer(PORT), unserved_ports=(UnservedPort(80, "TCP", "fairlead.io/PortConflict"),)
        ),
        DONE,
        (),
        ("True/Accepted", "False/PortConflict", "False/PortConflict"),
    ),
    "refused": (
        None,
        Outcome("refused", "no"),
        (),
        ("False/Refused", "False/Refused", "False/Refused"),
    ),
    "refused, but served before": (
        None,
        Outcome("refused", "no"),
        ("203.0.113.1",),
        ("False/Refused", "False/Refused", "Unknown/Refused"),
    ),
    "refused by a driver that knows why": (
        balancer(),
        Outcome("refused", "no", reason="PortTaken"),
        (),
        ("False/PortTaken", "False/Refused", "False/Refused"),
    ),
    "to be tried again": (
        balancer(),
        Outcome("unavailable", "away"),
        (),
        ("True/Accepted", "False/Unavailable", "False/Unavailable"),
    ),
    "on its way": (
        balancer(),
        Outcome("waiting", "soon"),
        (),
        ("True/Accepted", "False/Pending", "False/Pending"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_conditions(name: str) -> None:
    intent, outcome, shown, expected = ROWS[name]
    found = conditions_of(intent, outcome, shown)
    assert tuple(each.type for each in found) == CONDITION_TYPES
    assert tuple(f"{each.status}/{each.reason}" for each in found) == expected
    assert all(each.message for each in found if each.status != "True"), (
        "a condition that is not true says why"
    )


def test_messages_say_what_to_do() -> None:
    accepted, programmed, ready = conditions_of(balancer(WORD, PORT, NOBODY), DONE, ())
    assert (accepted.message, programmed.message, ready.message) == (
        WORD.message,
        PORT.message,
        NOBODY.message,
    )


def test_what_goes_on_as_before_is_said() -> None:
    _, programmed, ready = conditions_of(
        None, Outcome("refused", "no such pool; name another"), ("203.0.113.1",)
    )
    assert programmed.message == "still served on 203.0.113.1 as before: no such pool; name another"
    assert ready.message == programmed.message
