"""What a test needs beyond `make base`, and the proof that no other test needs more.

`make check` leaves out each test that brings up a lab, starts an API server of its own process,
needs a program that `make tools` builds or installs, or takes long. A test has a need if it uses a
fixture of FIXTURES, directly or through another fixture, or if its file is in LABS or in LONG.

In every run, `make test` too, a test without a need fails when it starts a process of a lab or one
of the programs. A new test therefore cannot slip into `make check`."""

import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fairlead.lab import kubeapiserver, process, server

LAB, LONG_NEED = "a lab", "more than a few seconds"
FIXTURES = {
    "openstack_programs": "OpenStack",
    "kube_proxy": "kube-proxy",
    "older_etcd": "kube-apiserver",
    "real_programs": "kube-apiserver",
    "helm": "helm",
    "systemd_analyze": "systemd-analyze",
    "official_client": "the official Python client",
}
"""Fixtures, and what a test needs that uses one of them."""
REAL = ("real", "older-etcd")
"""Parameters for which a fixture takes kube-apiserver in place of the embedded API server."""
LABS = (
    *(f"tests/bench/test_{each}.py" for each in ("lab", "live", "nodes", "octavia", "proxy")),
    "tests/bench/test_scale.py",
    "tests/cli/test_lab.py",
    *(f"tests/deploy/test_{each}.py" for each in ("capabilities", "rights", "uninstall")),
    "tests/e2e/",
    "tests/faults/",
    *(f"tests/lab/test_{each}.py" for each in ("demo", "networks", "requirements", "roles")),
    *(f"tests/lab/test_{each}.py" for each in ("site", "teardown")),
)
"""Folders and files whose tests bring up labs."""
WITHOUT = ("tests/e2e/test_oracle.py",)
"""Files of LABS whose tests need no lab."""
LONG: tuple[str, ...] = ()
"""Tests that need no more than `make base`, and take long."""
REFUSED = (
    "tests/cli/test_cli.py::test_without_root_the_error_names_commands_that_work",
    "tests/deploy/test_wheel.py::test_the_error_about_a_command_that_the_wheel_lacks_tells_where_it_is",
)
"""Tests that run `fairlead lab up` where it is refused at once."""
SERVERS = (server.SERVER_LABEL, kubeapiserver.LABEL, kubeapiserver.ETCD_LABEL)
"""Labels of processes without which there is no lab."""
PROGRAMS = {
    "helm": "helm",
    "kube-apiserver": "kube-apiserver",
    "kube-proxy": "kube-proxy",
    "mariadbd": "OpenStack",
    "ovsdb-server": "OpenStack",
    "systemd-analyze": "systemd-analyze",
}
"""Names of programs, and the need that a test has which starts one of them."""


def need(nodeid: str, fixtures: Iterable[str]) -> str | None:
    """What the test needs beyond `make base`, or None."""
    used = set(fixtures)
    for name, needed in FIXTURES.items():
        if name in used:
            return needed
    if nodeid.startswith(LABS) and not nodeid.startswith(WITHOUT):
        return LAB
    return LONG_NEED if nodeid.startswith(LONG) else None


def of(item: pytest.Item) -> str | None:
    """What the collected test needs beyond `make base`, or None."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    if any(isinstance(value, str) and value in REAL for value in values):
        return FIXTURES["real_programs"]
    return need(item.nodeid, getattr(item, "fixturenames", ()))


def started(argv: Sequence[Any], environment: Mapping[str, str] | None) -> str | None:
    """The need of a test that starts this process, or None."""
    if (environment or {}).get(process.LABEL) in SERVERS:
        return LAB
    words = [os.fsdecode(word) for word in argv if isinstance(word, str | bytes | os.PathLike)]
    for before, word in itertools.pairwise(words):
        if (before, word) == ("lab", "up") and "--help" not in words:
            return LAB
    return PROGRAMS.get(Path(words[0]).name) if words else None


class Guard:
    """Ends a test that starts a process which its needs do not cover."""

    def __init__(self) -> None:
        self.test: pytest.Item | None = None
        """The test that runs, with its fixtures."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen" or self.test is None or of(self.test):
            return
        if self.test.nodeid.startswith(REFUSED):
            return
        _, argv, _, environment = arguments
        if found := started([argv] if isinstance(argv, str) else argv, environment):
            pytest.fail(
                f"{self.test.nodeid} needs {found}, and make check would run it: "
                f"use the fixture for it, or list the file in tests/needs.py"
            )
