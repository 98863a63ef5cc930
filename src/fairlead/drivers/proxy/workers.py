"""Limits the number of old workers, which continue after a reload with their open connections.

In: a HAProxy, and the maximum number of old workers. Out: the surplus workers are stopped; the
number of connections that each section lost thereby. An old worker lives as long as it has
connections, and costs memory. Where connections last and Services change often, the number of old
workers would grow without limit. The oldest is stopped first: it had the longest time to drain.

HAProxy's own limits do not fit: `mworker-max-reloads` stops a worker by the number of reloads that
it has seen, even if it is the only old one, and `hard-stop-after` by its age. Follows HAProxy 2.6's
management manual, sections 4 (SIGTERM stops a worker at once) and 9.4 (`show proc`)."""

import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fairlead.drivers.proxy import runtime
from fairlead.drivers.proxy.process import Haproxy
from fairlead.errors import Unavailable

NO_BACKEND = "<NONE>"
"""The backend of a connection that is not a client's: our own command."""


async def end_oldest(haproxy: Haproxy, limit: int) -> Counter[str]:
    """Stop the oldest old workers until at most `limit` are left (0: no limit). Return the number
    of closed connections by section."""
    closed: Counter[str] = Counter()
    if not limit:
        return closed
    found, _ = await runtime.workers(haproxy.master)
    old = sorted((each for each in found if each.old), key=lambda each: each.reloads, reverse=True)
    for each in old[: max(0, len(old) - limit)]:
        with suppress(Unavailable):  # the worker has just ended by itself
            sessions = await runtime.sessions(haproxy.master, each.pid)
            closed += Counter(
                session["fe"] for session in sessions if session.get("be", NO_BACKEND) != NO_BACKEND
            )
        _end(each.pid, haproxy.folder)
    return closed


def _end(pid: int, folder: Path) -> None:
    """Send SIGTERM to the worker, unless its process id belongs to another process by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except OSError:  # it has ended
        return
    finally:
        os.close(descriptor)
