"""Run the tests that decide whether a change is accepted: `python tools/gate.py ARGUMENT...`.

In: arguments of pytest for the first run, in parallel processes. Out: the output of pytest; a
second look at failures; the exit code, 0 if the change is accepted.

A test that sends real packets or starts programs can fail because of the machine. So if at most
MOST_FAILED tests failed, and all of them left their own process, each of them runs once more,
alone. A test that then passes is unstable: it is printed with its first failure and appended to
UNSTABLE. More than MOST_UNSTABLE unstable tests, or one that does not pass, are a failure. A test
that never leaves its process, a file that cannot be collected, a process of the tests that dies and
an interrupt have no second look: the machine does not cause them.

A run that passes, of which no test was skipped for want of a program, appends the git tree that it
ran on to PASSED, if there were no uncommitted changes when it began and there are none now."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

MOST_FAILED = 10
MOST_UNSTABLE = 3
FAILED = 1
"""The exit code of pytest if tests have failed, or files could not be collected."""
MISSING = "needs a program that is not there"
"""The reason for which a test is skipped if its program is missing, as in tests/needs.py."""
INTERRUPTED = 130
BUILD = Path("build")
REPORT = BUILD / f"gate-{os.getpid()}.jsonl"
"""A file of this run alone: two runs may go on in one tree."""
UNSTABLE = BUILD / "unstable.json"
PASSED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead" / "passed"


class Decision(NamedTuple):
    """Which tests run once more, with the text of their first failures; or why none does."""

    again: Mapping[str, str]
    why_not: str = ""


def decide(reports: Iterable[Mapping[str, Any]]) -> Decision:
    """Decide about a second look. `reports`: the rows of --report."""
    failed: dict[str, str] = {}
    inside: list[str] = []
    for each in reports:
        if each["outcome"] != "failed":
            continue
        failed.setdefault(each["test"], each["text"])
        if not each["left_the_process"]:
            inside.append(each["test"])
    if not failed:
        return Decision({}, "no test has failed, but the run has")
    if inside:
        return Decision({}, f"{inside[0]} never left its process, or its process died")
    if len(failed) > MOST_FAILED:
        return Decision({}, f"more than {MOST_FAILED} tests have failed")
    return Decision(failed)


class Gate:
    def __init__(self) -> None:
        self._interrupted = False
        self._running: subprocess.Popen[bytes] | None = None

    def run(self, arguments: Sequence[str]) -> int:
        """Run the tests with these arguments of pytest. Return the exit code."""
        # Ctrl-C in a terminal reaches the tests, which are in the same process group.
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)
        BUILD.mkdir(exist_ok=True)
        tree = clean_tree()
        began_s = time.monotonic()
        # One word: before pytest has loaded tests/conftest.py, which knows the option, it would
        # take an existing file for a path of tests.
        code = self._pytest(f"--report={REPORT}", *arguments)
        rows = read(REPORT)
        if code == FAILED:
            code = self._look_again(rows)
        REPORT.unlink(missing_ok=True)
        if self._interrupted:
            return INTERRUPTED
        say(f"{'passed' if code == 0 else 'failed'} in {(time.monotonic() - began_s) / 60:.1f} min")
        if code == 0:
            remember(tree, rows)
        return code

    def _look_again(self, rows: Sequence[Mapping[str, Any]]) -> int:
        decision = decide(rows)
        if decision.why_not:
            say(f"no second look: {decision.why_not}")
            return FAILED
        say(f"second look at {len(decision.again)} tests, each alone")
        passed = {test: self._passes_alone(test) for test in decision.again}
        if self._interrupted:
            return FAILED
        unstable = {test: decision.again[test] for test, passes in passed.items() if passes}
        for test, text in unstable.items():
            say(f"UNSTABLE: {test} passed when it ran alone; its first failure:\n{text}\n")
        append_unstable(unstable)
        twice = passed.keys() - unstable
        for test in sorted(twice):
            say(f"{test} failed twice")
        if len(unstable) > MOST_UNSTABLE:
            say(f"{len(unstable)} tests are unstable, more than {MOST_UNSTABLE}")
        for test in unstable:
            say(f"unstable: {test}")
        return FAILED if twice or len(unstable) > MOST_UNSTABLE else 0

    def _passes_alone(self, test: str) -> bool:
        """Run the test alone. A test that is skipped now has not passed."""
        code = self._pytest(f"--report={REPORT}", "-n", "0", test)
        outcomes = {(row["test"], row["when"], row["outcome"]) for row in read(REPORT)}
        return code == 0 and (test, "call", "passed") in outcomes

    def _pytest(self, *arguments: str) -> int:
        if self._interrupted:
            return FAILED
        self._running = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
        return self._running.wait()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        if number == signal.SIGTERM and self._running is not None:
            self._running.terminate()


def read(report: Path) -> list[dict[str, Any]]:
    """Return the rows of --report; none if pytest ended before it wrote any."""
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def append_unstable(unstable: Mapping[str, str]) -> None:
    if not unstable:
        return
    before = json.loads(UNSTABLE.read_text()) if UNSTABLE.exists() else []
    at = datetime.now(UTC).isoformat(timespec="seconds")
    now = [{"test": test, "at": at, "failure": text} for test, text in unstable.items()]
    draft = UNSTABLE.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(before + now, indent=1) + "\n")
    draft.replace(UNSTABLE)


def clean_tree() -> str | None:
    """Return the tree of HEAD; None if the work tree differs from it, or is in no repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return None if git("status", "--porcelain") else git("rev-parse", "HEAD^{tree}")
    except OSError as error:
        say(f"git does not run: {error}")
    except subprocess.CalledProcessError as error:
        say(f"git: {error.stderr.strip()}")
    return None


def remember(tree: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append the tree to PASSED, if all of it was tested and it has not changed meanwhile."""
    if any(MISSING in row["text"] for row in rows):
        say("tests were skipped for want of a program, so the tree that passed is not noted")
    elif tree is None or tree != clean_tree():
        say("there are uncommitted or new changes, so the tree that passed is not noted")
    else:
        try:
            PASSED.parent.mkdir(parents=True, exist_ok=True)
            with PASSED.open("a") as file:
                file.write(f"{tree}\n")
        except OSError as error:
            say(f"the tree that passed is not noted: {error}")


def say(text: str) -> None:
    print(f"gate: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(Gate().run(sys.argv[1:]))
