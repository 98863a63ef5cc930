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
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import FrameType

import pytest
from tests import machine, needs, priority
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from fairlead.errors import Refused
from fairlead.lab.kubeapiserver import find_program

pytest_plugins = ["tests.programs", "tests.openstack.fixtures"]

CLOUD = (
    "tests/drivers/octavia/test_histories.py::test_every_step_with_floating_ips",
    *(
        f"tests/drivers/octavia/test_{each}"
        for each in ("security", "floating", "sharing_network", "network_leftovers")
    ),
    *(f"tests/drivers/octavia/test_{each}" for each in ("controller_dies", "ovn")),
    *(
        f"tests/drivers/octavia/test_{each}"
        for each in ("provider_refuses", "both_families", "packets")
    ),
    "tests/openstack/test_cloud",
)
"""Files that need Neutron. The files that send packets come last, because the tests that flood labs
run at the beginning."""
OPENSTACK = (*CLOUD, "tests/openstack/", "tests/drivers/octavia/", "tests/roles/test_octavia")
"""Files that need the servers of OpenStack, which each process starts once. So one quiet process
runs all tests that need Neutron, and another one the tests that need only Octavia."""
NEUTRON, OCTAVIA = "Neutron", "Octavia"
GROUPS = (NEUTRON, OCTAVIA)
ALONE = (
    "tests/e2e/test_many_flows.py",
    "tests/e2e/test_floods.py",
    "tests/e2e/test_health_flood.py",
    "tests/e2e/test_announcing_nodes_life.py",
    "tests/e2e/test_announcing_nodes_l2.py",
)
"""Tests that load the whole machine, or in which a pod must start and a node be programmed while
others still serve, within seconds. While one of them runs, the other processes run tests without a
lab: a processor's queue of packets is shared by all labs, so a flood in one lab loses packets of
another one, and the tests of that lab fail. They run in this order, because the servers of
OpenStack start at the same time as the first of them."""
LAST = (
    *OPENSTACK,
    *ALONE,
    "tests/drivers/ovn/",
    "tests/e2e/test_random_changes.py",
    "tests/faults/test_crash_at_every_kernel_call.py",
    "tests/faults/test_crash_at_every_call.py",
    "tests/lab/test_demo.py",
    "tests/e2e/",
    "tests/faults/",
)
"""Tests that start whole labs and take minutes. The longest tests come first, so that no process
runs one of them at the end while the other processes are idle."""
WITH_PACKETS = (
    *needs.LABS,
    *needs.LONG,
    "tests/drivers/ovn/test_packets",
    "tests/roles/test_announcers",
)
"""Tests that send packets through networks of several hosts, or have deadlines of less than a
second, as sessions with BFD have."""
RETRIED: dict[str, str] = {}
"""The only tests that have a second attempt: the start of the test's id, and the cause of its
failures, which lies outside of Fairlead."""
ROWS = {
    "tests/e2e/test_leadership.py": ("embedded", "real"),
    "tests/e2e/test_random_changes.py": ("embedded", "real"),
    "tests/e2e/test_service_life.py": ("embedded", "real"),
    "tests/e2e/test_many_flows.py": ("l2 and ipip", "l2 and vxlan"),
}
"""Files with a lab for each of these parameter values, whose tests may run in parallel."""
NICE = 5
"""The addition to the nice value of a quiet process; see also `priority`."""
KUBECTL_MINOR = 24
"""The first version that has `kubectl create token` and `--subresource`."""
MAX_CHECK_PROCESSES = 12
MAX_PROCESSES = 6
"""The maximum number of processes. With more, the longest tests determine the duration."""

MACHINE = "machine during the test"
"""The title of the section of a failed test's report that describes the machine."""

HISTORIES = int(os.environ.get("FAIRLEAD_HISTORIES") or 2)
"""The number of random histories at Octavia; each takes 15 seconds on a busy machine."""

