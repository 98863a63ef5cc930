"""The Event about nodes that send packets of a Service back."""

import asyncio

import pytest
from tests.drivers.direct.conftest import SERVICE, a_forwarder, tcp

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.maps.pins import OBJECT
from fairlead.kube.events import MAX_MESSAGE_LENGTH, RECOVERED
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta
from fairlead.model import ServiceKey
from fairlead.net.elf import read_object
from fairlead.roles.returned import (
    PACKETS_RETURNED,
    REMIND_AFTER,
    WARN_AFTER,
    Returned,
    message,
    watch_returned,
)
from fairlead.state import State

WEB, DNS = ServiceKey("default", "web"), ServiceKey("default", "dns")


def test_a_service_is_reported_once_packets_have_been_returned_for_a_while() -> None:
    returned = Returned({WEB: 7, DNS: 5}, {"node1": 12})
    for check in range(1, WARN_AFTER):
        assert returned.check({WEB: 7 + check, DNS: 5}, {"node1": 12 + check}) == ([], ["node1"])
    assert returned.check({WEB: 20, DNS: 6}, {"node1": 20, "node2": 1}) == (
        [WEB],
        ["node1", "node2"],
    )
    assert returned.check({WEB: 21, DNS: 7}, {"node1": 22, "node2": 1}) == ([], ["node1"])


def test_packets_returned_for_a_moment_are_not_reported() -> None:
    returned = Returned({}, {})
    for check in range(20):
        assert returned.check({WEB: check // 2}, {"node1": check // 2})[0] == []


def test_returned_packets_that_last_are_reported_again() -> None:
    returned = Returned({}, {})
    reported = [
        check
        for check in range(1, 2 * REMIND_AFTER)
        if returned.check({WEB: check}, {"node1": check})[0]
    ]
    assert reported == [WARN_AFTER, REMIND_AFTER + WARN_AFTER]


def test_the_end_of_returned_packets_is_reported_once() -> None:
    returned = Returned({}, {})
    counts, over = [1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5], []
    for count in counts:
        returned.check({WEB: count}, {"node1": count})
        over.append(returned.over())
    assert over == [[], [], [], [], [], [], [WEB], [], [], [], [], []]


def test_the_message_names_the_checks_for_any_number_of_nodes() -> None:
    """Many nodes send packets back if the Service has another service proxy, and no node is named
    if the last one is gone."""
    many = message("gw1", [f"worker-{i:03}.rack-7.example.net" for i in range(100)])
    assert "worker-004.rack-7.example.net and 95 more came back" in many
    assert "service.kubernetes.io/service-proxy-name" in many[:MAX_MESSAGE_LENGTH]
    assert "packets that were sent to nodes came back" in message("gw1", [])


class EventLog:
    """A recorder that stores its Events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        assert (key, uid, kind) == (SERVICE, "uid", "Normal" if reason == RECOVERED else "Warning")
        self.events.append((reason, message))


@pytest.mark.root
async def test_the_event_names_the_nodes_that_send_packets_back() -> None:
    """The counters are those of the kernel, for packets that have passed a gateway."""
    log, state = EventLog(), State(())
    state.update_services(
        {ObjectKey(*SERVICE): Service(ServiceMeta(name="web", namespace="default", uid="uid"))}
    )
    events = read_object(OBJECT).types.enumerators("event")
    with a_forwarder(fast=False) as forwarder:
        forwarder.serve({"node1": 1})
        forwarder.run(tcp())
        watching = asyncio.create_task(
            watch_returned(
                lambda: Counters(forwarder.tables, forwarder.maps, events),
                state,
                log,
                "gw1",
                check_interval_s=0.01,
            )
        )
        async with asyncio.timeout(30):
            while not log.events:
                forwarder.run(tcp(hops=14))
                await asyncio.sleep(0.001)
            while len(log.events) < 2:
                await asyncio.sleep(0.001)
        watching.cancel()
    (reason, message), recovered = log.events
    assert reason == PACKETS_RETURNED
    assert recovered == (
        RECOVERED,
        "gateway gw1: PacketsReturned no longer holds, after less than a minute",
    )
    assert "gateway gw1: packets that were sent to node1 came back" in message
