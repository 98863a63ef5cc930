"""The lab's processes: start one in a namespace, find all of a lab, end them.

In: a command line and where it runs. Out: a `Process`, which may also be one that an earlier
program started. Each process carries the lab's name and its own label in its environment, and is
found again by reading /proc. There is no file of pids that could go stale: what a killed starter
left behind is found like the rest, and a signal goes through a pidfd that was opened *before* the
environment was read, so it can never hit another process with a recycled pid. Follows
pidfd_open(2), proc(5)."""

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
LOOK_S = 0.02
BESIDE, MANY = 5, 10
"""Nice values of what is not under test: the control plane and who calls; pods, of which there are
many. In a real site they have machines of their own; here they shall not keep the roles from
answering in time."""


class Process:
    """A running process, held by a pidfd. `label` says what it is ("gw1/gateway",
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
        """False once it has ended; a child is then reaped."""
        if self._child is not None:
            return self._child.poll() is None
        return not select.select([self._pidfd], [], [], 0)[0]

    @property
    def leads(self) -> bool:
        """Whether it leads its session, as all do that a lab starts. What they start themselves, a
        gateway's prober, has their label, too, but not this."""
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(self.pid) == self.pid
        return False

    @property
    def exit_code(self) -> int | None:
        """Of our own child that has ended (negative: by that signal); else None."""
        return self._child.poll() if self._child is not None else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; to a process that has ended: nothing."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self) -> None:
        """Return when it has ended. Give a deadline with `asyncio.timeout`."""
        loop = asyncio.get_running_loop()
        # A pidfd that several wait for can be in the loop once only: each waits on its own copy.
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
        """SIGTERM, and SIGKILL if it still runs after `grace_s` seconds. It has ended when this
        returns."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and wait for the end (the kernel's part: a few milliseconds)."""
        self.send(signal.SIGKILL)
        try:
            async with asyncio.timeout(10):
                await self.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"process {self.pid} ({self.label}) did not end within 10 s of SIGKILL"
            ) from error


def environment(lab: str, label: str) -> dict[str, str]:
    """This process's environment with the lab's marks, and with our own programs to be found
    first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return os.environ | {LAB: lab, LABEL: label, "PYTHONUNBUFFERED": "1", "PATH": path}


def give_way(pid: int, nice: int) -> None:
    """Let a process that leads its session run after others."""
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    # Where sessions are scheduled as groups (CONFIG_SCHED_AUTOGROUP), it is these that count.
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
    """Start a process in its own session, in the namespace `inside` (None: the machine's own), its
    output appended to `log`; `nice`: how far others go before it.

    Only the network namespace differs from ours: files, mounts (and so BPF pins) are the same.
    """
    with log.open("ab") as output, namespace.inside(inside) if inside else contextlib.nullcontext():
        try:
            # A child begins in the namespace of the thread that forks it: no launcher process, no
            # code after fork.
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
                f"tried to start {argv[0]} as {label}: {error.strerror}", fix="is it installed?"
            ) from error
    if nice:
        give_way(child.pid, nice)
    return Process(child.pid, label, os.pidfd_open(child.pid), child)


async def run(
    inside: str, argv: Sequence[str], *, lab: str, input_text: str = "", timeout_s: float = 30
) -> tuple[int, str, str]:
    """Run a command in the namespace to its end: (exit code, standard output, standard error).
    Raises Unavailable when it takes longer than `timeout_s`; it is then killed."""
    with namespace.inside(inside):
        child = _piped(argv, environment(lab, f"exec/{argv[0]}"))
    try:
        output, errors = await asyncio.to_thread(child.communicate, input_text, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{' '.join(argv)} in namespace {inside} did not end within {timeout_s} s"
        ) from error
    finally:
        # Also when cancelled: the end of the child is what lets the waiting thread go.
        if child.poll() is None:
            child.kill()
            child.wait()
    return child.returncode, output, errors


def find(lab: str, prefix: str = "") -> tuple[Process, ...]:
    """The lab's processes whose labels begin so."""
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
    """The process of this label. Raises Conflict when it does not run."""
    for process in find(lab, label):
        if process.label == label and process.leads:
            return process
    raise Conflict(f"{label} does not run in lab {lab}")


def in_namespaces(names: Collection[str]) -> tuple[Process, ...]:
    """Every process that lives in one of the namespaces, whoever started it."""
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
        except OSError:  # it has ended
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
    """Wait for it. Raises Unavailable, with the end of its log, if the process ends first or takes
    too long."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await is_ready():
                if not started.running:
                    raise Unavailable(
                        f"{started.label} ended at its start; its log says:\n{_end_of(log)}"
                    )
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        late = f"{started.label} was not ready within {timeout_s} s; its log says:\n{_end_of(log)}"
        raise Unavailable(late) from error


async def kill_all(processes: Collection[Process]) -> None:
    """SIGKILL to all of them first, then wait for all."""
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        await process.kill()


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module with this interpreter."""
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
            f"tried to run {argv[0]}: {error.strerror}", fix="is it installed?"
        ) from error


def _pids() -> tuple[int, ...]:
    own = os.getpid()
    return tuple(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != own)


def _open(pid: int) -> Process | None:
    try:
        return Process(pid, "", os.pidfd_open(pid))
    except OSError:  # it has ended, or is a thread
        return None


def _environment(pid: int) -> Mapping[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is not ours to read
        return {}
    return dict(
        os.fsdecode(entry).partition("=")[::2]
        for entry in entries
        if entry.startswith(b"FAIRLEAD_LAB")
    )
