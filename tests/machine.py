"""The machine on which the tests run: a longer queue of packets, and what a failed test saw of it.

All network namespaces share one queue of received packets for each processor. The kernel drops what
does not fit (net.core.netdev_max_backlog, 1,000 packets by default), so while all processors
compute, a busy lab loses the packets of another one. On a real site, hosts have processors of their
own. The tests count every lost packet as a defect of Fairlead, so `lengthen_queue` gives the queue
room for the packets of all labs.

If two runs overlap, the first one to end restores the shorter queue for both. A run that is killed
leaves the longer queue, which does no harm; a reboot restores it.

`Usage` shows whether a test failed on a machine that dropped packets or had no processor left."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

QUEUE = Path("/proc/sys/net/core/netdev_max_backlog")
LENGTH = 100_000
"""The number of packets. One packet takes about a kilobyte, and the queue is rarely longer than
before."""


@contextmanager
def lengthen_queue(queue: Path = QUEUE, length: int = LENGTH) -> Iterator[None]:
    """Give each processor's queue of packets at least this length, and restore it at the end. Does
    nothing where the value cannot be written, as in a container."""
    try:
        before = int(queue.read_text())
        if before < length:
            queue.write_text(str(length))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            queue.write_text(str(before))


class Usage(NamedTuple):
    """Counters of the machine since its start."""

    dropped: int
    """Packets that a processor's queue had no room for (/proc/net/softnet_stat)."""
    waited_us: int | None
    """The time, in microseconds, for which a process was ready and waited for a processor
    (/proc/pressure/cpu); None if the kernel does not count it."""
    at_ns: int
    """The time of the monotonic clock."""

    def describe_until(self, later: "Usage") -> str:
        """Return a sentence about the machine between these two moments."""
        text = f"{later.dropped - self.dropped} packets did not fit into a processor's queue"
        duration_us = (later.at_ns - self.at_ns) / 1_000
        if self.waited_us is None or later.waited_us is None or not duration_us:
            return text
        share = (later.waited_us - self.waited_us) / duration_us
        return f"{text}; processes waited for a processor for {share:.0%} of the time"


def measure(now_ns: int, proc: Path = Path("/proc")) -> Usage:
    """Return the present counters. `now_ns`: the time of the monotonic clock."""
    rows = (proc / "net/softnet_stat").read_text().splitlines()
    waited_us = None
    with suppress(OSError, StopIteration, ValueError):
        some = next(
            line
            for line in (proc / "pressure/cpu").read_text().splitlines()
            if line.startswith("some ")
        )
        waited_us = int(some.rpartition("total=")[2])
    return Usage(sum(int(row.split()[1], 16) for row in rows), waited_us, now_ns)


def load() -> str:
    """Return the load averages of the machine."""
    return " ".join(f"{each:.1f}" for each in os.getloadavg())
