"""Tests with a second attempt. The first failure is always printed."""

import subprocess
from pathlib import Path

import pytest
from tests import nested

TESTS = """
import pytest

labs = []

@pytest.fixture(scope="module")
def lab():
    labs.append("")
    return len(labs)

def test_first(lab):
    assert lab == 1

def test_rarely(lab):
    assert lab == 2, "a packet was lost"

def test_later(lab):
    assert lab == 2
"""
DEFECT = """
def test_never():
    raise AssertionError("a defect")
"""


def run(
    folder: Path, tests: dict[str, str], *, processes: int, retried: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run `tests` (path below tests/: source), with `retried` as RETRIED. Return the exit code and
    the output."""
    with nested.start(
        folder, tests, processes=processes, retried=retried, stdout=subprocess.PIPE
    ) as running:
        printed, _ = running.communicate(timeout=120)
    return running.returncode, printed


@pytest.mark.parametrize(("processes", "folder"), [(0, "e2e"), (2, "lab")])
def test_a_test_that_passes_at_the_second_attempt_is_reported_with_its_first_failure(
    tmp_path: Path, processes: int, folder: str
) -> None:
    test = f"tests/{folder}/test_it.py::test_rarely"
    code, printed = run(
        tmp_path,
        {f"{folder}/test_it.py": TESTS},
        processes=processes,
        retried={test: "the router forgets"},
    )
    assert code == 0, printed
    assert f"first attempt of {test}" in printed
    assert "1 tests passed only at their second attempt" in printed
    known = "AssertionError: a packet was lost (known cause: the router forgets)"
    assert f"  {test}: {known}" in printed


def test_a_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    causes = {"test_rarely": "the router forgets", "test_never": "none: it is a defect"}
    code, printed = run(
        tmp_path,
        {"lab/test_it.py": TESTS + DEFECT},
        processes=2,
        retried={f"tests/lab/test_it.py::{test}": cause for test, cause in causes.items()},
    )
    assert code == 1
    assert "FAILED tests/lab/test_it.py::test_never - AssertionError: a defect" in printed
    assert "1 tests passed only at their second attempt" in printed


def test_a_test_that_is_not_listed_has_no_second_attempt_in_any_folder(tmp_path: Path) -> None:
    """The tests after the failure nevertheless get a new lab."""
    folders = ("drivers", "e2e", "faults", "kube", "lab", "net")
    code, printed = run(
        tmp_path,
        {f"{folder}/test_it.py": TESTS for folder in folders},
        processes=0,
        retried={"tests/lab/test_another.py": "it makes the run load the plugin"},
    )
    assert code == 1
    for folder in folders:
        failed = f"FAILED tests/{folder}/test_it.py::test_rarely"
        assert f"{failed} - AssertionError: a packet was lost" in printed
    assert f"{len(folders)} failed, {2 * len(folders)} passed" in printed
    assert "second attempt" not in printed
