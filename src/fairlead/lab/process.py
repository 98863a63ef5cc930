"""The lab's processes: start a process in a namespace, find all processes of a lab, end them.

In: a command line and where it runs. Out: a `Process`, which may also have been started by an
earlier program. The environment of each process contains the lab's name and a label, and processes
are found by reading /proc. No file of PIDs can become stale, and the processes of a starter that
was killed are found as well. A signal is sent through a pidfd that was opened *before* the
environment was read, so it cannot reach another process that reuses the PID. Follows pidfd_open(2),
proc(5).
"""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.lab import namespace

LAB = "FAIRLEAD_LAB"
LABEL = "FAIRLEAD_LAB_PROCESS"
START_TIMEOUT_S = 60.0
POLL_S = 0.02
SUPPORT_NICE, POD_NICE = 5, 10
"""Nice values of processes that are not under test: SUPPORT_NICE for the control plane and clients,
POD_NICE for pods, because a lab has many. On a real site they run on machines of their own; here
they must not delay the roles."""


class Process:
    """A running process, held by a pidfd. `label` identifies it ("gw1/gateway",
    "pod/default.web-1")."""

    def __init__(
        self, pid: int, label: str, pidfd: int, child: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.pid = pid
        self.label = label
        self._pidfd = pidfd
        self._child = child

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._pidfd)

    @property
    def running(self) -> bool:
        """Whether it still runs. A child that has ended is reaped."""
        if self._child is not None:
            return self._child.poll() is None
        return not select.select([self._pidfd], [], [], 0)[0]

    @property
    def leads(self) -> bool:
        """Whether it is a session leader. Every process that a lab starts is one. Its children, for
        example a gateway's prober, inherit its label but do not lead a session."""
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(self.pid) == self.pid
        return False

    @property
    def exit_code(self) -> int | None:
        """The exit code of a child of this process that has ended (negative: the signal that ended
        it), else None."""
        return self._child.poll() if self._child is not None else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Do nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self) -> None:
        """Return when the process has ended. Use `asyncio.timeout` for a deadline."""
        loop = asyncio.get_running_loop()
        # The event loop accepts a descriptor only once, and several tasks may wait: each registers
        # its own copy.
        own = os.dup(self._pidfd)
        ended = asyncio.Event()
        loop.add_reader(own, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(own)
            os.close(own)
        if self._child is not None:
            self._child.wait()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL if the process still runs after `grace_s` seconds. The process
        has ended when this returns."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL and wait for the end, which takes the kernel a few milliseconds. Raise
        Unavailable after 10 s."""
        self.send(signal.SIGKILL)
        try:
            async with asyncio.timeout(10):
                await self.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"process {self.pid} ({self.label}) did not end within 10 s of SIGKILL"
            ) from error


def environment(lab: str, label: str, tools: Path | None = None) -> dict[str, str]:
    """Return this process's environment with the lab's marks, and with the programs in `tools` and
    our own programs first on the PATH."""
    own = Path(sys.executable).parent
    folders = [str(each) for each in (tools, own) if each is not None]
    path = os.pathsep.join((*folders, os.environ.get("PATH", os.defpath)))
    return os.environ | {LAB: lab, LABEL: label, "PYTHONUNBUFFERED": "1", "PATH": path}


def set_nice(pid: int, nice: int) -> None:
    """Set the nice value of a session leader and of its session."""
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    set_session_nice(pid, nice)


def set_session_nice(pid: int, nice: int) -> None:
    """Set the nice value of the session of a session leader, where the kernel schedules sessions as
    groups (CONFIG_SCHED_AUTOGROUP). There, only this value has an effect between sessions."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def spawn(
    lab: str,
    label: str,
    argv: Sequence[str],
    *,
    log: Path,
    inside: str | None = None,
    pass_fds: Sequence[int] = (),
    nice: int = 0,
) -> Process:
    """Start a process in its own session and in the namespace `inside` (None: the machine's own),
    with its output appended to `log` and the nice value `nice`. Raise Refused when it cannot be
    executed.

    Only the network namespace differs from ours: files and mounts (and so BPF pins) are the same.
    """
    with log.open("ab") as output, namespace.inside(inside) if inside else contextlib.nullcontext():
        try:
            # A child starts in the namespace of the thread that forks it, so neither a launcher
            # process nor code between fork and exec is needed.
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(lab, label),
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except OSError as error:
            raise Refused(
                f"tried to start {argv[0]} as {label}: {error.strerror}",
                fix="check that it is installed",
            ) from error
    if nice:
        set_nice(child.pid, nice)
    return Process(child.pid, label, os.pidfd_open(child.pid), child)


