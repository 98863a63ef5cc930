"""The lab's processes: their namespaces, how the lab finds them, and how they end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.lab import namespace, process

pytestmark = pytest.mark.root

SLEEP = ("sleep", "600")
DEADLINE_S = 60


async def test_a_process_runs_in_its_namespace_and_shares_the_mounts(
    netns: str, lab_name: str, tmp_path: Path
) -> None:
    started = process.spawn(lab_name, "x/sleep", SLEEP, log=tmp_path / "log", inside=netns)
    status = os.stat(f"/proc/{started.pid}/ns/net")
    assert (status.st_dev, status.st_ino) == namespace.identity(netns)
    assert os.readlink(f"/proc/{started.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    assert [found.pid for found in process.in_namespaces([netns])] == [started.pid]
    await started.kill()
    assert started.exit_code == -signal.SIGKILL
    assert not started.running


async def test_another_program_finds_the_process_by_its_label(
    lab_name: str, tmp_path: Path
) -> None:
    script = f"""
from pathlib import Path
from fairlead.lab import process
process.spawn({lab_name!r}, "gw1/gateway", {SLEEP!r}, log=Path({str(tmp_path / "log")!r}))
log = Path({str(tmp_path / "log")!r})
process.spawn({lab_name!r}, "gw1/gateway-of-another-kind", {SLEEP!r}, log=log)
"""
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-W", "ignore", "-c", script], check=True
    )
    labels = sorted(found.label for found in process.find(lab_name))
    assert labels == ["gw1/gateway", "gw1/gateway-of-another-kind"]
    found = process.one(lab_name, "gw1/gateway")
    assert process.find(f"{lab_name}x") == ()
    async with asyncio.timeout(DEADLINE_S):
        await found.stop(10)
    with pytest.raises(Conflict, match="not running"):
        process.one(lab_name, "gw1/gateway")
    await process.kill_all(process.find(lab_name))
    assert process.find(lab_name) == ()
    found.send(signal.SIGTERM)  # no effect: the process has ended


async def test_a_child_process_has_the_label_but_is_not_taken_for_the_process(
    lab_name: str, tmp_path: Path
) -> None:
    parent = process.spawn(
        lab_name, "gw1/gateway", ["sh", "-c", "sleep 60 & echo; wait"], log=tmp_path / "log"
    )
    async with asyncio.timeout(DEADLINE_S):
        while len(found := process.find(lab_name)) < 2 or not (tmp_path / "log").read_bytes():
            await asyncio.sleep(0.01)
        assert [each.pid for each in found if each.leads] == [parent.pid]
        assert process.one(lab_name, "gw1/gateway").pid == parent.pid
        await process.kill_all(found)
    assert process.find(lab_name) == ()


async def test_a_process_that_ignores_sigterm_is_killed(lab_name: str, tmp_path: Path) -> None:
    stubborn = ("sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.05; done")
    started = process.spawn(lab_name, "x/stubborn", stubborn, log=tmp_path / "log")
    async with asyncio.timeout(DEADLINE_S):
        while (tmp_path / "log").read_text() != "deaf\n":
            await asyncio.sleep(0.01)
        await started.stop(0.2)
    assert started.exit_code == -signal.SIGKILL


async def test_several_tasks_may_wait_for_one_process(lab_name: str, tmp_path: Path) -> None:
    started = process.spawn(lab_name, "x/sleep", SLEEP, log=tmp_path / "log")
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(started.wait())
        await asyncio.sleep(0.05)
        started.send(signal.SIGKILL)


async def test_a_command_returns_its_exit_code_and_output(netns: str, lab_name: str) -> None:
    argv = ("sh", "-c", "cat; ls /proc/sys/net/ipv4/conf; echo bad >&2; exit 3")
    exit_code, output, errors = await process.run(netns, argv, lab=lab_name, input_text="in\n")
    assert (exit_code, output, errors) == (3, "in\nall\ndefault\nlo\n", "bad\n")
    with pytest.raises(Refused, match="no-such-command"):
        await process.run(netns, ("no-such-command",), lab=lab_name)


async def test_a_command_that_takes_too_long_is_killed(netns: str, lab_name: str) -> None:
    with pytest.raises(Unavailable, match="sleep 600"):
        await process.run(netns, SLEEP, lab=lab_name, timeout_s=0.2)
    assert process.in_namespaces([netns]) == ()


async def test_a_command_whose_caller_gives_up_is_killed(netns: str, lab_name: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await process.run(netns, SLEEP, lab=lab_name)
    assert process.in_namespaces([netns]) == ()
