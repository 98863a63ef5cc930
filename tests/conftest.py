"""What holds for the whole run: it needs root, quick tests come first, whole labs last; and the
real API server.

The run is shared out over processes side by side (pytest-xdist), file by file. What the run shares,
the real API server, each process has for itself; what tests make outside is named by the process.

Where kube-apiserver, kube-proxy, etcd, helm or the official Python client cannot be had, the tests
that need them are skipped, named in red at the end, and counted in the last line. In CI nothing is
skipped: they fail.

A lab in which a test has failed is not used again: the next test gets a new one.

A test has a second attempt only if it is in AGAIN, with the cause that was found for its failures
outside of Fairlead. The first failure is printed, and the name of the test is printed in red at the
end. No folder has second attempts: a packet, a connection or a write that is lost only sometimes is
a defect, and a second attempt would hide it.
"""

import asyncio
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings
from tests import needs
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from bench import scale
from fairlead.errors import Refused
from fairlead.lab.kubeapiserver import KubeApiServer, find_program

pytest_plugins = ["tests.openstack.fixtures"]

CLOUD = (
    *(
        f"tests/drivers/octavia/test_{each}"
        for each in ("both_families", "controller_dies", "floating", "network_leftovers", "ovn")
    ),
    *(f"tests/drivers/octavia/test_{each}" for each in ("packets", "provider_refuses", "security")),
    "tests/openstack/test_cloud",
)
OPENSTACK = (*CLOUD, "tests/openstack/", "tests/drivers/octavia/", "tests/roles/test_octavia")
"""Their servers are many, and a process that needs them starts them once: one process has all tests
that need Neutron, another those that need Octavia alone."""
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
"""Tests that bring up whole labs and take minutes; those that take the most of them first, that no
process runs one of them while the others have nothing left to do."""
AGAIN: dict[str, str] = {}
"""The only tests that have a second attempt: the start of the test's id, and the cause of its
failures, which lies outside of Fairlead."""
ROWS = {
    "tests/e2e/test_leadership.py": ("embedded", "real"),
    "tests/e2e/test_random_changes.py": ("embedded", "real"),
    "tests/e2e/test_service_life.py": ("embedded", "real"),
    "tests/e2e/test_ten_thousand.py": ("ten thousand", "l2 and vxlan"),
}
"""Files with a lab for each row of a parameter: the rows may run side by side."""
NICE = 5
KUBECTL_MINOR = 24
"""The first that has `kubectl create token` and `--subresource`."""
NEEDED = "needs a program that is not there"
MOST_PROCESSES = 6
"""On larger machines the tests that take longest leave less and less to gain."""

HISTORIES = int(os.environ.get("FAIRLEAD_HISTORIES") or 4)
"""At Octavia; each takes a busy machine a quarter of a minute."""

_failed = pytest.StashKey[bool]()
_left_out = pytest.StashKey[dict[str, int]]()
"""What the tests need that --check leaves out, and how many tests need it."""
_guard = needs.Guard()
_quiet = pytest.StashKey[str]()
"""The id of the process that gives way to the others."""
_stacks = pytest.StashKey[Path]()
"""The folder in which a process that dies of a signal leaves its stacks."""
_processes: dict[WorkerController, int] = {}
"""Those who run tests for this one, by their process id."""

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # a busy machine proves nothing about an example


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check", action="store_true", help="only tests that need no more than `make base`"
    )
    parser.addoption(
        "--histories", type=int, default=HISTORIES, help="so many random histories of class octavia"
    )


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() != 0:
        pytest.exit(
            "the tests send real packets through namespaces that they make: run them as root",
            returncode=1,
        )
    # What a shell starts in the background ignores Ctrl-C, and so would all that is started here;
    # tests press it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        # Ctrl-C in a terminal goes to all of the foreground; these are to hear of it once, from the
        # one that waits for them.
        os.setpgrp()
    elif config.getvalue("numprocesses"):
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _interrupt_processes)
    _prefer_new_kubectl()


