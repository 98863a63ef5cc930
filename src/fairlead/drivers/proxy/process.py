"""The HAProxy process: start, reload, adoption and end.

In: configuration texts. Out: a master and its worker, which run with the newest configuration that
HAProxy accepted. HAProxy is started as a daemon: it continues when this process is killed, and the
next process finds it by its master socket. A configuration is checked (`haproxy -c`) before it
replaces the current file. At a reload the new worker gets the listening sockets of the old one,
which stays until its last connection ends. Invariant: `haproxy.cfg` in the folder is a text that
HAProxy accepted. Follows HAProxy 2.6's management manual, sections 4 (stopping and restarting) and
9.4 (master CLI)."""

import asyncio
import os
import pwd
import resource
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from fairlead.drivers.proxy import runtime, states
from fairlead.drivers.proxy.reloads import ReloadRecord
from fairlead.drivers.proxy.render import MAX_FILES, Paths, description_of
from fairlead.errors import Refused, Unavailable

log = structlog.get_logger()

USER = "haproxy"
CAP_SETGID, CAP_SETUID = 6, 7
POLL_S = 0.02
"""Interval at which the process is polled during a start, a reload or an end."""
TIMEOUT_S = 20.0
"""Time-out of a start, a reload or an end."""
HANG_S = 3.0
"""How long a worker or a master may take to answer before it counts as one that hangs."""
_FIXES = {
    "Address already in use": "stop the process that listens on the address",
    "Permission denied": "give the gateway CAP_NET_BIND_SERVICE",
    "FD limit": (
        "raise the limit of open files: LimitNOFILE of the gateway's unit, or of the container "
        "runtime's"
    ),
}
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Haproxy:
    """The HAProxy of a folder, running or not."""

    def __init__(self, folder: Path, *, search: str = SEARCH) -> None:
        """`search`: the folders that are searched for the program, as in PATH."""
        self._search = search
        self.folder = folder
        self.paths = Paths(str(folder), _user())
        self.master = folder / "master.sock"
        self.worker = folder / "worker.sock"
        self._text = folder / "haproxy.cfg"
        self._states = Path(self.paths.states)
        self._pid_file = folder / "haproxy.pid"
        self._reload_record = folder / "reloads.json"
        self.master_hangs = False
        """Whether the master is known to exist without answering: nobody waits for it then."""

    def make_folder(self) -> None:
        """Create the folder if it is missing. Raise Refused if that fails."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"creating {self.folder} failed: {error.strerror}", fix="set gateway.proxyPath"
            ) from error

    def text(self) -> str:
        """Return the newest configuration; empty if there is none."""
        with suppress(FileNotFoundError):
            return self._text.read_text()
        return ""

    def reload_record(self) -> ReloadRecord:
        """Return what `write_reload_record` has stored last; an empty record if that cannot be
        read."""
        with suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(self._reload_record.read_bytes(), type=ReloadRecord)
        return ReloadRecord()

    def write_reload_record(self, record: ReloadRecord) -> None:
        draft = self._reload_record.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(self._reload_record)

    async def running(self) -> bool:
        """Whether a master answers and has a current worker."""
        if self.master_hangs or not self.master.exists():
            return False
        try:
            found, _ = await runtime.workers(self.master)
        except Unavailable:
            return False
        return any(not each.old for each in found)

    def alive(self) -> bool:
        """Whether a master process exists, even if it does not answer."""
        return self._live_master() is not None

    async def hangs(self) -> bool:
        """Whether the current worker exists and does not answer: it is stopped, or blocked. One
        that has ended does not hang, unless its master does not notice that."""
        return await _hangs(self.worker, "show version", ended=self.master_hangs)

    async def check_master(self) -> bool:
        """Return whether the master exists and does not answer. A reload, during which it does not
        answer for some time, must not take place meanwhile."""
        return self.alive() and await _hangs(self.master, "show proc", ended=False)

    async def runs(self, text: str) -> bool:
        """Whether the current worker runs with this configuration."""
        with suppress(Unavailable):
            return bool(text) and await runtime.description(self.worker) == description_of(text)
        return False

    def master_pid(self) -> int | None:
        """Return the process id in the pid file, which may be outdated."""
        try:
            return int(self._pid_file.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None

    async def run(self, text: str) -> None:
        """Run HAProxy with this configuration: start it, or reload it if it runs. Raise Refused for
        a configuration that HAProxy does not accept or cannot put into effect, and Unavailable if
        it does not start in time, or its master does not answer. After an error, a HAProxy that ran
        before continues."""
        self.make_folder()
        candidate = self.folder / "candidate.cfg"
        candidate.write_text(text)
        self._states.write_text(states.NOTHING)
        await self._check(candidate)
        # The worker of a master that does not answer still serves. A second HAProxy would share the
        # ports with it, and the first one could not be reloaded any more. A worker that does not
        # answer cannot hand its listening sockets over, so that the kernel would go on passing half
        # of the connections to it, and nothing would show that.
        running = await self._answers("reloaded")
        before = self.text()
        candidate.replace(self._text)
        try:
            await (self._reload(text) if running else self._start())
        except Refused:
            if before:
                self._text.write_text(before)
            raise

    async def stop(self) -> None:
        """Stop HAProxy gracefully: it accepts no new connections, and exits when the open ones have
        ended. Raise Unavailable if it does not answer: it would ignore this, and without its
        sockets nobody would find it any more."""
        if await self._answers("stopped") and (pid := self._live_master()) is not None:
            os.kill(pid, signal.SIGUSR1)
        for left in (self._text, self.master, self.worker):
            left.unlink(missing_ok=True)

    async def kill(self) -> None:
        """Stop HAProxy with all its connections, and delete its folder."""
        if (pid := self._live_master()) is not None:
            os.kill(pid, signal.SIGTERM)
            await _until(lambda: _gone(pid), "ending HAProxy")
        shutil.rmtree(self.folder, ignore_errors=True)

    async def exited(self) -> None:
        """Wait until the running master ends. Return at once if there is none."""
        pid = self._live_master()
        if pid is None:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        _reap(pid)

    async def _answers(self, operation: str) -> bool:
        """Whether HAProxy runs. Raise Unavailable, with what cannot be done, if its master or its
        worker exists and does not answer."""
        if await self.running():
            if await self.hangs():
                raise Unavailable(
                    f"HAProxy's worker does not answer, so that it cannot be {operation}"
                )
            return True
        if (master := self._live_master()) is not None:
            raise Unavailable(
                f"HAProxy's master (process {master}) does not answer, so that it cannot be "
                f"{operation}"
            )
        return False

    def _live_master(self) -> int | None:
        """Return the process id of the master if its command line shows that it is ours: the id in
        the pid file may by now belong to another process."""
        if not self.master.exists() or (pid := self.master_pid()) is None or not _exists(pid):
            return None
        with suppress(OSError):
            if os.fsencode(self._text) in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    async def _start(self) -> None:
        self.master_hangs = False
        self.master.unlink(missing_ok=True)
        options = [
            "-D",
            "-W",
            "-S",
            f"{self.master},mode,600",
            "-p",
            str(self._pid_file),
            "-f",
            str(self._text),
        ]
        status, output = await self._call(*options)
        if status:
            raise Refused(
                f"HAProxy did not start: {(why := _error_message(output))}", fix=_remedy(why)
            )
        await _until(self.running, "starting HAProxy")
        log.info("HAProxy started", pid=self.master_pid())

    async def _reload(self, text: str) -> None:
        before, failed = await runtime.workers(self.master)
        known = {each.pid for each in before}
        # Without the states the new worker begins as at a start: its first checks find the servers
        # that do not serve.
        with suppress(Unavailable):
            self._states.write_text(
                states.not_serving(await runtime.query(self.worker, "show servers state"), text)
            )
        await runtime.query(self.master, "reload")

        async def taken_over() -> bool:
            try:
                found, failed_now = await runtime.workers(self.master)
            except (
                Unavailable
            ):  # during a reload the master executes itself again, as the same process
                return False
            if failed_now > failed:
                raise Refused(
                    "HAProxy could not load the new configuration",
                    fix="stop the process that listens on the address",
                )
            return any(
                not each.old and each.pid not in known for each in found
            ) and await self.runs(text)

        await _until(taken_over, "reloading HAProxy")

    async def _check(self, path: Path) -> None:
        status, output = await self._call("-c", "-q", "-f", str(path))
        if status:
            raise Refused(f"HAProxy does not accept the configuration: {_error_message(output)}")

    async def _call(self, *options: str) -> tuple[int, str]:
        program = shutil.which("haproxy", path=self._search)
        if program is None:
            raise Refused(
                "HAProxy is not installed on this gateway",
                fix="apt-get install haproxy (2.6 or newer)",
            )
        process = await asyncio.create_subprocess_exec(
            program,
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": self._search},  # HAProxy outlives this process, and inherits nothing else
            start_new_session=True,
        )
        _, output = await process.communicate()
        return process.returncode or 0, output.decode(errors="replace")


async def _hangs(path: Path, command: str, *, ended: bool) -> bool:
    """Return whether the process that listens there exists and does not answer. `ended`: the result
    for one that has ended."""
    try:
        async with asyncio.timeout(HANG_S):
            await runtime.query(path, command, 2 * HANG_S)
    except TimeoutError:
        return True
    except Unavailable as error:
        # Any other failure is that of a process which exists: the kernel accepts a limited number
        # of connections for it, which the queries of a minute use up.
        gone = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
        return ended or not gone
    return False


def max_files() -> int:
    """Return HAProxy's limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)


