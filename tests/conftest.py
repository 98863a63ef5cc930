"""Settings of the whole test run: it needs root, fast tests run first and whole labs last, and the
tests of a process share one real API server.

The run is distributed over processes (pytest-xdist), file by file. Each process has its own copy of
shared parts such as the real API server. The names of objects that tests create on the machine
contain the number of the process. If kube-apiserver, kube-proxy, etcd, helm or the official Python
client is missing, the tests that need it are skipped, listed in red at the end, and counted in the
last line. In CI these tests fail instead.

A lab in which a test has failed is not used again: the next test gets a new one. A test has a
second attempt only if it is in RETRIED, with the known cause of its failures, which must lie
outside of Fairlead. The first failure is printed, and the name of the test is printed in red at the
end. No folder has second attempts: if a packet, a connection or a write is lost, even rarely, this
is a defect, and a second attempt would hide it."""

import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import FrameType

import pytest
from tests import needs
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from fairlead.errors import Refused
from fairlead.lab.kubeapiserver import find_program

pytest_plugins = ["tests.programs", "tests.openstack.fixtures"]

CLOUD = (
    *(
        f"tests/drivers/octavia/test_{each}"
        for each in ("both_families", "controller_dies", "floating", "network_leftovers", "ovn")
    ),
    *(f"tests/drivers/octavia/test_{each}" for each in ("packets", "provider_refuses", "security")),
    "tests/openstack/test_cloud",
)
OPENSTACK = (*CLOUD, "tests/openstack/", "tests/drivers/octavia/", "tests/roles/test_octavia")
"""Files that need the servers of OpenStack, which each process starts once. So one process runs all
tests that need Neutron, and another one the tests that need only Octavia."""
GROUPS = ("Neutron", "Octavia")
LAST = (
    *OPENSTACK,
    "tests/e2e/test_ten_thousand.py",
    "tests/e2e/test_random_changes.py",
    "tests/faults/test_crash_at_every_kernel_call.py",
    "tests/faults/test_crash_at_every_call.py",
    "tests/lab/test_demo.py",
    "tests/e2e/",
    "tests/faults/",
)
"""Tests that start whole labs and take minutes. The longest tests come first, so that no process
runs one of them at the end while the other processes are idle."""
RETRIED: dict[str, str] = {}
"""The only tests that have a second attempt: the start of the test's id, and the cause of its
failures, which lies outside of Fairlead."""
ROWS = {
    "tests/e2e/test_leadership.py": ("embedded", "real"),
    "tests/e2e/test_random_changes.py": ("embedded", "real"),
    "tests/e2e/test_service_life.py": ("embedded", "real"),
    "tests/e2e/test_ten_thousand.py": ("ten thousand", "l2 and vxlan"),
}
"""Files with a lab for each of these parameter values, whose tests may run in parallel."""
NICE = 5
KUBECTL_MINOR = 24
"""The first version that has `kubectl create token` and `--subresource`."""
MAX_CHECK_PROCESSES = 12
MAX_PROCESSES = 6
"""The maximum number of processes. With more, the longest tests determine the duration."""

HISTORIES = int(os.environ.get("FAIRLEAD_HISTORIES") or 4)
"""The number of random histories at Octavia; each takes 15 seconds on a busy machine."""

