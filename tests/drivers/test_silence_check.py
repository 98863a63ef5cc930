"""Checks of machines by real handshakes: a machine whose link is down, and ports of this host whose
process hangs or is gone. The time is that of the test."""

import socket
import subprocess

import pytest
from tests.drivers.inside import run_inside
from tests.drivers.test_monitor import two_namespaces

from fairlead.drivers.liveness import Target
from fairlead.drivers.silence import DEAD_AFTER, HANDSHAKES_AFTER, Silence
from fairlead.drivers.silence_check import Result, SilenceCheck

TIMEOUT_S = 1.0
STEP_S = 0.05
FIRST_S = HANDSHAKES_AFTER[0] * TIMEOUT_S


def results(targets: list[Target]) -> list[Result]:
    """Check the machine until there is a result, in steps of STEP_S. Return the result of each
    step."""
    check = SilenceCheck(Silence(0.0, TIMEOUT_S, FIRST_S), targets, 0)
    found: list[Result] = []
    try:
        while not found or found[-1] == "waiting":
            found.append(check.step(FIRST_S + len(found) * STEP_S))
    finally:
        check.close()
    return found


@pytest.mark.root
@pytest.mark.parametrize("address", ["192.0.2.2", "2001:db8::2"])
def test_a_machine_without_a_link_is_dead(address: str) -> None:
    async def check() -> None:
        found = results([Target(address, 30001, "/"), Target(address, 30002, "/")])
        assert found[-1] == "dead"
        assert len(found) * STEP_S >= (DEAD_AFTER - HANDSHAKES_AFTER[0]) * TIMEOUT_S

    with two_namespaces() as (gateway, node):
        subprocess.run(["ip", "-n", node, "link", "set", "up0", "down"], check=True)
        run_inside(gateway, check)


def test_a_process_that_hangs_does_not_make_its_machine_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        assert results([Target("127.0.0.1", hanging.getsockname()[1], "/")]) == ["waiting", "alive"]


def test_a_machine_that_refuses_connections_is_alive() -> None:
    with socket.socket() as bound:  # no process listens
        bound.bind(("127.0.0.1", 0))
        assert results([Target("127.0.0.1", bound.getsockname()[1], "/")]) == ["waiting", "alive"]


def test_a_closed_port_does_not_make_a_machine_dead_that_answers_on_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        answering = Target("127.0.0.1", hanging.getsockname()[1], "/")
        # The queue of this port is full, so the kernel drops further attempts to connect.
        with socket.create_server(("127.0.0.2", 0), backlog=0) as full:
            silent = Target("127.0.0.2", full.getsockname()[1], "/")
            with socket.create_connection(full.getsockname()):
                found = results([silent, answering])
    assert found[-1] == "alive"
    assert len(found) > 2
