"""Workers of before a reload: how many may go on, and what ending one cuts.

In: a HAProxy, and how many old workers there may be. Out: no more than these; of those that were
ended, the connections that each section lost. An old worker lives for as long as it has
connections, and costs its memory so long; where connections last and Services change often there
would be ever more of them. The oldest goes first: it has had the longest time to empty. HAProxy's
own limits do not serve: `mworker-max-reloads` ends a worker by how many reloads it has seen, be it
the only old one, and `hard-stop-after` by the clock. Follows HAProxy 2.6's management manual,
sections 4 (SIGTERM ends a worker at once) and 9.4 (`show proc`)."""

import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fairlead.drivers.proxy import runtime
from fairlead.drivers.proxy.process import Haproxy
from fairlead.errors import Unavailable

NOWHERE = "<NONE>"
"""Where a connection leads that is no client's: our own question."""


async def end_oldest(haproxy: Haproxy, most: int) -> Counter[str]:
    """Have no more old workers than `most` (0: any number). Connections that this has cut, by
    section."""
    cut: Counter[str] = Counter()
    if not most:
        return cut
    found, _ = await runtime.workers(haproxy.master)
    old = sorted((each for each in found if each.old), key=lambda each: each.reloads, reverse=True)
    for each in old[: max(0, len(old) - most)]:
        with suppress(Unavailable):  # it ends by itself just now
            sessions = await runtime.sessions(haproxy.master, each.pid)
            cut += Counter(
                session["fe"] for session in sessions if session.get("be", NOWHERE) != NOWHERE
            )
        _end(each.pid, haproxy.folder)
    return cut


def _end(pid: int, folder: Path) -> None:
    """Only if it is still the worker: a number may be another process's by now."""
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
