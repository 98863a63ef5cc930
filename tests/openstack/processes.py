"""Processes that end together with the tests, however the tests end.

In: a command line, a directory. Out: the running process and its log. Each process lives in a PID
namespace of its own, which the kernel clears when the first process of the namespace ends. The
first process ends together with its parent, and the parent ends together with the thread of the
tests that started it (prctl(2), PR_SET_PDEATHSIG). Therefore no process is left after a kill -9 of
the tests, not even a grandchild. The processes have nothing to save, so SIGKILL ends all of them.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.openstack import places

from fairlead.errors import Unavailable
from fairlead.lab.process import POD_NICE, set_nice

TIMEOUT_S = 600.0
"""For a start, an end or a command. The machine may be busy with several labs, and hundreds of
tests share one start."""
POLL_S = 0.02
END_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--pid", "--kill-child")


class Processes:
    """The processes of one part of OpenStack, with their files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running = ExitStack()

    def start(
        self, name: str, argv: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> "RunningProcess":
        """Start a program. Its output goes to NAME.log."""
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            child = subprocess.Popen(
                [*END_WITH_PARENT, *argv],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(self.directory) | dict(environment or {}),
                start_new_session=True,
            )
        self._running.callback(_end, child)
        return RunningProcess(name, child, log)

    def python(
        self, module: str, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> "RunningProcess":
        """Start a module of `tests.openstack.servers` in OpenStack's environment."""
        name = module.replace("_", "-")
        argv = (
            places.python(),
            "-W",
            "ignore",
            "-m",
            f"tests.openstack.servers.{module}",
            *arguments,
        )
        return self.start(name, argv, environment)

    def end(self) -> None:
        """Stop all processes, the last one first."""
        self._running.close()


class RunningProcess:
    """One process. `child` is the process to kill."""

    def __init__(self, name: str, child: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.child = child
        self.log = log

    def await_line(self, line: str) -> None:
        """Wait until the process has written a line with this prefix."""
        self.await_(
            lambda: any(
                each.startswith(line) for each in self.log.read_text(errors="replace").splitlines()
            )
        )

    def await_end(self) -> None:
        """Wait until the process has ended by itself. Raise Unavailable if it fails or does not
        end. `child` ends after the process: unshare(1) waits for it and takes its exit code."""
        try:
            code = self.child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{self.name} did not end within {TIMEOUT_S:.0f} s") from error
        if code:
            raise Unavailable(f"{self.name} ended with {code}; its log says:\n{self._end_of_log()}")

    def await_(self, is_ready: Callable[[], bool]) -> None:
        """Wait until the process is ready, then lower its priority. Raise Unavailable, with the end
        of its log, if it ends first or the time is over."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_ready():
            if self.child.poll() is not None or time.monotonic() > deadline:
                how = (
                    "ended at its start"
                    if self.child.poll() is not None
                    else f"was not ready within {TIMEOUT_S:.0f} s"
                )
                raise Unavailable(f"{self.name} {how}; its log says:\n{self._end_of_log()}")
            time.sleep(POLL_S)
        self.lower()

    def lower(self) -> None:
        """Lower the priority of the process and its children, because labs that run concurrently
        measure response times. During its start it has the priority of the tests that wait for
        it: with a lower one it would not be ready in time on a busy machine."""
        os.setpriority(os.PRIO_PGRP, self.child.pid, POD_NICE)
        set_nice(self.child.pid, POD_NICE)

    def _end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def run(argv: Sequence[str | Path], directory: Path, *, input_text: str = "") -> str:
    """Run a program, and return its output. Raise Unavailable if it fails or does not end."""
    command = " ".join(map(str, argv))
    try:
        done = subprocess.run(
            list(argv),
            cwd=directory,
            env=_environment(directory),
            input=input_text,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command} did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise Unavailable(f"{command} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment without variables that would make OpenStack look for a cloud, a proxy
    or a display. Temporary files go to the directory, and compiled modules are kept, because the
    start takes four times as long without them."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OS_", "PYTEST", "COV"))
    }
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        kept.pop(name, None)
    return kept | {
        "TMPDIR": str(directory),
        "PYTHONPATH": str(places.ROOT),
        "PYTHONUNBUFFERED": "1",
    }


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
