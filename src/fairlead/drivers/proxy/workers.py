"""Limits the number of old workers, which continue after a reload with their open connections.

In: a HAProxy. Out: its old workers with their connections; workers are stopped. An old worker lives
as long as it has connections, and costs memory. Where connections last and Services change often,
the number of old workers would grow without limit. `reloads` decides which of them are stopped.

HAProxy's own limits do not fit: `mworker-max-reloads` stops a worker by the number of reloads that
it has seen, even if it is the only old one, and `hard-stop-after` by its age. Follows HAProxy 2.6's
management manual, sections 4 (SIGTERM stops a worker at once) and 9.4 (`show proc`)."""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fairlead.drivers.proxy import runtime
from fairlead.drivers.proxy.process import Haproxy
from fairlead.drivers.proxy.reloads import OldWorker
from fairlead.drivers.proxy.render import service_of
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey


async def connections(haproxy: Haproxy) -> dict[runtime.Worker, Counter[ServiceKey]]:
    """Return the old workers, each with the number of its open connections by Service."""
    found: dict[runtime.Worker, Counter[ServiceKey]] = {}
    for each in (await runtime.workers(haproxy.master))[0]:
        if not each.old:
            continue
        with suppress(Unavailable):  # the worker has just ended by itself
            counted: Counter[ServiceKey] = Counter()
            opened = await runtime.open_connections(haproxy.master, each.pid)
            for section, count in opened.items():
                counted[service_of(section)] += count
            found[each] = +counted
    return found


def by_namespace(
    old: Mapping[runtime.Worker, Mapping[ServiceKey, int]],
) -> list[OldWorker]:
    """Return the old workers with their connections by namespace."""
    found = []
    for worker, services in old.items():
        counted: Counter[str] = Counter()
        for service, count in services.items():
            counted[service.namespace] += count
        found.append(OldWorker(worker.pid, worker.reloads, counted))
    return found


def end(haproxy: Haproxy, pids: Iterable[int]) -> None:
    """Stop these workers, with their connections."""
    for pid in pids:
        _end(pid, haproxy.folder)


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
