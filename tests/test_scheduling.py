"""The distribution of tests over processes: one process for each processor, and two quiet ones with
low priority."""

import os
import subprocess
from collections import defaultdict
from pathlib import Path

from tests import nested, priority

REPORTS_ITS_PROCESS = """
import os
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    with Path({report!r}).open("a") as report:
        process, nice = os.environ["PYTEST_XDIST_WORKER"], os.nice(0)
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        group = next((each for each in groups if ":cpu:" in each), "")
        report.write(f"{{process}} {{nice}} {{Path(__file__).name}} {{group}}\\n")
    time.sleep(0.2)
"""


def test_the_quiet_processes_run_no_lab_and_the_others_begin_with_labs(tmp_path: Path) -> None:
    report = tmp_path / "report"
    text = REPORTS_ITS_PROCESS.format(report=str(report))
    labs = {f"e2e/test_lab{number}.py": text for number in range(4)}
    groups = {"drivers/octavia/test_security.py": text, "drivers/octavia/test_sharing.py": text}
    others = {f"plan/test_plan{number}.py": text for number in range(8)}
    files = labs | groups | others
    with nested.start(tmp_path, files, processes="auto", stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    executed = [line.split() for line in report.read_text().splitlines()]
    assert len(executed) == 3 * len(files)
    by_process: dict[str, list[str]] = defaultdict(list)
    nice, groups_of = {}, {}
    for process, own, file, *group in executed:
        by_process[process].append(file)
        nice[process] = int(own)
        groups_of[process] = group
    lowest = max(nice.values())
    quiet = [process for process, own in nice.items() if own == lowest]
    assert {own - lowest for process, own in nice.items() if process not in quiet} == {-5}
    if priority.CONTROLLER.exists():
        assert len({groups_of[process][0] for process in quiet}) == len(quiet)
        names = {groups_of[process][0].rpartition("/")[2] for process in quiet}
        assert all(name.startswith(priority.GROUP) for name in names)
        assert not any((priority.CONTROLLER / name).exists() for name in names)
    # Each of the quiet processes begins with one of the groups of OpenStack.
    of_quiet = [by_process.pop(process) for process in quiet]
    assert {files[0] for files in of_quiet} == {"test_security.py", "test_sharing.py"}
    for files_of_it in of_quiet:
        assert all(file.startswith("test_plan") for file in files_of_it[3:])
    # Each of the other processes runs labs until there are no more.
    for files_of_it in by_process.values():
        labs_of_it = [file for file in files_of_it if file.startswith("test_lab")]
        assert files_of_it[: len(labs_of_it)] == labs_of_it
    assert sum(map(len, by_process.values())) >= 3 * len(labs)


def test_all_tests_of_a_file_run_in_one_process(tmp_path: Path) -> None:
    report = tmp_path / "report"
    text = REPORTS_ITS_PROCESS.format(report=str(report))
    files = {f"plan/test_plan{number}.py": text for number in range(4)}
    with nested.start(tmp_path, files, processes=2, stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    places = {tuple(line.split()[::2]) for line in report.read_text().splitlines()}
    assert len(places) == len(files)
    assert {process for process, _ in places} == {"gw0", "gw1"}
    assert os.nice(0) == int(report.read_text().split()[1])
