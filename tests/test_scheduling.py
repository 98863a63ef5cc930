"""The distribution of tests over processes: one process for each processor, and two quiet ones with
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


NEEDS_OPENSTACK = """
@pytest.fixture(autouse=True)
def openstack_programs():
    pass
"""
NEEDS_PROGRAM = NEEDS_OPENSTACK.replace("openstack", "real")
NEEDS_NEUTRON = """
@pytest.fixture(autouse=True)
def cloud():
    pass
"""


def test_quiet_processes_begin_with_openstack_and_run_no_lab_and_the_others_begin_with_long_labs(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report"
    text = REPORTS_ITS_PROCESS.format(report=str(report))
    long = f"{text}\npytestmark = pytest.mark.long\n"
    labs = {f"e2e/test_lab{number}.py": text for number in range(4)}
    labs |= {f"e2e/test_lab{number}.py": long for number in (8, 9)}
    clouds = {
        f"plan/test_cloud{number}.py": text + needed
        for number, needed in enumerate((NEEDS_OPENSTACK, NEEDS_OPENSTACK + NEEDS_NEUTRON))
    }
    programs = {"kube/test_real.py": text + NEEDS_PROGRAM}
    others = {f"plan/test_plan{number}.py": text for number in range(8)}
    others["plan/test_plan9.py"] = long
    files = labs | clouds | programs | others
    with nested.start(tmp_path, files, "-n", "auto", stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    executed = [line.split() for line in report.read_text().splitlines()]
    assert len(executed) == 3 * len(files)
    by_process: dict[str, list[str]] = defaultdict(list)
    nice = {}
    for process, own, file in executed:
        by_process[process].append(file)
        nice[process] = int(own)
    # Long files come first.
    for ran in by_process.values():
        light = [file for file in ran if file.startswith("test_plan")]
        assert "test_plan9.py" not in light[1:] or light[0] == "test_plan9.py"
    quiet = [process for process, own in nice.items() if own == max(nice.values())]
    assert {own - min(nice.values()) for own in nice.values()} == {0, 5}
    assert {by_process[process][0] for process in quiet} == {"test_cloud0.py", "test_cloud1.py"}
    of_quiet = {file for process in quiet for file in by_process.pop(process)}
    assert not any(file.startswith("test_lab") for file in of_quiet)
    assert {"test_lab8.py", "test_lab9.py"} <= {
        file for ran in by_process.values() for file in (*ran[:1], *ran[3:4])
    }
    # Each of the other processes runs labs until there are no more.
    for ran in by_process.values():
        labs_of_it = [file for file in ran if file.startswith("test_lab")]
        assert ran[: len(labs_of_it)] == labs_of_it
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