async def run(
    inside: str,
    argv: Sequence[str],
    *,
    lab: str,
    input_text: str = "",
    timeout_s: float = 30,
    tools: Path | None = None,
) -> tuple[int, str, str]:
    """Run a command in the namespace until it exits. Return its exit code, standard output and
    standard error. Raise Unavailable and kill it when it takes longer than `timeout_s` seconds.
    Programs in `tools` hide others of the same name."""
    with namespace.inside(inside):
        child = _piped(argv, environment(lab, f"exec/{argv[0]}", tools))
    try:
        output, errors = await asyncio.to_thread(child.communicate, input_text, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{' '.join(argv)} in namespace {inside} did not end within {timeout_s} s"
        ) from error
    finally:
        # On cancellation too: the thread in `communicate` returns only when the child has ended.
        if child.poll() is None:
            child.kill()
            child.wait()
    return child.returncode, output, errors


def find(lab: str, prefix: str = "") -> tuple[Process, ...]:
    """Return the lab's processes whose labels have this prefix."""
    found = []
    for pid in _pids():
        process = _open(pid)
        if process is None:
            continue
        marks = _environment(pid)
        label = marks.get(LABEL, "")
        if marks.get(LAB) == lab and label.startswith(prefix):
            process.label = label
            found.append(process)
    return tuple(found)


def one(lab: str, label: str) -> Process:
    """Return the lab's process with this label. Raise Conflict when it is not running."""
    for process in find(lab, label):
        if process.label == label and process.leads:
            return process
    raise Conflict(f"{label} is not running in lab {lab}")


def in_namespaces(names: Collection[str]) -> tuple[Process, ...]:
    """Return every process in one of the namespaces, whichever program started it."""
    wanted = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            wanted.add(namespace.identity(name))
    found = []
    for pid in _pids():
        process = _open(pid)
        if process is None:
            continue
        try:
            status = Path(f"/proc/{pid}/ns/net").stat()
        except OSError:  # the process has ended
            continue
        if (status.st_dev, status.st_ino) in wanted:
            process.label = _environment(pid).get(LABEL, "")
            found.append(process)
    return tuple(found)


async def await_ready(
    started: Process,
    is_ready: Callable[[], Awaitable[bool]],
    *,
    log: Path,
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Wait until `is_ready` returns True. Raise Unavailable with the end of the log if the process
    exits first or is not ready after `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await is_ready():
                if not started.running:
                    raise Unavailable(
                        f"{started.label} exited at startup; end of its log:\n{_end_of(log)}"
                    )
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise Unavailable(
            f"{started.label} was not ready within {timeout_s} s; end of its log:\n{_end_of(log)}"
        ) from error


async def kill_all(processes: Collection[Process]) -> None:
    """Send SIGKILL to all processes, then wait until all have ended."""
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        await process.kill()


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module with this interpreter."""
    return (sys.executable, "-m", module, *arguments)


def _end_of(log: Path, lines: int = 20) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"


def _piped(argv: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
        )
    except OSError as error:
        raise Refused(
            f"tried to run {argv[0]}: {error.strerror}", fix="check that it is installed"
        ) from error


def _pids() -> tuple[int, ...]:
    own = os.getpid()
    return tuple(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != own)


def _open(pid: int) -> Process | None:
    try:
        return Process(pid, "", os.pidfd_open(pid))
    except OSError:  # the process has ended, or the id is a thread's
        return None


def _environment(pid: int) -> Mapping[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or reading is not permitted
        return {}
    return dict(
        os.fsdecode(entry).partition("=")[::2]
        for entry in entries
        if entry.startswith(b"FAIRLEAD_LAB")
    )
