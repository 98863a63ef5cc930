"""An interrupted test run deletes the labs of all its processes before it ends."""

import signal
import time
from pathlib import Path

import pytest
from tests import nested

TESTS = """
import time
from pathlib import Path

import pytest

@pytest.fixture
def lab():
    file = Path(__file__)
    file.with_suffix(".up").touch()
    yield
    file.with_suffix(".down").touch()

def test_it(lab):
    time.sleep(60)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_every_process_deletes_its_labs(tmp_path: Path, signum: signal.Signals) -> None:
    modules = [tmp_path / "tests/lab" / f"test_{name}.py" for name in ("one", "two")]
    running = nested.start(
        tmp_path, {f"lab/{module.name}": TESTS for module in modules}, "-n", str(len(modules))
    )
    while not all(module.with_suffix(".up").exists() for module in modules):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signum)
    assert running.wait(60) == pytest.ExitCode.INTERRUPTED
    assert all(module.with_suffix(".down").exists() for module in modules)
