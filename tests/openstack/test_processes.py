"""Processes that the tests start end with the tests, also when the tests are killed."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.openstack import clients
from tests.openstack.places import ROOT
from tests.openstack.processes import Processes

from fairlead.lab.process import POD_NICE

STARTER = """
import sys, time
from pathlib import Path
from tests.openstack.processes import Processes
Processes(Path(sys.argv[1])).start("one", ["sh", "-c", "setsid sleep 987 & sleep 987"])
print("started", flush=True)
time.sleep(60)
"""


def running(directory: Path) -> list[str]:
    """Return the commands of the processes whose working directory this is."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended meanwhile
            if os.readlink(f"/proc/{process}/cwd") == str(directory):
                found.append(Path(f"/proc/{process}/comm").read_text().strip())
    return found


def test_a_server_and_its_children_have_the_priority_of_pods(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    started = processes.start("one", ["sh", "-c", "nice; sh -c nice; echo end"])
    started.await_line("end")
    lowest = max(POD_NICE, os.getpriority(os.PRIO_PROCESS, 0))
    assert started.log.read_text().split() == [str(lowest), str(lowest), "end"]
    processes.end()


def test_no_process_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    with starter, starter.stdout:
        starter.stdout.readline()
        clients.wait_until(lambda: running(tmp_path).count("sleep") == 2)
        starter.send_signal(signal.SIGKILL)
    clients.wait_until(lambda: running(tmp_path) == [])
