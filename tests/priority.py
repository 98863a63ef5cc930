"""Less processor time for some processes of the tests and for everything that they start.

In: the id of a process. Out: a control group with half of the weight of one session. Linux
gives each session the same share of the processors (autogroup, sched(7)), whatever the nice value
of its processes, and every server that a test starts is a session. So without the group, the
servers of OpenStack would have many times the share of a lab. Without the controller `cpu` of
cgroup v1 (cgroups(7)), processes keep their shares, and labs are slower."""

import os
from contextlib import suppress
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/cpu")
GROUP = "fairlead-tests-"
WEIGHT = 512
"""Half of the weight of a session."""


def group_of(process: int) -> Path:
    """Return the control group that belongs to a process."""
    return CONTROLLER / f"{GROUP}{process}"


def lower() -> None:
    """Move this process to its group. Processes that it starts belong to the group as well. Remove
    the groups of earlier processes, which may have ended before the processes that they started."""
    for each in CONTROLLER.glob(f"{GROUP}*"):
        if not Path("/proc", each.name.removeprefix(GROUP)).exists():
            remove(int(each.name.removeprefix(GROUP)))
    group = group_of(os.getpid())
    with suppress(OSError):
        group.mkdir()
        (group / "cpu.shares").write_text(str(WEIGHT))
        (group / "cgroup.procs").write_text(str(os.getpid()))


def restore() -> None:
    """Leave the group and remove it. Does nothing if the process is in no group."""
    with suppress(OSError):
        if group_of(os.getpid()).exists():
            (CONTROLLER / "cgroup.procs").write_text(str(os.getpid()))
            remove(os.getpid())


def remove(process: int) -> None:
    """Remove the group of a process that has ended, maybe by a signal."""
    with suppress(OSError):
        group_of(process).rmdir()