def _interrupt_processes(_signal: int, _frame: FrameType | None) -> None:
    """They take down their labs and end, and so does the run. pytest-xdist would leave them ten
    seconds to do so."""
    if not _processes:
        raise KeyboardInterrupt
    for process in _processes.values():
        os.killpg(process, signal.SIGINT)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """What shares a lab stays together, in its order.

    With one process for each processor there is one more, `quiet`, which gives way to the others
    (NICE). It takes only files that need no more than `make base`, and ends when there are none
    left. The others take labs first: a lab waits for most of its time, and the tests without a lab
    have the processors meanwhile."""

    def mark_test_pending(self, item: str) -> None:
        """A test in which its process has died has its second attempt like others. There is nothing
        to do: what a process that is gone had not finished, this test with it, waits for the next
        already."""

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
        # A process needs to know the test after the one that it runs, and no more: what is
        # assigned to it cannot be taken by another that has nothing left to do.
        if self.workqueue and self._pending_of(self.assigned_work[node]) > 1:
            return
        super()._reschedule(node)

    def _place(self, scope: str) -> tuple[int, str]:
        """What takes longest comes first, so that no process runs it while the others have nothing
        left to do."""
        found = (number for number, each in enumerate(LAST) if scope.startswith(each))
        return (-1 if scope in GROUPS else next(found, len(LAST))), scope

    @cached_property
    def _with_needs(self) -> set[str]:
        """What has a test that needs more than `make base`, as the processes have found."""
        (found, *_) = self.config.stash[_stacks].glob("needs-*")
        return {self._split_scope(each) for each in found.read_text().splitlines()}


