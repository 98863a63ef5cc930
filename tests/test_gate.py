"""The gate: a test that leaves its process has a second look, alone, after the others."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests import needs, nested
from tools import gate

FAILS_ONCE = """
import subprocess
import sys
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range({number}))
def test_packets(number):
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    seen = Path(__file__).with_suffix(f".{{number}}")
    if not seen.exists():
        seen.touch()
        raise AssertionError("a packet was lost")

def test_another():
    pass
"""
SKIPS = """
    pytest.skip("needs something")
"""
FAILS_TWICE = """
import subprocess
import sys

def test_packets():
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    raise AssertionError("every packet was lost")
"""
PURE = """
from pathlib import Path

def test_pure():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("a defect")
"""
DIES = """
import os
import signal
from pathlib import Path

def test_it():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
FAILS_AND_THEN_WAITS = """
import subprocess
import sys
import time
from pathlib import Path

def test_it():
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("a packet was lost")
    Path(__file__).with_suffix(".begun").touch()
    try:
        time.sleep(60)
    finally:
        Path(__file__).with_suffix(".over").touch()
"""
WAITS = """
import time
from pathlib import Path

def test_it():
    Path(__file__).with_suffix(".begun").touch()
    try:
        time.sleep(60)
    finally:
        Path(__file__).with_suffix(".over").touch()
"""


def start(folder: Path, tests: dict[str, str], *, processes: int = 0) -> "subprocess.Popen[str]":
    return nested.start(
        folder,
        tests,
        *("-n", str(processes)),
        program=(str(nested.ROOT / "tools/gate.py"),),
        env={"XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(folder: Path, tests: dict[str, str], *, processes: int = 0) -> tuple[int, str]:
    """Run the gate on `tests` (path below tests/: source). Return the exit code and the output."""
    with start(folder, tests, processes=processes) as running:
        printed, _ = running.communicate(timeout=120)
    return running.returncode, printed


@pytest.mark.long
def test_an_unstable_test_is_printed_and_noted_with_its_first_failure(tmp_path: Path) -> None:
    code, printed = run(tmp_path, {"lab/test_it.py": FAILS_ONCE.format(number=1)})
    assert code == 0, printed
    assert "gate: UNSTABLE: tests/lab/test_it.py::test_packets[0] passed" in printed
    (noted,) = json.loads((tmp_path / "build/unstable.json").read_text())
    assert noted["test"] == "tests/lab/test_it.py::test_packets[0]"
    assert "AssertionError: a packet was lost" in noted["failure"]


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"lab/test_it.py": FAILS_TWICE}, "tests/lab/test_it.py::test_packets failed twice"),
        ({"plan/test_it.py": PURE}, "test_pure never left its process, or its process died"),
        (
            {"lab/test_it.py": FAILS_ONCE.format(number=gate.MOST_UNSTABLE + 1)},
            "4 tests are unstable, more than 3",
        ),
        (
            {"lab/test_it.py": FAILS_ONCE.format(number=gate.MOST_FAILED + 1)},
            "more than 10 tests have failed",
        ),
    ],
    ids=["fails twice", "pure", "four unstable", "eleven failed"],
)
def test_the_run_fails(tmp_path: Path, tests: dict[str, str], why: str) -> None:
    code, printed = run(tmp_path, tests)
    assert code == 1, printed
    assert why in printed


def test_a_file_that_cannot_be_collected_is_not_hidden_by_an_unstable_test(tmp_path: Path) -> None:
    tests = {
        "lab/test_broken.py": "import a_module_that_is_not_there",
        "lab/test_it.py": FAILS_ONCE.format(number=1),
    }
    code, printed = run(tmp_path, tests, processes=1)
    assert code == 1, printed
    assert "no second look: tests/lab/test_broken.py" in printed


def test_a_test_that_is_skipped_in_the_second_look_has_not_passed(tmp_path: Path) -> None:
    text = FAILS_ONCE.format(number=1).replace("\ndef test_another", SKIPS + "\ndef test_another")
    code, printed = run(tmp_path, {"lab/test_it.py": text})
    assert code == 1, printed
    assert "test_packets[0] failed twice" in printed


def test_a_test_whose_process_dies_has_no_second_look(tmp_path: Path) -> None:
    code, printed = run(tmp_path, {"lab/test_it.py": DIES}, processes=1)
    assert code == 1, printed
    assert "test_it never left its process, or its process died" in printed


@pytest.mark.parametrize("text", [WAITS, FAILS_AND_THEN_WAITS], ids=["first", "second"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_waits_for_its_tests_and_accepts_nothing(
    tmp_path: Path, signum: signal.Signals, text: str
) -> None:
    begun = tmp_path / "tests/lab/test_it.begun"
    with start(tmp_path, {"lab/test_it.py": text}, processes=1) as running:
        while not begun.exists():
            assert running.poll() is None
            time.sleep(0.05)
        if signum == signal.SIGINT:
            # A terminal sends Ctrl-C to the whole process group: to the gate and to pytest.
            (child,) = children(running.pid)
            os.kill(child, signum)
        running.send_signal(signum)
        printed, _ = running.communicate(timeout=60)
    assert running.returncode == gate.INTERRUPTED, printed
    assert begun.with_suffix(".over").exists()
    assert "gate: passed" not in printed


def children(pid: int) -> list[int]:
    """Return the children of the process."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_run_that_passes_notes_its_tree_unless_there_are_uncommitted_changes(
    tmp_path: Path,
) -> None:
    def git(*arguments: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *names, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    tests = {"plan/test_it.py": "def test_it():\n    pass\n"}
    noted = tmp_path / "cache/fairlead/passed"
    git("init", "-q")
    assert run(tmp_path, tests)[0] == 0
    assert not noted.exists()
    (tmp_path / ".gitignore").write_text("build\ncache\n__pycache__\n")
    git("add", ".")
    git("commit", "-qm", "all")
    assert run(tmp_path, tests)[0] == 0
    assert noted.read_text().split() == [git("rev-parse", "HEAD^{tree}")]


def test_a_run_with_skipped_tests_and_a_run_during_which_the_tree_changes_note_no_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = [{**row("a", "skipped"), "text": f"Skipped: {needs.MISSING}: helm"}]
    gate.remember("a tree", rows)
    gate.remember("a tree", [row("a", "passed")])
    assert list(tmp_path.iterdir()) == []


def row(test: str, outcome: str, *, left: bool = True) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "left_the_process": left, "text": f"{test} failed"}


def test_a_failure_of_the_set_up_has_a_second_look_too_and_the_first_text_counts() -> None:
    rows = [row("a", "passed"), row("b", "failed"), {**row("b", "failed"), "text": "later"}]
    assert gate.decide(rows) == gate.Decision({"b": "b failed"})


def test_a_run_that_fails_without_a_failed_test_has_no_second_look() -> None:
    assert gate.decide([row("a", "passed")]).why_not