_failed = pytest.StashKey[bool]()
_excluded = pytest.StashKey[dict[str, int]]()
"""The needs of the tests that --check excludes, with the number of tests."""
_guard = needs.Guard()
_quiet = pytest.StashKey[tuple[str, ...]]()
"""The ids of the processes with low priority."""
_stacks = pytest.StashKey[Path]()
"""The directory in which a process that is killed by a signal leaves its stack traces."""
_machine = ExitStack()
"""The changes of the machine for the duration of the run."""
_before = pytest.StashKey[machine.Usage]()
"""The counters of the machine when a test started."""
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
    for each processor, there are two quiet processes with low priority (NICE). Each first runs one
    of GROUPS, whose tests mostly compute, have long deadlines and flood no network; then files that
    need no more than `make base`; and ends when there are no more, so that later labs have the
    processors for themselves. The other processes take labs first: a lab mostly waits, and
    meanwhile the quiet processes use the processors. The first labs are in ALONE, because the tests
    without a lab that run beside them do not last until the end."""

    def mark_test_pending(self, item: str) -> None:
        """Do nothing. The unfinished tests of a process that died, including the test during which
        it died, are already assigned to the next process."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(OPENSTACK):
            return NEUTRON if nodeid.startswith(CLOUD) else OCTAVIA
        file, _, test = nodeid.partition("::")
        # Each of these rows has a lab of its own.
        row = next((row for row in ROWS.get(file, ()) if row in test.partition("[")[2]), "")
        return f"{file} {row}" if row else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if _quiet in self.config.stash:
            groups = [each for each in GROUPS if each in self.workqueue]
            files = [each for each in self.workqueue if each not in GROUPS]
            light = [each for each in files if each not in self._with_needs]
            heavy = sorted(self._with_needs.intersection(files), key=self._place)
            if is_quiet(node):
                chosen = next(iter(groups + light), None)
            elif self._alone_elsewhere(node):
                without_packets = [each for each in heavy if not each.startswith(WITH_PACKETS)]
                labs = [each for each in heavy if not each.startswith(ALONE)]
                chosen = next(iter(light + without_packets + labs + heavy + groups), None)
            else:
                chosen = next(iter(heavy + light + groups), None)
            if chosen is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _alone_elsewhere(self, node: WorkerController) -> bool:
        """Return whether a process other than this one runs tests that load the whole machine."""
        return any(
            scope.startswith(ALONE) and not all(tests.values())
            for other, scopes in self.assigned_work.items()
            if other is not node
            for scope, tests in scopes.items()
        )

    def _reschedule(self, node: WorkerController) -> None:
        # A process needs only one further test: a test that is assigned to it cannot be moved to
        # another process that is idle.
        if self.workqueue and self._pending_of(self.assigned_work[node]) > 1:
            return
        super()._reschedule(node)

    def _place(self, scope: str) -> tuple[int, str]:
        """Return the sort key of a file. First come the files in ALONE, then the longest files, so
        that no process runs one of them while the others are idle."""
        order = (*ALONE, *LAST)
        found = (at for at, each in enumerate(order) if scope.startswith(each))
        return next(found, len(order)), scope

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
    config.stash[_quiet] = tuple(f"gw{processes + number}" for number in range(len(GROUPS)))
    return processes + len(GROUPS)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    if _stacks not in node.config.stash:
        node.config.stash[_stacks] = Path(tempfile.mkdtemp(prefix="fairlead-tests-"))
    node.workerinput["stacks"] = str(node.config.stash[_stacks] / node.gateway.id)
    node.workerinput["needs"] = str(node.config.stash[_stacks] / f"needs-{node.gateway.id}")
    node.workerinput["quiet"] = node.gateway.id in node.config.stash.get(_quiet, ())


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        _machine.enter_context(machine.lengthen_queue())
    else:
        faulthandler.enable(open(session.config.workerinput["stacks"], "w"))  # noqa: SIM115
        if session.config.workerinput["quiet"]:
            os.nice(NICE)
            priority.lower()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: WorkerController) -> None:
    _processes[node] = node.gateway._rinfo().pid


def pytest_sessionfinish(session: pytest.Session) -> None:
    priority.restore()
    _machine.close()
    excluded = session.config.stash.get(_excluded, None)
    if excluded is not None and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["excluded"] = dict(excluded)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    # This function is called twice for an interrupted process.
    if (process := _processes.pop(node, None)) is not None:
        priority.remove(process)
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
    item.stash[_before] = machine.measure(time.monotonic_ns())
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
        usage = item.stash[_before].describe_until(machine.measure(time.monotonic_ns()))
        report.sections.append((MACHINE, f"{usage}; load averages {machine.load()}"))
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
    _report_machine(terminalreporter)
    _report_stacks(terminalreporter)


def _report_machine(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the state of the machine during the failed tests."""
    for kind in ("failed", "error"):
        for report in terminalreporter.getreports(kind):
            for title, text in report.sections:
                if title == MACHINE:
                    terminalreporter.write_line(f"{report.nodeid}, {report.when}: {text}")


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
