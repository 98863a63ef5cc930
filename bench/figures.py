"""What a process that is measured tells about itself. The standard library only: the comparator
imports it too.

In: this process. Out: lines of JSON on standard output, one at each stage; on request of standard
input, what has been applied since. Times are of CLOCK_MONOTONIC, which all processes of the machine
share."""

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """What the process has used since it began, and holds now."""

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
    """The measured side of the conversation."""

    def __init__(self) -> None:
        self._applied: dict[str, float] = {}
        self._calls = 0

    def stage(self, name: str) -> None:
        """Say that a stage is reached."""
        self._say({"stage": name, **usage()._asdict()})

    def applied(self, services: "list[str]") -> None:
        """The driver is called for these Services, now."""
        now_s = time.monotonic()
        self._calls += 1
        for service in services:
            self._applied[service] = now_s

    @property
    def seen(self) -> int:
        """How many Services the driver was called for since the last `begin`."""
        return len(self._applied)

    def answer(self, asked: str) -> bool:
        """Do what a line of standard input asks for: `begin`, `report` or `end`. False: the process
        is to end."""
        match asked.strip():
            case "begin":
                self._applied.clear()
                self._calls = 0
                self.stage("begun")
            case "seen":
                self._say({"seen": self.seen})
            case "report":
                self._say({"applied": self._applied, "calls": self._calls, **usage()._asdict()})
            case _:
                return False
        return True

    def _say(self, what: object) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()