_failed = pytest.StashKey[bool]()
_excluded = pytest.StashKey[dict[str, int]]()
"""The needs of the tests that --check excludes, with the number of tests."""
_guard = needs.Guard()
_quiet = pytest.StashKey[str]()
"""The id of the process with low priority."""
_stacks = pytest.StashKey[Path]()
"""The directory in which a process that is killed by a signal leaves its stack traces."""
_processes: dict[WorkerController, int] = {}
"""The processes that run tests for this one, by their process ids."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check", action="store_true", help="only tests that need no more than `make base`"
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
        # Ctrl-C in a terminal reaches the whole foreground process group. These processes must
        # receive it only once, from the process that waits for them.
        os.setpgrp()
    elif config.getvalue("numprocesses"):
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _interrupt_processes)
    _prefer_new_kubectl()


def _interrupt_processes(_signal: int, _frame: FrameType | None) -> None:
    """Interrupt the processes, so that they delete their labs and end. Then the run ends, too.
    pytest-xdist would give the processes only ten seconds."""
    if not _processes:
        raise KeyboardInterrupt
    for process in _processes.values():
        os.killpg(process, signal.SIGINT)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """A scheduler that keeps the tests of one lab together and in order. In addition to one process
    for each processor, there is a process `quiet` with low priority (NICE). It takes only files
    that need no more than `make base`, and ends when there are no more. The other processes take
    labs first: a lab mostly waits, and meanwhile the tests without a lab use the processors."""

    def mark_test_pending(self, item: str) -> None:
        """Do nothing. The unfinished tests of a process that died, including the test during which
        it died, are already assigned to the next process."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(OPENSTACK):
            return GROUPS[0] if nodeid.startswith(CLOUD) else GROUPS[1]
        file, _, test = nodeid.partition("::")
        # Each of these rows has a lab of its own.
        row = next((row for row in ROWS.get(file, ()) if row in test.partition("[")[2]), "")
        return f"{file} {row}" if row else file

    @property
    def _quiet(self) -> WorkerController | None:
        return next((each for each in self.assigned_work if is_quiet(each)), None)

    def _assign_work_unit(self, node: WorkerController) -> None:
        quiet = self._quiet
        if quiet is not None:
            light = [each for each in self.workqueue if each not in self._with_needs]
            heavy = sorted(set(self.workqueue) & self._with_needs, key=self._place)
            chosen = next(iter(light if node is quiet else heavy or light), None)
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

    def _place(self, scope: str) -> tuple[int, str]:
        """Return the sort key of a file. The longest files come first, so that no process runs one
        of them while the others are idle."""
        found = (number for number, each in enumerate(LAST) if scope.startswith(each))
        return (-1 if scope in GROUPS else next(found, len(LAST))), scope

    @cached_property
    def _with_needs(self) -> set[str]:
        """Return the files with a test that needs more than `make base`, as the processes have
        reported."""
        (found, *_) = self.config.stash[_stacks].glob("needs-*")
        return {self._split_scope(each) for each in found.read_text().splitlines()}


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
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    if config.getoption("check"):
        # Tests without a lab wait for half of their time: for a time-out, a process, a kernel.
        return min(MAX_CHECK_PROCESSES, 3 * len(os.sched_getaffinity(0)))
    config.stash[_quiet] = f"gw{processes}"
    return processes + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    if _stacks not in node.config.stash:
        node.config.stash[_stacks] = Path(tempfile.mkdtemp(prefix="fairlead-tests-"))
    node.workerinput["stacks"] = str(node.config.stash[_stacks] / node.gateway.id)
    node.workerinput["needs"] = str(node.config.stash[_stacks] / f"needs-{node.gateway.id}")
    node.workerinput["quiet"] = node.gateway.id == node.config.stash.get(_quiet, "")


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        faulthandler.enable(open(session.config.workerinput["stacks"], "w"))  # noqa: SIM115
        if session.config.workerinput["quiet"]:
            os.nice(NICE)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: WorkerController) -> None:
    _processes[node] = node.gateway._rinfo().pid


def pytest_sessionfinish(session: pytest.Session) -> None:
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
        with_needs = [item.nodeid for item, need in found if need]
        Path(config.workerinput["needs"]).write_text("\n".join(with_needs))
    if config.getoption("check"):
        config.stash[_excluded] = Counter([need for _, need in found if need])
        items[:] = [item for item, need in found if not need]
        config.hook.pytest_deselected(items=[item for item, need in found if need])
    items.sort(
        key=lambda item: next(
            (place for place, each in enumerate(LAST) if item.nodeid.startswith(each)), -1
        )
    )
    for item in items:
        if item.nodeid.startswith(tuple(RETRIED)):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Attribute processes that start during this test to the test."""
    _guard.test = item
    try:
        return (yield)
    finally:
        _guard.test = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a failed test, tear down its lab, so that neither a second attempt nor the next test
    uses it: the state of the lab is unknown."""
    if item.stash.get(_failed, False):
        item.stash[_failed] = False
        # This tears down everything except the fixtures of the session.
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _report_excluded(terminalreporter)
    _report_skipped(terminalreporter)
    _report_second_attempts(terminalreporter)
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


def _report_second_attempts(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the tests that passed at the second attempt: the first failure, and at the end the
    names."""
    failed = {
        report.nodeid
        for kind in ("failed", "error")
        for report in terminalreporter.getreports(kind)
    }
    first = [
        report for report in terminalreporter.getreports("rerun") if report.nodeid not in failed
    ]
    for report in first:
        terminalreporter.write_sep("_", f"first attempt of {report.nodeid}, {report.when}")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_sep("-", title)
            terminalreporter.write_line(text)
    if first:
        terminalreporter.write_line(
            f"{len(first)} tests passed only at their second attempt; errors of the first:",
            red=True,
        )
    for report in first:
        reason = [
            line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")
        ] or ["?"]
        known = next(
            (
                f" (known cause: {cause})"
                for test, cause in RETRIED.items()
                if report.nodeid.startswith(test)
            ),
            "",
        )
        terminalreporter.write_line(f"  {report.nodeid}: {reason[0]}{known}", red=True)
