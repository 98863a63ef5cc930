"""Settings of the whole test run: it needs root, fast tests run first and whole labs last, and the
tests of a process share one real API server.

The run is distributed over processes (pytest-xdist), file by file. Each process has its own copy of
shared parts such as the real API server. The names of objects that tests create on the machine
contain the number of the process. If kube-apiserver, kube-proxy, etcd, helm or the official Python
client is missing, the tests that need it are skipped, listed in red at the end, and counted in the
last line. In CI these tests fail instead.

A lab in which a test has failed is not used again: the next test gets a new one. `--report FILE`
writes what became of each test, which `tools/gate.py` and `tools/soak.py` read."""

import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec
import pytest
from tests import machine, needs
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from fairlead.errors import Refused
from fairlead.lab.kubeapiserver import find_program
from fairlead.lab.process import set_nice

pytest_plugins = ["tests.programs", "tests.openstack.fixtures"]

NEUTRON, OCTAVIA = "Neutron", "Octavia"
"""The groups of tests that share the servers of OpenStack, which each process starts once. So one
process runs all tests that need Neutron, and another one those that need only Octavia."""
QUIET = 2
"""The number of processes with low priority: one for each group of OpenStack."""
NICE = 5
"""The nice value of the processes with low priority."""
KUBECTL_MINOR = 24
"""The first version that has `kubectl create token` and `--subresource`."""
MACHINE = "machine during the test"
"""The title of the section of a failed test's report that describes the machine."""
MAX_CHECK_PROCESSES = 12
LEFT_THE_PROCESS = "left_the_process"
"""The name of a property of a report: the test has started programs, sent packets or needed a lab,
so its result may depend on the machine."""
MAX_PROCESSES = 6
"""The maximum number of processes. With more, the longest tests determine the duration."""

LABS = int(os.environ.get("FAIRLEAD_LABS") or 0)
"""The number of processes that run labs; 0: one for each processor."""
HISTORIES = int(os.environ.get("FAIRLEAD_HISTORIES") or 4)
"""The number of random histories at Octavia; each takes 15 seconds on a busy machine."""

_failed = pytest.StashKey[bool]()
_excluded = pytest.StashKey[dict[str, int]]()
"""The needs of the tests that --check excludes, with the number of tests."""
_guard = needs.Guard()
_quiet = pytest.StashKey[frozenset[str]]()
"""The ids of the processes with low priority."""
_stacks = pytest.StashKey[Path]()
"""The directory in which a process that is killed by a signal leaves its stack traces."""
_machine = ExitStack()
"""The changes of the machine for the duration of the run."""
_before = pytest.StashKey[machine.Usage]()
"""The counters of the machine when a test started."""
_report_file: list[TextIO] = []
"""The open file of --report, if the option is given."""
_processes: dict[WorkerController, int] = {}
"""The processes that run tests for this one, by their process ids."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check", action="store_true", help="only tests that need no more than `make base`"
    )
    parser.addoption(
        "--report", metavar="FILE", help="write what became of each test as lines of JSON"
    )
    parser.addoption(
        "--histories", type=int, default=HISTORIES, help="number of random histories at Octavia"
    )


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() != 0:
        pytest.exit(
            "the tests create network namespaces and send real packets; run them as root",
            returncode=1,
        )
    # A command that a shell starts in the background ignores Ctrl-C, and so do all its children.
    # Tests send Ctrl-C to their children.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        _leave_the_group(quiet=config.workerinput["quiet"])
    elif config.getvalue("numprocesses"):
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _interrupt_processes)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if (path := config.getoption("report")) and not hasattr(config, "workerinput"):
        _report_file.append(open(path, "w"))  # noqa: SIM115  # until the end of this process
    _prefer_new_kubectl()


def _leave_the_group(*, quiet: bool) -> None:
    """Leave the process group of the terminal: Ctrl-C reaches the whole group, and a process that
    runs tests must receive it only once, from the process that waits for it. A quiet process also
    lowers its priority. It leaves the session, too: where the kernel schedules sessions as groups,
    a nice value has no effect on the processes of other sessions, such as those of OpenStack and
    of labs, and that of the group has."""
    if not quiet:
        os.setpgrp()
        return
    os.setsid()
    set_nice(os.getpid(), os.nice(NICE))


def _interrupt_processes(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt the processes, so that they delete their labs and end. Then the run ends, too.
    pytest-xdist would give the processes only ten seconds."""
    if not _processes:
        raise KeyboardInterrupt
    for process in _processes.values():
        os.killpg(process, signal.SIGINT)


class Kind(IntEnum):
    """What a test needs, the greatest need first."""

    LAB = 0
    OPENSTACK = 1
    PROGRAM = 2
    """A program that `make tools` installs, but no lab."""
    LIGHT = 3
    """No more than `make base`."""


