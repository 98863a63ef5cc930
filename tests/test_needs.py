"""`make check` excludes tests that need a lab or a built program. Any other test that starts one
fails."""

import subprocess
from pathlib import Path

import pytest
from tests import needs, nested

from fairlead.lab import process, server

STARTS_HELM = """
import subprocess
import sys

def test_a_program_that_make_tools_builds():
    subprocess.run(["/anywhere/helm", "version"], check=False)
"""
STARTS_A_LAB = f"""
import os
import subprocess
import sys

def test_a_server_of_a_lab():
    mark = {{"{process.LABEL}": "{server.SERVER_LABEL}"}}
    subprocess.run([sys.executable, "-c", "pass"], env=os.environ | mark, check=True)
"""
CATCHES_THE_ERROR = """
import subprocess
from contextlib import suppress

def test_an_error_that_is_caught():
    with suppress(Exception):
        subprocess.run(["fairlead", "lab", "up"], check=True)
"""
NEEDS_NOTHING = """
import subprocess
import sys

def test_another_process():
    subprocess.run([sys.executable, "-c", "pass"], check=True)
"""


def run(folder: Path, tests: dict[str, str], *options: str, processes: int = 0) -> str:
    with nested.start(
        folder, tests, "-n", str(processes), *options, stdout=subprocess.PIPE
    ) as running:
        printed, _ = running.communicate(timeout=120)
    return printed


def test_a_test_with_undeclared_needs_fails(tmp_path: Path) -> None:
    wrong = {"helm": STARTS_HELM, "lab": STARTS_A_LAB, "hidden": CATCHES_THE_ERROR}
    tests = {f"plan/test_{name}.py": text for name, text in wrong.items()}
    printed = run(tmp_path, {**tests, "plan/test_right.py": NEEDS_NOTHING})
    assert "3 failed, 1 passed" in printed
    assert "tests/plan/test_helm.py::test_a_program_that_make_tools_builds needs helm" in printed
    assert "tests/plan/test_lab.py::test_a_server_of_a_lab needs a lab" in printed


def test_a_test_in_a_folder_of_labs_may_start_a_lab(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, {"e2e/test_lab.py": STARTS_A_LAB})


@pytest.mark.parametrize("processes", [0, 2])
def test_check_excludes_the_test_and_reports_it(tmp_path: Path, processes: int) -> None:
    tests = {"e2e/test_lab.py": STARTS_A_LAB, "plan/test_right.py": NEEDS_NOTHING}
    printed = run(tmp_path, tests, "--check", processes=processes)
    assert "1 passed" in printed
    assert "--check excluded 1 tests; make test runs them:\n  1 need a lab" in printed


def test_a_test_has_the_need_of_each_of_its_fixtures() -> None:
    used = ("tmp_path", "real_apiserver", "real_programs")
    assert needs.need_of_test("tests/kube/test_x.py::test_y", used) == "kube-apiserver"
    assert needs.need_of_test("tests/kube/test_x.py::test_y", ("tmp_path",)) is None


def test_every_named_file_and_fixture_exists() -> None:
    for name in (*needs.LABS, *needs.WITHOUT):
        assert (nested.ROOT / name.partition("::")[0]).exists(), name
    texts = [
        (nested.ROOT / path).read_text()
        for path in ("tests/programs.py", "tests/openstack/fixtures.py")
    ]
    for name in needs.FIXTURES:
        assert any(f"def {name}(" in text for text in texts), name
