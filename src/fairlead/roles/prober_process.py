"""The process that probes for a gateway: `main` with the arguments INTERVAL, TIMEOUT and MARK,
started by `drivers/prober`.

In: the health ports to probe, on a socket that is its standard input. Out: their verdicts, on the
same socket. It sends thousands of probes per second. As a separate process, no probe waits for a
plan, and no event waits for a probe. Invariant: it does not outlive the gateway. When the other end
of the socket is closed, for any reason, it ends."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence

import msgspec

from fairlead.drivers.monitor import Monitor
from fairlead.drivers.probe_protocol import ProbeReport, ProbeRequest, VerdictChange
from fairlead.model import ServiceKey, Verdict
from fairlead.net.frames import read, write
from fairlead.roles.small_process import small_process
from fairlead.telemetry import configure_logging

NICENESS = 5
"""The niceness of this process relative to the gateway. If both need the same CPU, the gateway's
handling of an event has priority over probes. A probe that is late because of this process itself
does not count as a failure of the node."""
FREEZE_GROWTH = 1.1
"""The garbage collector is frozen again only when the number of targets has grown by this factor,
because a start adds them in many parts."""


def command(interval_s: float, timeout_s: float, mark: int = 0) -> Sequence[str]:
    """The command that starts this process. `mark`: see `Monitor`."""
    return small_process(__name__, str(interval_s), str(timeout_s), str(mark))


class Reports:
    """The reports to the gateway, collected during each step of the event loop."""

    def __init__(self, stream: asyncio.StreamWriter, settled: Callable[[], bool]) -> None:
        """`settled`: returns whether there is a verdict for every target."""
        self._stream = stream
        self._settled = settled
        self._changes: list[VerdictChange] = []
        self._due = False
        self.requests = 0

    def observe(
        self,
        address: str,
        port: int,
        verdict: Verdict | None,
        services: Collection[ServiceKey],
        routed: bool,
    ) -> None:
        """Report a verdict; see `monitor`."""
        self._changes.append(VerdictChange(address, port, verdict, tuple(services), routed))
        self.schedule()

    def schedule(self) -> None:
        """Schedule a report."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        changes, self._changes, self._due = tuple(self._changes), [], False
        write(self._stream, ProbeReport(self.requests, self._settled(), changes))


async def serve(interval_s: float, timeout_s: float, mark: int) -> None:
    """Probe until the gateway has ended."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=sys.stdin.fileno()))
    reports = Reports(writer, lambda: monitor.all_decided)
    monitor = Monitor(reports.observe, interval_s=interval_s, timeout_s=timeout_s, mark=mark)
    decoder, frozen = msgspec.msgpack.Decoder(ProbeRequest), 0
    async with asyncio.TaskGroup() as group:
        running = group.create_task(monitor.run())
        reports.schedule()  # The first report shows that this process is ready.
        while (request := await read(reader, decoder)) is not None:
            monitor.change(request.starts, request.stops)
            reports.requests += 1
            reports.schedule()
            if monitor.targets > FREEZE_GROWTH * frozen:
                frozen = monitor.targets
                # Otherwise the garbage collector would traverse up to a hundred thousand targets
                # repeatedly.
                gc.freeze()
        running.cancel()


def main() -> None:
    # A signal from a terminal is for the gateway, which ends this process when it is ready.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    configure_logging()
    asyncio.run(serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
