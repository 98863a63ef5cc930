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
    folder: Path, tests: str, *, processes: int, file: str = "lab/test_it.py", **known: str
) -> tuple[int, str]:
    """Run `tests` as a file of tests/, with `known` (test: cause) as RETRIED. Return the exit code
    and the output."""
    retried = {f"tests/{file}::{test}": cause for test, cause in known.items()}
    with nested.start(
        folder, {file: tests}, processes=processes, retried=retried, stdout=subprocess.PIPE
    ) as running:
        printed, _ = running.communicate(timeout=120)
    return running.returncode, printed


@pytest.mark.parametrize("processes", [0, 2])
def test_a_test_that_passes_at_the_second_attempt_is_reported_with_its_first_failure(
    tmp_path: Path, processes: int
) -> None:
    code, printed = run(tmp_path, TESTS, processes=processes, test_rarely="the router forgets")
    assert code == 0, printed
    assert "first attempt of tests/lab/test_it.py::test_rarely" in printed
    assert "1 tests passed only at their second attempt" in printed
    known = "AssertionError: a packet was lost (known cause: the router forgets)"
    assert f"  tests/lab/test_it.py::test_rarely: {known}" in printed


def test_a_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    causes = {"test_rarely": "the router forgets", "test_never": "none: it is a defect"}
    code, printed = run(tmp_path, TESTS + DEFECT, processes=2, **causes)
    assert code == 1
    assert "FAILED tests/lab/test_it.py::test_never - AssertionError: a defect" in printed
    assert "1 tests passed only at their second attempt" in printed


@pytest.mark.parametrize("folder", ["drivers", "e2e", "faults", "kube", "lab", "net"])
def test_a_test_that_is_not_listed_has_no_second_attempt_in_any_folder(
    tmp_path: Path, folder: str
) -> None:
    """The tests after the failure nevertheless get a new lab."""
    code, printed = run(tmp_path, TESTS, processes=0, file=f"{folder}/test_it.py")
    assert code == 1
    assert (
        f"FAILED tests/{folder}/test_it.py::test_rarely - AssertionError: a packet was lost"
        in printed
    )
    assert "1 failed, 2 passed" in printed
    assert "second attempt" not in printed


def test_a_listed_test_has_a_second_attempt_in_any_folder(tmp_path: Path) -> None:
    code, printed = run(
        tmp_path, TESTS, processes=0, file="e2e/test_it.py", test_rarely="the router forgets"
    )
    assert code == 0, printed
    assert (
        "test_rarely: AssertionError: a packet was lost (known cause: the router forgets)"
        in printed
    )
