"""`make check` runs lint and types beside the tests, names what failed, and ends as a whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.nested import ROOT

SETTINGS = '[tool.mypy]\nfiles = ["wrong.py"]\n'
WRONG = 'import os\n\nnumber: int = "text"\n'
TEST = """
import time
from pathlib import Path


def test_it():
    Path("begun").touch()
    try:
        time.sleep({seconds})
    finally:
        Path("over").touch()
"""


def check(folder: Path, text: str, *, seconds: int) -> "subprocess.Popen[str]":
    """Start the check of a project with one module and one test, which takes `seconds`."""
    (folder / "pyproject.toml").write_text(SETTINGS)
    (folder / "wrong.py").write_text(text)
    (folder / "test_it.py").write_text(TEST.format(seconds=seconds).lstrip())
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "check.py"), "-q"],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_each_failed_part_is_shown_and_the_first_is_named_first(tmp_path: Path) -> None:
    with check(tmp_path, WRONG, seconds=0) as running:
        printed, _ = running.communicate(timeout=120)
    assert running.returncode == 1, printed
    assert "F401" in printed
    assert "[assignment]" in printed
    assert "1 passed" in printed
    assert printed.endswith("check: failed: lint, types\n")


def test_ctrl_c_ends_all_parts_and_the_tests_clean_up(tmp_path: Path) -> None:
    with check(tmp_path, "", seconds=3600) as running:
        while not (tmp_path / "begun").exists():
            assert running.poll() is None
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)
        printed, _ = running.communicate(timeout=60)
    assert running.returncode == 130, printed
    assert (tmp_path / "over").exists()
    assert "check: failed" not in printed
