"""A test of labs that fails has a second attempt, in a lab of its own, and does not do so in secret."""

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


def run(folder: Path, tests: str, *, processes: int) -> tuple[int, str]:
    """The exit code, and what was printed."""
    with nested.start(folder, {"lab/test_it.py": tests}, processes=processes, stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    return running.returncode, printed


@pytest.mark.parametrize("processes", [0, 2])
def test_what_passes_only_then_is_named_with_the_first_failure(tmp_path: Path, processes: int) -> None:
    code, printed = run(tmp_path, TESTS, processes=processes)
    assert code == 0, printed
    assert "first attempt of tests/lab/test_it.py::test_rarely" in printed
    assert "1 tests passed only at their second attempt" in printed
    assert "  tests/lab/test_it.py::test_rarely: AssertionError: a packet was lost" in printed


def test_what_fails_twice_has_failed(tmp_path: Path) -> None:
    code, printed = run(tmp_path, TESTS + DEFECT, processes=2)
    assert code == 1
    assert "FAILED tests/lab/test_it.py::test_never - AssertionError: a defect" in printed
    assert "1 tests passed only at their second attempt" in printed