def is_quiet(process: WorkerController) -> bool:
    return bool(process.workerinput.get("quiet"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means."""
    # One for each processor. A lab is many processes; three on two processors kept each other's
    # from answering in time.
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if config.getoption("check"):
        return processes
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
    left_out = session.config.stash.get(_left_out, None)
    if left_out is not None and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    _processes.pop(node, None)  # told twice of one that was interrupted
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_left_out] = dict(left_out)  # each process has collected all tests


def _prefer_new_kubectl() -> None:
    """Debian 12's kubectl is of 2020; where there is no newer one, the tests use the one that `make
    tools` built."""
    with suppress(OSError, ValueError, KeyError):
        command = ["kubectl", "version", "--client", "-o", "json"]
        told = json.loads(
            subprocess.run(command, capture_output=True, check=False, timeout=30).stdout
        )
        if int(told["clientVersion"]["minor"].rstrip("+")) >= KUBECTL_MINOR:
            return
    with suppress(Refused):
        built = find_program("kubectl", {**os.environ, "PATH": ""})
        os.environ["PATH"] = os.pathsep.join(
            (str(built.parent), os.environ.get("PATH", os.defpath))
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [(item, needs.of(item)) for item in items]
    if hasattr(config, "workerinput"):
        with_needs = [item.nodeid for item, need in found if need]
        Path(config.workerinput["needs"]).write_text("\n".join(with_needs))
    if config.getoption("check"):
        config.stash[_left_out] = Counter([need for _, need in found if need])
        items[:] = [item for item, need in found if not need]
        config.hook.pytest_deselected(items=[item for item, need in found if need])
    items.sort(
        key=lambda item: next(
            (place for place, each in enumerate(LAST) if item.nodeid.startswith(each)), -1
        )
    )
    for item in items:
        if item.nodeid.startswith(tuple(AGAIN)):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What starts while this test runs is started for it."""
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
    """A lab in which a test has failed is not used again, by a second attempt or by the next test:
    its state is not known."""
    if item.stash.get(_failed, False):
        item.stash[_failed] = False
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]  # all but what the run shares


@pytest.fixture(scope="session")
def real_programs() -> None:
    """A test that takes this runs only where kube-apiserver and etcd are."""
    needed(partial(find_program, "kube-apiserver"))
    needed(partial(find_program, "etcd"))


@pytest.fixture(scope="session")
def older_etcd() -> Path:
    """Debian's etcd, over which kube-apiserver has no streamed lists. A test with this fixture
    needs that etcd."""
    return needed(find_older_etcd)


@pytest.fixture(scope="session")
def kube_proxy() -> Path:
    """The program. A test that takes this runs only where it is."""
    return needed(partial(find_program, "kube-proxy"))


@pytest.fixture(scope="session")
def helm() -> Path:
    """The program, likewise."""
    return needed(partial(find_program, "helm"))


@pytest.fixture(scope="session")
def systemd_analyze() -> Path:
    """The program, likewise."""
    return needed(partial(find_program, "systemd-analyze"))


@pytest.fixture(scope="session")
def official_client() -> Path:
    """The Python that has the official client, likewise."""
    return needed(scale.official_client)


def needed(find: Callable[[], Path]) -> Path:
    """Where it is; without it the test ends here."""
    try:
        return find()
    except Refused as error:
        if os.environ.get("CI"):
            pytest.fail(f"{NEEDED}: {error}")
        pytest.skip(f"{NEEDED}: {error}")


@pytest.fixture(scope="session")
def real_apiserver(
    real_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeApiServer]:
    """One real API server for all tests of this process. They keep out of each other's way by
    namespaces and names, and clear away what belongs to no namespace."""
    server = KubeApiServer(tmp_path_factory.mktemp("kube-apiserver"), lab=f"tests{os.getpid()}")
    asyncio.run(server.up())
    yield server
    asyncio.run(server.down())


@pytest.fixture(scope="session")
def older_real_apiserver(
    real_programs: None, older_etcd: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeApiServer]:
    """A real API server over an etcd that is too old for streamed lists, as many clusters still
    have it."""
    server = KubeApiServer(
        tmp_path_factory.mktemp("older-etcd"), lab=f"tests{os.getpid()}", etcd=older_etcd
    )
    asyncio.run(server.up())
    yield server
    asyncio.run(server.down())


def find_older_etcd() -> Path:
    """The path to which `make tools` unpacked Debian's etcd. Raises Refused if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = cache / "fairlead" / "debian-etcd" / "etcd"
    if not os.access(found, os.X_OK):
        raise Refused(
            f"{found} is not there", fix="run `make tools`: it takes this etcd from Debian"
        )
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _tell_without(terminalreporter)
    _tell_left_out(terminalreporter)
    _tell_second_attempts(terminalreporter)
    _tell_stacks(terminalreporter)


def _tell_stacks(terminalreporter: pytest.TerminalReporter) -> None:
    folder = terminalreporter.config.stash.get(_stacks, None)
    if folder is None:
        return
    for each in sorted(folder.glob("gw*")):
        if text := each.read_text(errors="replace"):
            terminalreporter.write_line(
                f"process {each.name} of the tests died, a defect wherever it is:\n{text}", red=True
            )
    shutil.rmtree(folder, ignore_errors=True)


def _tell_without(terminalreporter: pytest.TerminalReporter) -> None:
    """What --check left out, by its needs."""
    left_out = terminalreporter.config.stash.get(_left_out, None)
    if left_out is None:
        return
    total = sum(left_out.values())
    terminalreporter.write_line(f"--check left out {total} tests; make test runs them:")
    for needed_by, number in sorted(left_out.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"  {number} need {needed_by}")


def _tell_left_out(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [
        report
        for report in terminalreporter.getreports("skipped")
        if NEEDED in str(report.longrepr)
    ]
    for why in sorted(
        {str(report.longrepr).split(NEEDED, 1)[1].rstrip("')") for report in left_out}
    ):
        tests = [report.nodeid for report in left_out if why in str(report.longrepr)]
        terminalreporter.write_line(
            f"{len(tests)} tests did not run, for they need a program that is not there{why}",
            red=True,
        )
        for test in tests:
            terminalreporter.write_line(f"  {test}", red=True)


def _tell_second_attempts(terminalreporter: pytest.TerminalReporter) -> None:
    """Those that passed then: what the first said, and last their names."""
    lost = {
        report.nodeid
        for kind in ("failed", "error")
        for report in terminalreporter.getreports(kind)
    }
    first = [report for report in terminalreporter.getreports("rerun") if report.nodeid not in lost]
    for report in first:
        terminalreporter.write_sep("_", f"first attempt of {report.nodeid}, {report.when}")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_sep("-", title)
            terminalreporter.write_line(text)
    if first:
        terminalreporter.write_line(
            f"{len(first)} tests passed only at their second attempt; the first ended so:", red=True
        )
    for report in first:
        reason = [
            line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")
        ] or ["?"]
        known = next(
            (
                f" (known cause: {cause})"
                for test, cause in AGAIN.items()
                if report.nodeid.startswith(test)
            ),
            "",
        )
        terminalreporter.write_line(f"  {report.nodeid}: {reason[0]}{known}", red=True)
