"""The process that watches other gateways: its messages, what it loads, and what it cannot do.
tests/drivers/neighbors has its packets."""

import asyncio
import socket
import subprocess
from contextlib import suppress

import msgspec
import pytest
from structlog.testing import capture_logs

from fairlead.drivers.neighbors.protocol import Heard, WatchReport, WatchRequest
from fairlead.drivers.neighbors.watch import NeighborWatch
from fairlead.errors import Unavailable
from fairlead.net.frames import Frames, frame
from fairlead.roles.neighbor_process import Exchange, command

DEADLINE_S = 20.0
REPORTS = 2000
HEARD = (Heard("eth0", "02:00:00:00:00:01", "192.0.2.224"),) * 10
"""With `REPORTS`, more than a socket holds."""


def test_no_report_waits_for_a_gateway_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exchange = Exchange(theirs)
        for number in range(REPORTS):
            exchange.report(WatchReport((), HEARD, number))
        frames = Frames(msgspec.msgpack.Decoder(WatchReport))
        received: list[WatchReport] = []
        requests: list[WatchRequest] = []
        ours.setblocking(False)
        while len(received) < REPORTS:
            assert exchange.wait(requests.append, 0.001)
            with suppress(BlockingIOError):
                received += frames.take(ours.recv(1 << 20))
        assert received == [WatchReport((), HEARD, number) for number in range(REPORTS)]


def test_requests_are_processed_during_a_wait_that_ends_with_the_gateway() -> None:
    ours, theirs = socket.socketpair()
    received: list[WatchRequest] = []
    first, second = WatchRequest((), (), ("eth0",)), WatchRequest((), (), ("eth1",))
    with theirs:
        exchange = Exchange(theirs)
        sent = frame(first) + frame(second)
        ours.send(sent[:-1])
        assert exchange.wait(received.append, 0.01)
        assert received == [first]
        ours.send(sent[-1:])
        assert exchange.wait(received.append, 0.01)
        assert received == [first, second]
        ours.close()
        assert not exchange.wait(received.append, DEADLINE_S)
        exchange.report(WatchReport((), (), 0))
        assert not exchange.wait(received.append, DEADLINE_S)


def test_the_process_loads_no_event_loop_no_tls_and_no_logs() -> None:
    (*python, start) = command()
    shown = start.replace(
        "main()", "print(*(name for name, loaded in sys.modules.items() if loaded))"
    )
    ran = subprocess.run([*python, shown], check=True, capture_output=True, text=True)
    unwanted = {"asyncio", "ssl", "structlog", "logging", "inspect"}
    assert not unwanted & {*ran.stdout.split()}


@pytest.mark.root
async def test_the_gateway_says_why_no_other_gateway_is_watched() -> None:
    confined = ("setpriv", "--inh-caps", "-all", "--bounding-set", "-net_raw", *command())
    reports: list[WatchReport] = []

    async def observed(report: WatchReport) -> None:
        reports.append(report)

    with capture_logs() as logs:
        watch = NeighborWatch(confined, observed)
        watch.set(WatchRequest((), (), ("lo",)))
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(DEADLINE_S):
            while len(reports) < 2:
                await asyncio.sleep(0.01)
        running.cancel()
        with suppress(asyncio.CancelledError, Unavailable):
            await running
    (logged,) = logs
    assert logged["event"] == "other gateways are not watched"
    assert "with CAP_NET_RAW" in logged["problem"]
