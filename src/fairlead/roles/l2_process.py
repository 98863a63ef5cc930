"""The process that announces addresses on layer 2 for a role: `python -m
fairlead.roles.l2_process`, started by `drivers/l2`.

In: settings and the addresses to announce, on a socket that is its standard input. Out: see
`drivers/l2/process`. Invariant: it does not outlive the role. When the other end of the socket is
closed, for any reason, it ends."""

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from fairlead.drivers.l2.process import serve
from fairlead.telemetry import configure_logging

NICENESS = -10
"""The niceness of this process. It uses little time, and is late for every address if it waits."""


def command() -> Sequence[str]:
    """The command that starts this process; Python loads no modules from the working directory."""
    return (sys.executable, "-P", "-m", "fairlead.roles.l2_process")


def main() -> None:
    # A signal from a terminal is for the role, which ends this process when it is ready.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    configure_logging()
    gc.freeze()
    serve(socket.socket(fileno=sys.stdin.fileno()))


if __name__ == "__main__":
    main()