OF_LABS = (Kind.LAB, Kind.LIGHT, Kind.PROGRAM, Kind.OPENSTACK)
OF_QUIET = (Kind.OPENSTACK, Kind.PROGRAM, Kind.LIGHT)
"""The kinds of tests that a process for labs and a quiet one take, in this order. Each process that
needs a real API server starts one, so mostly the quiet ones need it."""


class Place(msgspec.Struct, frozen=True):
    """Where the scheduler places a test. `scope`: the tests of one scope run in one process, in
    order. `long`: it has this mark."""

    scope: str
    kind: Kind
    long: bool


def place_of(item: pytest.Item) -> Place:
    long = item.get_closest_marker("long") is not None
    file, need = item.nodeid.partition("::")[0], needs.need_of(item)
    if need == needs.FIXTURES["openstack_programs"]:
        group = NEUTRON if "cloud" in getattr(item, "fixturenames", ()) else OCTAVIA
        return Place(group, Kind.OPENSTACK, long)
    if needs.need_of_test(item.nodeid, ()) == needs.LAB:
        return Place(file, Kind.LAB, long)
    return Place(file, Kind.PROGRAM if need else Kind.LIGHT, long)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """A scheduler that keeps the tests of one lab together and in order. In addition to one process
    for each processor, there are QUIET processes with low priority (NICE). They take the groups of
    OpenStack first, and no labs. The other processes take labs first. A lab mostly waits, and
    meanwhile the quiet processes use the processors. Of each kind, those with the mark `long` come
    first, so that no process runs one of them while the others are idle."""

    def mark_test_pending(self, item: str) -> None:
        """Do nothing. The unfinished tests of a process that died, including the test during which
        it died, are already assigned to the next process."""

    def _split_scope(self, nodeid: str) -> str:
        return self._places[nodeid].scope

    def _assign_work_unit(self, node: WorkerController) -> None:
        if _quiet in self.config.stash:
            ranks = self._ranks[is_quiet(node)]
            chosen = min(self.workqueue.keys() & ranks.keys(), key=ranks.__getitem__, default=None)
            if chosen is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        # A process needs only one further test: a test that is assigned to it cannot be moved to
        # another process that is idle.
        if self.workqueue and self._pending_of(self.assigned_work[node]) > 1:
            return
        super()._reschedule(node)

    @cached_property
    def _places(self) -> dict[str, Place]:
        """Return the place of each test, as the processes have reported."""
        (found, *_) = self.config.stash[_stacks].glob("places-*")
        return msgspec.json.decode(found.read_bytes(), type=dict[str, Place])

    @cached_property
    def _ranks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the scopes that a process takes, with their ranks: for a process for labs, which
        takes all, and for a quiet one. A scope has the greatest need of its tests."""
        kinds: dict[str, Kind] = {}
        for place in self._places.values():
            kinds[place.scope] = min(kinds.get(place.scope, Kind.LIGHT), place.kind)
        long = {place.scope for place in self._places.values() if place.long}

        def ranks(taken: Sequence[Kind]) -> dict[str, int]:
            scopes = [scope for scope in kinds if kinds[scope] in taken]
            scopes.sort(key=lambda scope: (taken.index(kinds[scope]), scope not in long))
            return {scope: rank for rank, scope in enumerate(scopes)}

        return ranks(OF_LABS), ranks(OF_QUIET)


def is_quiet(process: WorkerController) -> bool:
    return bool(process.workerinput.get("quiet"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for `-n auto`."""
    # A lab consists of many processes. With three labs on two processors, processes did not respond
    # in time.
    processes = LABS or min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    if config.getoption("check"):
        # Tests without a lab wait for half of their time: for a time-out, a process, a kernel.
        return min(MAX_CHECK_PROCESSES, 3 * len(os.sched_getaffinity(0)))
    config.stash[_quiet] = frozenset(f"gw{processes + number}" for number in range(QUIET))
    return processes + QUIET


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    if _stacks not in node.config.stash:
        node.config.stash[_stacks] = Path(tempfile.mkdtemp(prefix="fairlead-tests-"))
    node.workerinput["stacks"] = str(node.config.stash[_stacks] / node.gateway.id)
    node.workerinput["places"] = str(node.config.stash[_stacks] / f"places-{node.gateway.id}")
    node.workerinput["quiet"] = node.gateway.id in node.config.stash.get(_quiet, ())


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        _machine.enter_context(machine.lengthen_queue())
    else:
        faulthandler.enable(open(session.config.workerinput["stacks"], "w"))  # noqa: SIM115


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: WorkerController) -> None:
    _processes[node] = node.gateway._rinfo().pid


