"""Figures that a measured process reports about itself. Standard library only: the comparator
imports this module, too.

In: this process. Out: a line of JSON on standard output at each stage and, on request by standard
input, the events applied since. Times are of CLOCK_MONOTONIC, which all processes of a machine
share.
"""

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """The resources that the process has used since its start, and its current memory."""

    at_s: float
    cpu_s: float
    """User and system time, of all threads."""
    resident_kib: int
    peak_kib: int


def usage() -> Usage:
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            sizes[name] = int(value.split()[0])
    return Usage(time.monotonic(), time.process_time(), sizes["VmRSS"], sizes["VmHWM"])


class Figures:
    """The measured side of the protocol."""

    def __init__(self) -> None:
        self._applied: dict[str, float] = {}
        self._calls = 0

    def stage(self, name: str) -> None:
        """Report that a stage is reached."""
        self._write({"stage": name, **usage()._asdict()})

    def applied(self, services: "list[str]") -> None:
        """Record that the driver is called for these Services now."""
        now_s = time.monotonic()
        self._calls += 1
        for service in services:
            self._applied[service] = now_s

    @property
    def seen(self) -> int:
        """The number of Services that the driver was called for since the last `begin`."""
        return len(self._applied)

    def answer(self, command: str) -> bool:
        """Execute a command of standard input: `begin`, `seen`, `report` or `end`. Return False
        when the process should end."""
        match command.strip():
            case "begin":
                self._applied.clear()
                self._calls = 0
                self.stage("begun")
            case "seen":
                self._write({"seen": self.seen})
            case "report":
                self._write({"applied": self._applied, "calls": self._calls, **usage()._asdict()})
            case _:
                return False
        return True

    def _write(self, message: object) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
