"""The table of `make soak`, and its rounds."""

import json
import subprocess
from pathlib import Path

from tests import nested
from tools import soak

TESTS = """
import os

import pytest

@pytest.mark.soak
def test_statistics():
    assert os.environ["FAIRLEAD_SEED"] != "7"

@pytest.mark.random
def test_random():
    assert os.environ["FAIRLEAD_CHANGES"] == "240"

def test_gate():
    raise AssertionError("not a part of it")
"""


def test_a_failure_is_shown_with_its_seed_and_is_no_error(tmp_path: Path) -> None:
    program = (str(nested.ROOT / "tools/soak.py"),)
    environment = {"FAIRLEAD_SEED": "7", "ROUNDS": "2", "FAIRLEAD_CHANGES": "240"}
    with nested.start(
        tmp_path,
        {"lab/test_it.py": TESTS},
        program=program,
        env=environment,
        stdout=subprocess.PIPE,
    ) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    lines = printed.splitlines()
    first = next(number for number, line in enumerate(lines) if line.endswith("  test"))
    assert lines[first + 1].split()[:2] == ["2", "2"]
    assert lines[first + 1].endswith("test_it.py::test_statistics  failed with seed 7, 7")
    assert lines[first + 2].split()[:2] == ["2", "0"]
    (kept,) = (tmp_path / "build/soak").glob("*.json")
    runs = json.loads(kept.read_text())
    assert set(runs) == {f"tests/lab/test_it.py::test_{name}" for name in ("statistics", "random")}
    assert "AssertionError" in runs["tests/lab/test_it.py::test_statistics"][1]["failure"]


def test_the_duration_of_a_run_includes_set_up_and_teardown() -> None:
    phases = [("setup", 1.5), ("call", 2.0), ("teardown", 0.25)]
    rows = [
        {"test": "a", "when": when, "outcome": "passed", "seconds": seconds, "text": ""}
        for when, seconds in phases
    ]
    assert soak.runs(rows) == {"a": {"outcome": "passed", "seconds": 3.75, "failure": ""}}