def pytest_sessionfinish(session: pytest.Session) -> None:
    _machine.close()
    excluded = session.config.stash.get(_excluded, None)
    if excluded is not None and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["excluded"] = dict(excluded)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    # This function is called twice for an interrupted process.
    _processes.pop(node, None)
    if excluded := getattr(node, "workeroutput", {}).get("excluded"):
        # Every process has collected all tests, so one report is enough.
        node.config.stash[_excluded] = dict(excluded)


def _prefer_new_kubectl() -> None:
    """Use the kubectl that `make tools` built if the installed one is too old, as in Debian 12."""
    with suppress(OSError, ValueError, KeyError):
        command = ["kubectl", "version", "--client", "-o", "json"]
        version = json.loads(
            subprocess.run(command, capture_output=True, check=False, timeout=30).stdout
        )
        if int(version["clientVersion"]["minor"].rstrip("+")) >= KUBECTL_MINOR:
            return
    with suppress(Refused):
        built = find_program("kubectl", {**os.environ, "PATH": ""})
        os.environ["PATH"] = os.pathsep.join(
            (str(built.parent), os.environ.get("PATH", os.defpath))
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without Python's garbage collection, which would take half of the time:
    what pytest reads and imports here stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [(item, needs.need_of(item)) for item in items]
    if hasattr(config, "workerinput"):
        places = {item.nodeid: place_of(item) for item in items}
        Path(config.workerinput["places"]).write_bytes(msgspec.json.encode(places))
    if config.getoption("check"):
        gate = [need for item, need in found if item.get_closest_marker("soak") is None]
        config.stash[_excluded] = Counter([need for need in gate if need])
        items[:] = [item for item, need in found if not need]
        config.hook.pytest_deselected(items=[item for item, need in found if need])
    # Tests without a lab come first, because they are fast.
    items.sort(key=lambda item: needs.need_of(item) is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Attribute processes that start during this test to the test."""
    _guard.start(item)
    item.stash[_before] = machine.measure(time.monotonic_ns())
    try:
        return (yield)
    finally:
        _guard.start(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
        usage = item.stash[_before].describe_until(machine.measure(time.monotonic_ns()))
        report.sections.append((MACHINE, f"{usage}; load averages {machine.load()}"))
    if _guard.left_the_process or needs.need_of(item) or item.get_closest_marker("root"):
        report.user_properties.append((LEFT_THE_PROCESS, True))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    left = any(name == LEFT_THE_PROCESS for name, _ in report.user_properties)
    _write_row(report, report.when, report.duration, left=left)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Report a file that cannot be collected, too: pytest-xdist runs the other files all the same,
    and ends as if only tests had failed."""
    if report.failed:
        _write_row(report, "collect", 0.0, left=False)


def _write_row(
    report: pytest.TestReport | pytest.CollectReport,
    when: str | None,
    seconds: float,
    *,
    left: bool,
) -> None:
    """Write a row to the file of --report. Only the process that collects the reports of the others
    has such a file."""
    for file in _report_file:
        row = {
            "test": report.nodeid,
            "when": when,
            "outcome": report.outcome,
            "seconds": seconds,
            LEFT_THE_PROCESS: left,
            "text": "" if report.passed else report.longreprtext,
        }
        file.write(json.dumps(row) + "\n")
        file.flush()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a failed test, tear down its lab, so that the next test does not use it: its state is
    unknown."""
    if item.stash.get(_failed, False):
        item.stash[_failed] = False
        # This tears down everything except the fixtures of the session.
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _report_excluded(terminalreporter)
    _report_skipped(terminalreporter)
    _report_stacks(terminalreporter)


def _report_stacks(terminalreporter: pytest.TerminalReporter) -> None:
    folder = terminalreporter.config.stash.get(_stacks, None)
    if folder is None:
        return
    for each in sorted(folder.glob("gw*")):
        if text := each.read_text(errors="replace"):
            terminalreporter.write_line(
                f"process {each.name} of the tests died; this is always a defect:\n{text}", red=True
            )
    shutil.rmtree(folder, ignore_errors=True)


def _report_excluded(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the tests that --check excluded, by their needs."""
    excluded = terminalreporter.config.stash.get(_excluded, None)
    if excluded is None:
        return
    total = sum(excluded.values())
    terminalreporter.write_line(f"--check excluded {total} tests; make test runs them:")
    for needed_by, number in sorted(excluded.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"  {number} need {needed_by}")


def _report_skipped(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        report
        for report in terminalreporter.getreports("skipped")
        if needs.MISSING in str(report.longrepr)
    ]
    for why in sorted(
        {str(report.longrepr).split(needs.MISSING, 1)[1].rstrip("')") for report in skipped}
    ):
        tests = [report.nodeid for report in skipped if why in str(report.longrepr)]
        terminalreporter.write_line(
            f"{len(tests)} tests did not run, because they need a program that is missing{why}",
            red=True,
        )
        for test in tests:
            terminalreporter.write_line(f"  {test}", red=True)
