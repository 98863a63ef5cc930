"""The longer queue of packets during a test run, and what is reported about the machine."""

import subprocess
from pathlib import Path

import pytest
from tests import machine, nested


def test_the_queue_is_longer_during_the_run_and_as_before_afterwards(tmp_path: Path) -> None:
    queue = tmp_path / "netdev_max_backlog"
    queue.write_text("1000\n")
    with machine.lengthen_queue(queue, 5_000):
        assert int(queue.read_text()) == 5_000
    assert int(queue.read_text()) == 1_000


def test_a_queue_that_is_long_enough_stays(tmp_path: Path) -> None:
    queue = tmp_path / "netdev_max_backlog"
    queue.write_text("9000\n")
    with machine.lengthen_queue(queue, 5_000):
        assert int(queue.read_text()) == 9_000


def test_without_the_right_to_write_the_run_goes_on(tmp_path: Path) -> None:
    with machine.lengthen_queue(tmp_path / "missing"):
        pass


@pytest.mark.parametrize("pressure", ["some avg10=0.00 total={}\n", ""])
def test_usage(tmp_path: Path, pressure: str) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "pressure").mkdir()
    found = []
    for second, (dropped, waited_us) in enumerate(((0x10, 500_000), (0x1A, 750_000))):
        (tmp_path / "net/softnet_stat").write_text(f"0000ffff {dropped:08x} 0\nffff 00000001 0\n")
        (tmp_path / "pressure/cpu").write_text(pressure.format(waited_us))
        found.append(machine.measure(second * 1_000_000_000, tmp_path))
    text = "10 packets did not fit into a processor's queue"
    if pressure:
        text += "; processes waited for a processor for 25% of the time"
    assert found[0].describe_until(found[1]) == text


def test_the_machine_is_reported_for_a_failed_test(tmp_path: Path) -> None:
    files = {"plan/test_fails.py": "def test_it() -> None:\n    assert False\n"}
    with nested.start(tmp_path, files, processes=1, stdout=subprocess.PIPE) as running:
        printed, _ = running.communicate(timeout=120)
    assert "test_it, call: 0 packets did not fit" in str(printed)
