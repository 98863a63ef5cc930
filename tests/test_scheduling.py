"""The distribution of tests over processes: one process for each processor, and a quiet one with
low priority."""

import os
import subprocess
from collections import defaultdict
from pathlib import Path

from tests import nested

REPORTS_ITS_PROCESS = """
import os
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    with Path({report!r}).open("a") as report:
        process, nice = os.environ["PYTEST_XDIST_WORKER"], os.nice(0)
        report.write(f"{{process}} {{nice}} {{Path(__file__).name}}\\n")
    time.sleep(0.2)
"""


def test_the_quiet_process_runs_no_lab_and_the_others_begin_with_long_labs(tmp_path: Path) -> None:
    report = tmp_path / "report"
    text = REPORTS_ITS_PROCESS.format(report=str(report))
    labs = {f"e2e/test_lab{number}.py": text for number in range(4)}
    labs["e2e/test_lab9.py"] = f"{text}\npytestmark = pytest.mark.long\n"
    others = {f"plan/test_plan{number}.py": text for number in range(8)}
    with nested.start(tmp_path, labs | others, "-n", "auto", stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    executed = [line.split() for line in report.read_text().splitlines()]
    assert len(executed) == 3 * (len(labs) + len(others))
    by_process: dict[str, list[str]] = defaultdict(list)
    nice = {}
    for process, own, file in executed:
        by_process[process].append(file)
        nice[process] = int(own)
    quiet = max(nice, key=lambda process: nice[process])
    assert {own - nice[quiet] for process, own in nice.items() if process != quiet} == {-5}
    assert all(file.startswith("test_plan") for file in by_process.pop(quiet))
    assert any(files[0] == "test_lab9.py" for files in by_process.values())
    # Each of the other processes runs labs until there are no more.
    for files in by_process.values():
        labs_of_it = [file for file in files if file.startswith("test_lab")]
        assert files[: len(labs_of_it)] == labs_of_it
    assert sum(map(len, by_process.values())) >= 3 * len(labs)


def test_all_tests_of_a_file_run_in_one_process(tmp_path: Path) -> None:
    report = tmp_path / "report"
    text = REPORTS_ITS_PROCESS.format(report=str(report))
    files = {f"plan/test_plan{number}.py": text for number in range(4)}
    with nested.start(tmp_path, files, "-n", "2", stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    places = {tuple(line.split()[::2]) for line in report.read_text().splitlines()}
    assert len(places) == len(files)
    assert {process for process, _ in places} == {"gw0", "gw1"}
    assert os.nice(0) == int(report.read_text().split()[1])
