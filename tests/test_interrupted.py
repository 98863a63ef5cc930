"""A run that is told to end takes down the labs of all its processes first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import time
from pathlib import Path

import pytest

@pytest.fixture
def lab():
    here = Path(__file__)
    here.with_suffix(".up").touch()
    yield
    here.with_suffix(".down").touch()

def test_it(lab):
    time.sleep(60)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_every_process_ends_in_good_order(tmp_path: Path, signum: signal.Signals) -> None:
    folder = tmp_path / "tests"
    (folder / "lab").mkdir(parents=True)
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    modules = [folder / "lab" / f"test_{name}.py" for name in ("one", "two")]
    for module in modules:
        module.write_text(TESTS)
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-n", "2")
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest", *settings, str(folder)], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path
    )
    while not all(module.with_suffix(".up").exists() for module in modules):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signum)
    assert running.wait(60) == pytest.ExitCode.INTERRUPTED
    assert all(module.with_suffix(".down").exists() for module in modules)
