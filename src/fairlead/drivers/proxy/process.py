"""The life of the HAProxy process: started apart from us, reloaded with its sockets handed on,
found again by a successor.

In: configuration texts. Out: a master and its worker that run by the newest one that HAProxy
accepts. It is nobody's child: it goes on when we are killed, and whoever comes next finds it by its
master socket. A configuration is tried (`haproxy -c`) before it is put in its place; at a reload
the new worker gets the listening sockets of the old one, which stays until its last connection has
ended. Invariant: `haproxy.cfg` in the folder is a text that HAProxy accepted. Follows HAProxy 2.6's
management manual, sections 4 (stopping and restarting) and 9.4 (master CLI)."""

import asyncio
import os
import pwd
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import structlog

from fairlead.drivers.proxy import runtime, states
from fairlead.drivers.proxy.render import Paths, description_of
from fairlead.errors import Refused, Unavailable

log = structlog.get_logger()

USER = "haproxy"
CAP_SETGID, CAP_SETUID = 6, 7
LOOK_S = 0.02
START_S = 20.0
_FIXES = {
    "Address already in use": "see that nothing else listens on the address",
    "Permission denied": "give the gateway CAP_NET_BIND_SERVICE",
    "FD limit": (
        "let the gateway have more open files: LimitNOFILE of its unit, or the container runtime's"
    ),
}
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Haproxy:
    """The one HAProxy of a folder, running or not."""

    def __init__(self, folder: Path, *, search: str = SEARCH) -> None:
        """`search`: where the program is looked for, as in PATH."""
        self._search = search
        self.folder = folder
        self.paths = Paths(str(folder), _user())
        self.master = folder / "master.sock"
        self.worker = folder / "worker.sock"
        self._text = folder / "haproxy.cfg"
        self._states = Path(self.paths.states)
        self._pid_file = folder / "haproxy.pid"

    def make_folder(self) -> None:
        """Raises Refused where that cannot be."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"{self.folder} cannot be made: {error.strerror}", fix="set gateway.proxyPath"
            ) from error

    def text(self) -> str:
        """The newest configuration; nothing if there was none."""
        with suppress(FileNotFoundError):
            return self._text.read_text()
        return ""

    async def running(self) -> bool:
        """Whether there is a master that answers, and a worker."""
        if not self.master.exists():
            return False
        try:
            found, _ = await runtime.workers(self.master)
        except Unavailable:
            return False
        return any(not each.old for each in found)

    def alive(self) -> bool:
        """Whether there is a master at all, be it that it does not answer."""
        return self._live_master() is not None

    async def runs(self, text: str) -> bool:
        """Whether the worker that runs goes by this text."""
        with suppress(Unavailable):
            return bool(text) and await runtime.description(self.worker) == description_of(text)
        return False

    def master_pid(self) -> int | None:
        try:
            return int(self._pid_file.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None

    async def run(self, text: str) -> None:
        """Have HAProxy run by this text: started if it does not, else reloaded. Raises Refused for
        a text that it does not accept or cannot carry out, Unavailable if it does not come up; what
        ran before goes on then."""
        self.make_folder()
        candidate = self.folder / "candidate.cfg"
        candidate.write_text(text)
        self._states.write_text(states.NOTHING)
        await self._check(candidate)
        before = self.text()
        candidate.replace(self._text)
        try:
            await (self._reload(text) if await self.running() else self._start())
        except Refused:
            if before:
                self._text.write_text(before)
            raise

    async def stop(self) -> None:
        """End it: no new connections; those that are open may go on until they end."""
        if (pid := self._live_master()) is not None:
            os.kill(pid, signal.SIGUSR1)
        for left in (self._text, self.master, self.worker):
            left.unlink(missing_ok=True)

    async def kill(self) -> None:
        """End it with all its connections, and take its folder away."""
        if (pid := self._live_master()) is not None:
            os.kill(pid, signal.SIGTERM)
            await _until(lambda: _gone(pid), "ending HAProxy")
        shutil.rmtree(self.folder, ignore_errors=True)

    async def died(self) -> None:
        """Wait until the master that runs is gone. Returns at once if there is none."""
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

    def _live_master(self) -> int | None:
        """Its process id, once it has proved to be ours: a number in a file may be anybody's by
        now."""
        if not self.master.exists() or (pid := self.master_pid()) is None or not _exists(pid):
            return None
        with suppress(OSError):
            if os.fsencode(self._text) in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    async def _start(self) -> None:
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
        status, said = await self._call(*options)
        if status:
            raise Refused(f"HAProxy did not start: {(why := _complaint(said))}", fix=_fix(why))
        await _until(self.running, "starting HAProxy")
        log.info("HAProxy started", pid=self.master_pid())

    async def _reload(self, text: str) -> None:
        before, failed = await runtime.workers(self.master)
        known = {each.pid for each in before}
        with suppress(
            Unavailable
        ):  # then it is as at a start: who does not serve is found by the first checks
            self._states.write_text(
                states.not_serving(await runtime.ask(self.worker, "show servers state"), text)
            )
        await runtime.ask(self.master, "reload")

        async def taken_over() -> bool:
            try:
                found, failed_now = await runtime.workers(self.master)
            except Unavailable:  # it begins anew, as the same process
                return False
            if failed_now > failed:
                raise Refused(
                    "HAProxy did not take the new configuration over",
                    fix="see that nothing else listens on the address",
                )
            return any(
                not each.old and each.pid not in known for each in found
            ) and await self.runs(text)

        await _until(taken_over, "reloading HAProxy")

    async def _check(self, path: Path) -> None:
        status, said = await self._call("-c", "-q", "-f", str(path))
        if status:
            raise Refused(f"HAProxy does not accept the configuration: {_complaint(said)}")

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
            env={"PATH": self._search},  # nothing of ours: it outlives us
            start_new_session=True,
        )
        _, said = await process.communicate()
        return process.returncode or 0, said.decode(errors="replace")


async def _until(so: Callable[[], Awaitable[bool]], doing: str) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not await so():
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise Unavailable(f"{doing} has taken more than {START_S:.0f} s") from error


async def _gone(pid: int) -> bool:
    return not _exists(pid)


def _complaint(said: str) -> str:
    alerts = [line.partition(") : ")[2] for line in said.splitlines() if "[ALERT]" in line]
    return "; ".join(alerts[:3])[:400] or said.strip()[:400] or "it said nothing"


def _fix(complaint: str) -> str:
    """What to do about it; nothing where the complaint says all that is known."""
    return next((fix for words, fix in _FIXES.items() if words in complaint), "")


def _reap(pid: int) -> None:
    """It is our child where we are the first process of a container."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _exists(pid: int) -> bool:
    """Whether it runs; one that has ended and is still to be reaped, by whoever is in charge of
    orphans, does not."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def _user() -> str:
    """Whom workers can become: nobody else without the right to, as in a container that has few."""
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
