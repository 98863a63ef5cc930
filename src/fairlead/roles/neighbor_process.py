"""The process that watches other gateways for a gateway: `python -m
fairlead.roles.neighbor_process`, started by `drivers/neighbors/watch`.

In: the gateways to watch, on a socket that is its standard input. Out: what it observes, on the
same socket. It asks each of them 20 times a second. As a separate process, no plan and no garbage
collection of the gateway makes it late. Invariant: it does not outlive the gateway. When the other
end of the socket is closed, for any reason, it ends."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from fairlead.drivers.neighbors.protocol import WatchReport, WatchRequest
from fairlead.drivers.neighbors.watcher import Watcher
from fairlead.net.frames import read, write
from fairlead.telemetry import configure_logging

NICENESS = -10
"""The niceness of this process, if the host permits it. It needs little time, and addresses whose
owner is lost wait for it."""


def command() -> Sequence[str]:
    """The command that starts this process; Python loads no modules from the working directory."""
    return (sys.executable, "-P", "-m", "fairlead.roles.neighbor_process")


async def serve() -> None:
    """Watch until the gateway has ended."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=sys.stdin.fileno()))
    watcher = Watcher(lambda report: write(writer, report))
    decoder = msgspec.msgpack.Decoder(WatchRequest)
    write(writer, WatchReport((), (), 0))  # It shows that this process is ready.
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watcher.run())
        while (request := await read(reader, decoder)) is not None:
            watcher.change(request)
        running.cancel()


def main() -> None:
    # A signal from a terminal is for the gateway, which ends this process when it is ready.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    configure_logging()
    gc.freeze()
    asyncio.run(serve())


if __name__ == "__main__":
    main()
