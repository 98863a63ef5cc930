"""The process that watches other gateways for a gateway, started by `drivers/neighbors/watch`.

In: the gateways to watch, on a socket that is its standard input. Out: what it observes, on the
same socket. It asks each of them 20 times a second. As a separate process, no plan and no garbage
collection of the gateway makes it late. It has no event loop and no logs, because asyncio and
structlog would take another 5 MiB. Invariants: it never waits for the gateway to read. It does not
outlive the gateway. When the other end of the socket is closed, for any reason, it ends."""

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from fairlead.drivers.neighbors.protocol import WatchReport, WatchRequest
from fairlead.drivers.neighbors.watcher import Watcher
from fairlead.net.frames import Frames, frame
from fairlead.roles.small_process import small_process

NICENESS = -10
"""The niceness of this process, if the host permits it. It needs little time, and addresses whose
owner is lost wait for it."""
CHUNK_BYTES = 1 << 16


def command() -> Sequence[str]:
    """The command that starts this process."""
    return small_process(__name__)


class Exchange:
    """The messages from and to the gateway."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._frames = Frames(msgspec.msgpack.Decoder(WatchRequest))
        self._unsent = bytearray()

    def report(self, report: WatchReport) -> None:
        """Send the report as soon as the stream has room."""
        self._unsent += frame(report)
        self._send()

    def wait(self, change: Callable[[WatchRequest], None], delay_s: float) -> bool:
        """Call `change` with each request that arrives in this time. Return whether the gateway is
        still there."""
        until_s = time.monotonic() + delay_s
        while (left_s := until_s - time.monotonic()) > 0:
            writers = [self._stream] if self._unsent else []
            readable, writable, _ = select.select([self._stream], writers, [], left_s)
            if writable:
                self._send()
            if readable and not self._receive(change):
                return False
        return True

    def _send(self) -> None:
        try:
            del self._unsent[: self._stream.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # the gateway has ended, which `_receive` notices
            self._unsent.clear()

    def _receive(self, change: Callable[[WatchRequest], None]) -> bool:
        try:
            data = self._stream.recv(CHUNK_BYTES)
        except ConnectionError:
            return False
        for request in self._frames.take(data):
            change(request)
        return bool(data)


def serve(stream: socket.socket) -> None:
    """Watch until the gateway has ended."""
    exchange = Exchange(stream)
    watcher = Watcher(exchange.report)
    exchange.report(WatchReport((), (), 0))  # It shows that this process is ready.
    watcher.run(partial(exchange.wait, watcher.change))


def main() -> None:
    # A signal from a terminal is for the gateway, which ends this process when it is ready.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    gc.freeze()
    with socket.socket(fileno=sys.stdin.fileno()) as stream:
        serve(stream)
