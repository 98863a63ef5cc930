"""Conditions of a Service, computed from its plan and its outcome."""

import msgspec
import pytest

from fairlead.model import DONE, Finding, LoadBalancer, Outcome, ServiceKey, UnservedPort
from fairlead.plan.gateways import NOT_SERVED
from fairlead.plan.status import CONDITION_TYPES, conditions_of


def balancer(*notes: Finding) -> LoadBalancer:
    return LoadBalancer(
        ServiceKey("default", "web"), "uid", "fairlead.io/direct", ("203.0.113.1",), (), notes=notes
    )


PORT = Finding("PortConflict", "another Service has port 80; use another port", blocks="Programmed")
NO_ENDPOINTS = Finding("NoReadyEndpoints", "no endpoint is ready; check the pods", blocks="Ready")
ONE_GATEWAY = Finding(NOT_SERVED, "gateway gw2 cannot serve it: port 80 is in use")
RANGES = Finding("LoadBalancerSourceRanges", "no range contains the pods; add their range")

ROWS: dict[str, tuple[LoadBalancer | None, Outcome, tuple[str, ...], tuple[str, str, str]]] = {
    "served without findings": (
        balancer(),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "True/EndpointsReady"),
    ),
    "a finding that blocks no condition": (
        balancer(RANGES),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "True/EndpointsReady"),
    ),
    "a gateway of several does not serve it": (
        balancer(RANGES, ONE_GATEWAY),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "True/GatewayNotServing"),
    ),
    "a port conflict blocks Programmed": (
        balancer(PORT),
        DONE,
        (),
        ("True/Accepted", "False/PortConflict", "True/EndpointsReady"),
    ),
    "missing endpoints block Ready": (
        balancer(NO_ENDPOINTS),
        DONE,
        (),
        ("True/Accepted", "True/Programmed", "False/NoReadyEndpoints"),
    ),
    "a port conflict at the only port also blocks Ready": (
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
    "refused, but still served: Ready is Unknown": (
        None,
        Outcome("refused", "no"),
        ("203.0.113.1",),
        ("False/Refused", "False/Refused", "Unknown/Refused"),
    ),
    "refused by a driver with a reason of its own": (
        balancer(),
        Outcome("refused", "no", reason="PortTaken"),
        (),
        ("False/PortTaken", "False/Refused", "False/Refused"),
    ),
    "unavailable": (
        balancer(),
        Outcome("unavailable", "away"),
        (),
        ("True/Accepted", "False/Unavailable", "False/Unavailable"),
    ),
    "waiting": (
        balancer(),
        Outcome("waiting", "soon"),
        (),
        ("True/Accepted", "False/Pending", "False/Pending"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_conditions_of_a_service(name: str) -> None:
    intent, outcome, shown, expected = ROWS[name]
    found = conditions_of(intent, outcome, shown)
    assert tuple(each.type for each in found) == CONDITION_TYPES
    assert tuple(f"{each.status}/{each.reason}" for each in found) == expected
    assert all(each.message for each in found if each.status != "True"), (
        "a condition that is not True has a message"
    )


def test_the_message_of_a_condition_is_that_of_its_finding() -> None:
    accepted, programmed, ready = conditions_of(balancer(RANGES, PORT, NO_ENDPOINTS), DONE, ())
    assert (accepted.message, programmed.message, ready.message) == (
        RANGES.message,
        PORT.message,
        NO_ENDPOINTS.message,
    )


def test_a_ready_service_names_the_gateways_that_do_not_serve_it() -> None:
    accepted, _, ready = conditions_of(balancer(RANGES, ONE_GATEWAY), DONE, ())
    assert accepted.message == RANGES.message
    assert ready.message == f"served on 203.0.113.1; {ONE_GATEWAY.message}"


def test_the_conditions_of_a_refused_service_say_on_which_addresses_it_is_still_served() -> None:
    _, programmed, ready = conditions_of(
        None, Outcome("refused", "no such pool; name another"), ("203.0.113.1",)
    )
    assert programmed.message == "still served on 203.0.113.1 as before: no such pool; name another"
    assert ready.message == programmed.message
