"""The needs of tests: what they require beyond `make base`, and a guard that checks this.

`make check` excludes each test that starts a lab or an API server as a process, needs a program
that `make tools` builds or installs. A test has a need if it uses a fixture of
FIXTURES, directly or through another fixture, or if its file is in LABS.

In every run, also in `make test`, a test without a need fails when it starts a process of a lab or
one of the programs. So `make check` never runs a test that needs more."""

import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fairlead.lab import kubeapiserver, process, server

LAB = "a lab"
MISSING = "needs a program that is not there"
"""The start of the reason for which a test is skipped or fails if its program is missing."""
FIXTURES = {
    "bird": "BIRD",
    "openstack_programs": "OpenStack",
    "kube_proxy": "kube-proxy",
    "older_etcd": "kube-apiserver",
    "real_programs": "kube-apiserver",
    "helm": "helm",
    "systemd_analyze": "systemd-analyze",
    "official_client": "the official Python client",
}
"""Fixtures, and the need of a test that uses them."""
REAL = ("real", "older-etcd")
"""Values of parameters for which a fixture uses kube-apiserver instead of the embedded server."""
LABS = (
    *(f"tests/bench/test_{each}.py" for each in ("announce", "lab", "live", "nodes")),
    *(f"tests/bench/test_{each}.py" for each in ("octavia", "outages", "proxy", "scale")),
    *(f"tests/bench/test_{each}.py" for each in ("migration", "tenant")),
    "tests/cli/test_lab.py",
    *(f"tests/deploy/test_{each}.py" for each in ("capabilities", "rights", "uninstall")),
    "tests/e2e/",
    "tests/faults/",
    *(f"tests/lab/test_{each}.py" for each in ("demo", "networks", "requirements", "roles")),
    *(f"tests/lab/test_{each}.py" for each in ("site", "teardown")),
)
"""Folders and files whose tests start labs."""
WITHOUT = ("tests/e2e/test_oracle.py",)
"""Files of LABS whose tests need no lab."""
REFUSED_COMMANDS = (
    "tests/cli/test_cli.py::test_without_root_the_error_names_commands_that_work",
    "tests/deploy/test_wheel.py::test_the_error_about_a_command_that_the_wheel_lacks_tells_where_it_is",
)
"""Tests that run a `fairlead lab up` that is refused at once."""
SERVERS = (server.SERVER_LABEL, kubeapiserver.LABEL, kubeapiserver.ETCD_LABEL)
"""Labels of processes that every lab has."""
PROGRAMS = {
    "bird": "BIRD",
    "helm": "helm",
    "kube-apiserver": "kube-apiserver",
    "kube-proxy": "kube-proxy",
    "mariadbd": "OpenStack",
    "ovsdb-server": "OpenStack",
    "systemd-analyze": "systemd-analyze",
}
"""Names of programs, and the need of a test that starts them."""
OUTSIDE = ("subprocess.Popen", "socket.bind", "socket.connect", "socket.sendto")
"""Audit events of Python by which a test leaves its own process."""


def need_of_test(nodeid: str, fixtures: Iterable[str]) -> str | None:
    """Return the need of a test with these fixtures; None if it has none."""
    used = set(fixtures)
    for name, needed in FIXTURES.items():
        if name in used:
            return needed
    if nodeid.startswith(LABS) and not nodeid.startswith(WITHOUT):
        return LAB
    return None


def need_of(item: pytest.Item) -> str | None:
    """Return the need of the collected test; None if it has none."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    if any(isinstance(value, str) and value in REAL for value in values):
        return FIXTURES["real_programs"]
    return need_of_test(item.nodeid, getattr(item, "fixturenames", ()))


def need_of_process(argv: Sequence[Any], environment: Mapping[str, str] | None) -> str | None:
    """Return the need of a test that starts this process; None if it has none."""
    if (environment or {}).get(process.LABEL) in SERVERS:
        return LAB
    words = [os.fsdecode(word) for word in argv if isinstance(word, str | bytes | os.PathLike)]
    for before, word in itertools.pairwise(words):
        if (before, word) == ("lab", "up") and "--help" not in words:
            return LAB
    return PROGRAMS.get(Path(words[0]).name) if words else None


class Guard:
    """Fails a test that has no need and starts a process that requires one, and notices whether a
    test leaves its own process."""

    def __init__(self) -> None:
        self._test: pytest.Item | None = None
        self.left_the_process = False
        """Whether the test has started a process, or used a socket with an address."""
        sys.addaudithook(self._on_audit_event)

    def start(self, test: pytest.Item | None) -> None:
        """Begin with this test and its fixtures; None: no test runs."""
        self._test, self.left_the_process = test, False

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OUTSIDE or self._test is None:
            return
        self.left_the_process = True
        if event != "subprocess.Popen" or need_of(self._test):
            return
        if self._test.nodeid.startswith(REFUSED_COMMANDS):
            return
        _, argv, _, environment = arguments
        if found := need_of_process([argv] if isinstance(argv, str) else argv, environment):
            pytest.fail(
                f"{self._test.nodeid} needs {found}, but make check would run it; "
                f"use the fixture for this need, or list the file in tests/needs.py"
            )
