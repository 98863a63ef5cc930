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
from fairlead.lab.process import POD_NICE, set_session_nice

START_TIMEOUT_S = 300.0
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
                [*_with_priority(), *END_WITH_PARENT, *argv],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(self.directory) | dict(environment or {}),
                start_new_session=True,
            )
        self._running.callback(_end, child)
        set_session_nice(child.pid, POD_NICE)
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

    def await_(self, is_ready: Callable[[], bool]) -> None:
        """Wait until the process is ready. Raise Unavailable, with the end of its log, if it ends
        first or the time is over."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if self.child.poll() is not None or time.monotonic() > deadline:
                how = (
                    "ended at its start"
                    if self.child.poll() is not None
                    else f"was not ready within {START_TIMEOUT_S:.0f} s"
                )
                log_end = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
                raise Unavailable(f"{self.name} {how}; its log says:\n{log_end}")
            time.sleep(POLL_S)


def run(
    argv: Sequence[str | Path], directory: Path, *, input_text: str = "", timeout_s: float = 120
) -> str:
    """Run a program, and return its output. Raise Unavailable if it fails."""
    done = subprocess.run(
        list(argv),
        cwd=directory,
        env=_environment(directory),
        input=input_text,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise Unavailable(
            f"{' '.join(map(str, argv))} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}"
        )
    return done.stdout


def _with_priority() -> tuple[str, ...]:
    """Return the command that runs another command with a lower priority, because labs that run
    concurrently measure response times. A child inherits the priority that its parent has when it
    starts the child, so a later change of the parent would be too late."""
    more = POD_NICE - os.getpriority(os.PRIO_PROCESS, 0)
    return ("nice", "-n", str(more)) if more > 0 else ()


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