async def _until(condition: Callable[[], Awaitable[bool]], operation: str) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not await condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise Unavailable(f"{operation} took more than {TIMEOUT_S:.0f} s") from error


async def _gone(pid: int) -> bool:
    return not _exists(pid)


def _error_message(output: str) -> str:
    alerts = [line.partition(") : ")[2] for line in output.splitlines() if "[ALERT]" in line]
    return "; ".join(alerts[:3])[:400] or output.strip()[:400] or "it printed no message"


def _remedy(error_message: str) -> str:
    """Return the remedy for a known problem; empty where HAProxy's message is sufficient."""
    return next((fix for words, fix in _FIXES.items() if words in error_message), "")


def _reap(pid: int) -> None:
    """Reap the process if it is our child: the first process of a container inherits orphans."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _exists(pid: int) -> bool:
    """Whether the process runs. A zombie, which has ended but was not reaped yet, has an empty
    command line and does not count."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def _user() -> str:
    """Return the user that workers switch to. Empty, for no switch, without the capabilities to
    switch (as in a container with few) or without such a user."""
    status = Path("/proc/self/status").read_text()
    effective = next(
        (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0
    )
    if not all(effective >> right & 1 for right in (CAP_SETGID, CAP_SETUID)):
        return ""
    try:
        return pwd.getpwnam(USER).pw_name
    except KeyError:
        return ""
