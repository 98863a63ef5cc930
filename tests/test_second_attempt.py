"""A test of labs that fails has a second attempt, in a lab of its own, and does not do so in secret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    """Our settings and conftest over these tests, in so many processes (0: one alone): the exit code, and what was printed."""
    (folder / "lab").mkdir(parents=True)
    ours = (ROOT / "tests/conftest.py").read_text()
    (folder / "conftest.py").write_text(ours.replace("pytest_plugins = ", "needless = "))  # the fixtures of our own tests
    (folder / "lab/test_it.py").write_text(tests)
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder.parent), "-p", "no:cacheprovider")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(processes), *settings, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("processes", [0, 2])
def test_what_passes_only_then_is_named_with_the_first_failure(tmp_path: Path, processes: int) -> None:
    code, printed = run(tmp_path / "tests", TESTS, processes=processes)
    assert code == 0, printed
    assert "first attempt of tests/lab/test_it.py::test_rarely" in printed
    assert "1 tests passed only at their second attempt" in printed
    assert "  tests/lab/test_it.py::test_rarely: AssertionError: a packet was lost" in printed


@pytest.mark.parametrize("processes", [0, 2])
def test_what_fails_twice_has_failed(tmp_path: Path, processes: int) -> None:
    code, printed = run(tmp_path / "tests", TESTS + DEFECT, processes=processes)
    assert code == 1
    assert "FAILED tests/lab/test_it.py::test_never - AssertionError: a defect" in printed
    assert "1 tests passed only at their second attempt" in printed
