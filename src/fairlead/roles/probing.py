"""The process that probes for a gateway: `python -m fairlead.roles.probing INTERVAL TIMEOUT MARK`,
started by `drivers/prober`.

In: which health ports to ask, on a socket that is its standard input. Out: their verdicts, on the
same. It asks thousands of times a second; beside the gateway and not in it, no probe waits for a
plan and no event for a probe. Invariant: it lives no longer than the gateway: when the other end of
the socket is closed, however that came about, it ends."""

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
from fairlead.telemetry import configure_logging

GIVE_WAY = 5
"""So much nicer it is than the gateway: where both want the same processor an event goes before
probes, which are thousands a second, and of which none that is late by our own doing is held
against a node."""
FREEZE_FROM = 1.1
"""By so much more targets make it worth while: a start asks for them in many parts."""


def command(interval_s: float, timeout_s: float, mark: int = 0) -> Sequence[str]:
    """The command that starts this process; Python loads no modules from the working directory.
    `mark`: see `Monitor`."""
    return (
        sys.executable,
        "-P",
        "-m",
        "fairlead.roles.probing",
        str(interval_s),
        str(timeout_s),
        str(mark),
    )


class Reports:
    """What is to be told, gathered in each step of the event loop."""

    def __init__(self, stream: asyncio.StreamWriter, settled: Callable[[], bool]) -> None:
        """`settled`: says whether something is known of every target."""
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
        """See `monitor`."""
        self._changes.append(VerdictChange(address, port, verdict, tuple(services), routed))
        self.tell()

    def tell(self) -> None:
        """Something is new."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        changes, self._changes, self._due = tuple(self._changes), [], False
        write(self._stream, ProbeReport(self.requests, self._settled(), changes))


async def serve(interval_s: float, timeout_s: float, mark: int) -> None:
    """Until the gateway is gone."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=sys.stdin.fileno()))
    reports = Reports(writer, lambda: monitor.all_decided)
    monitor = Monitor(reports.observe, interval_s=interval_s, timeout_s=timeout_s, mark=mark)
    decoder, frozen = msgspec.msgpack.Decoder(ProbeRequest), 0
    async with asyncio.TaskGroup() as group:
        running = group.create_task(monitor.run())
        reports.tell()  # that we are there
        while (request := await read(reader, decoder)) is not None:
            monitor.change(request.starts, request.stops)
            reports.requests += 1
            reports.tell()
            if monitor.targets > FREEZE_FROM * frozen:
                frozen = monitor.targets
                # the collector would look through a hundred thousand targets again and again
                gc.freeze()
        running.cancel()


def main() -> None:
    # Who stops the gateway, by a terminal's Ctrl-C, say, means it to go by its own order of things.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(GIVE_WAY)
    configure_logging()
    asyncio.run(serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
