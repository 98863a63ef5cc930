"""Run the tests whose result is statistical, long or random: `python tools/soak.py ARGUMENT...`.

In: arguments of pytest, such as `-n auto` and `-k NAME`; the environment variable ROUNDS, the
number of rounds (1). Out: a table of all tests with failures, median and worst duration, and a file
in build/soak with the result and the seed of each run. Each round has a new seed, unless
FAIRLEAD_SEED is set. Random tests run longer than in `make test`: see LENGTHS.

Failures do not change the exit code: a failure here is a defect to be understood, but does not
refuse a change. The exit code is not 0 if the tests could not run or were interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

EXPRESSION = "soak or random"
LENGTHS = {
    "FAIRLEAD_CHANGES": "240",
    "FAIRLEAD_HISTORIES": "10",
    "FAIRLEAD_SERVICES": "160",
}
"""Environment variables that set the length of random tests, unless they are already set."""
FOLDER = Path("build/soak")
COULD_RUN = (0, 1)
"""Exit codes of pytest: all tests have passed; some have failed."""


class Soak:
    def __init__(self, arguments: Sequence[str], rounds: int) -> None:
        self._arguments = arguments
        self._rounds = rounds
        self._interrupted = False
        self._running: subprocess.Popen[bytes] | None = None
        self._runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """The runs of each test."""

    def run(self) -> int:
        # Ctrl-C in a terminal reaches the tests, which are in the same process group.
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)
        FOLDER.mkdir(parents=True, exist_ok=True)
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        code = 0
        for number in range(1, self._rounds + 1):
            code = self._round(number, FOLDER / f"{at}-{number}.jsonl")
            (FOLDER / f"{at}.json").write_text(json.dumps(self._runs, indent=1) + "\n")
            if code not in COULD_RUN or self._interrupted:
                break
        print("\n".join(table(self._runs)))
        print(f"soak: every run is in {FOLDER / f'{at}.json'}", flush=True)
        if self._interrupted:
            return 130
        return 0 if code in COULD_RUN else code

    def _round(self, number: int, report: Path) -> int:
        seed = os.environ.get("FAIRLEAD_SEED") or str(random.SystemRandom().randrange(10**6))
        print(f"soak: round {number} of {self._rounds}, seed {seed}", flush=True)
        environment = {**LENGTHS, **os.environ, "FAIRLEAD_SEED": seed}
        # A test whose program is missing fails.
        environment["CI"] = "true"
        self._running = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-m",
                EXPRESSION,
                # One word: before pytest has loaded tests/conftest.py, which knows the option, it
                # would take an existing file for a path of tests.
                f"--report={report}",
                *self._arguments,
            ],
            env=environment,
        )
        code = self._running.wait()
        lines = report.read_text().splitlines() if report.exists() else []
        for test, run in runs([json.loads(line) for line in lines]).items():
            self._runs[test].append({"round": number, "seed": seed, **run})
        report.unlink(missing_ok=True)
        return code

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        if number == signal.SIGTERM and self._running is not None:
            self._running.terminate()


def runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the outcome, the duration and the first failure of each test. `rows`: the rows of
    --report, one for each phase of a test."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        run = found.setdefault(row["test"], {"outcome": "passed", "seconds": 0.0, "failure": ""})
        run["seconds"] = round(run["seconds"] + row["seconds"], 3)
        if row["outcome"] != "passed" and run["outcome"] != "failed":
            run["outcome"], run["failure"] = row["outcome"], row["text"]
    return found


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the lines of the table: the tests with the most failures first, then the slowest."""

    def failures(test: str) -> int:
        return sum(run["outcome"] == "failed" for run in found[test])

    def worst(test: str) -> float:
        return max(float(run["seconds"]) for run in found[test])

    lines = [f"{'n':>4} {'failed':>6} {'skipped':>7} {'median s':>8} {'worst s':>8}  test"]
    for test in sorted(found, key=lambda test: (-failures(test), -worst(test))):
        middle = median(run["seconds"] for run in found[test])
        skipped = sum(run["outcome"] == "skipped" for run in found[test])
        counts = f"{len(found[test]):4} {failures(test):6} {skipped:7}"
        numbers = f"{counts} {middle:8.1f} {worst(test):8.1f}"
        seeds = [run["seed"] for run in found[test] if run["outcome"] == "failed"]
        failed = f"  failed with seed {', '.join(seeds)}" if seeds else ""
        lines.append(f"{numbers}  {test}{failed}")
    return lines


if __name__ == "__main__":
    sys.exit(Soak(sys.argv[1:], int(os.environ.get("ROUNDS") or 1)).run())
