"""The process of BIRD: start, adoption, check of configurations, end.

In: configuration texts. Out: a BIRD that runs with them. BIRD is started as a daemon: it continues
when this process is killed, and the next process finds it by its control socket. Or a sidecar or a
unit starts it; then this module only writes its files. Invariants: bird.conf in the folder is a
text that BIRD accepted, and a BIRD that starts with it at any time announces what was announced
last. BIRD is always started with `-R`, so that neighbors keep its routes (RFC 4724)."""

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import structlog

from fairlead.errors import FairleadError, Refused, Unavailable
from fairlead.net import daemon
from fairlead.net.bird import Bird
from fairlead.net.daemon import SEARCH

log = structlog.get_logger()

POLL_S = 0.02
"""Interval at which the process is polled during a start or an end."""
TIMEOUT_S = 20.0
"""Time-out of a start or an end."""
_FIX = "apt-get install bird2 (2.0.12 or newer)"


class BirdProcess:
    """The BIRD of a folder, running or not. `required`: whether the program must be installed here;
    if another container runs BIRD, it need not be. `search`: the folders that are searched for the
    program, as in PATH."""

    def __init__(self, folder: Path, *, required: bool = True, search: str = SEARCH) -> None:
        self._required = required
        self.folder = folder
        self.configuration = folder / "bird.conf"
        self.routes = folder / "routes.conf"
        self.log = folder / "bird.log"
        self.client = Bird(folder / "bird.ctl")
        self._candidate = folder / "candidate.conf"
        self._pid_file = folder / "bird.pid"
        self._search = search

    def make_folder(self) -> None:
        """Create the folder if it is missing. Raise Refused if that fails."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"creating {self.folder} failed: {error.strerror}", fix="set announce.bgp.directory"
            ) from error

    async def answers(self) -> bool:
        """Return whether a BIRD answers at the control socket."""
        try:
            await self.client.version()
        except FairleadError:
            return False
        return True

    def pid(self) -> int | None:
        """Return the process id of a BIRD that was started by this module and runs. Its command
        line shows that it is ours: the id in the file may by now belong to another process."""
        with suppress(OSError, ValueError, IndexError):
            pid = int(self._pid_file.read_text().split()[0])
            if os.fsencode(self.configuration) in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    async def check(self, text: str) -> None:
        """Have BIRD check a configuration. Raise Refused with BIRD's text if it is invalid. A BIRD
        that is neither installed here nor running yet checks the configuration at its start."""
        self.make_folder()
        write(self._candidate, text)
        try:
            if await self.answers():
                await self.client.check(self._candidate)
            elif self._required or self._program():
                await self._check_offline()
        finally:
            self._candidate.unlink(missing_ok=True)

    async def _check_offline(self) -> None:
        status, output = await self._call("-p", "-c", str(self._candidate))
        if status:
            raise Refused(f"BIRD does not accept the configuration: {_text(output)}")

    async def start(self) -> None:
        """Start BIRD, and wait until it answers. Raise Refused if it does not start, Unavailable if
        it takes too long, or a BIRD of this folder runs and does not answer."""
        if (pid := self.pid()) is not None:
            raise Unavailable(f"BIRD (process {pid}) does not answer at {self.client.path}")
        status, output = await self._call(
            "-c",
            str(self.configuration),
            "-s",
            str(self.client.path),
            "-P",
            str(self._pid_file),
            "-R",
        )
        if status:
            raise Refused(f"BIRD did not start: {_text(output)}")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not await self.answers():
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unavailable(
                f"BIRD did not answer within {TIMEOUT_S:.0f} s of its start"
            ) from error
        log.info("BIRD started", pid=self.pid(), directory=str(self.folder))

    async def exited(self) -> None:
        """Wait until the BIRD that this module started ends. Return at once if there is none."""
        if (pid := self.pid()) is not None:
            await daemon.exited(pid)

    async def stop(self) -> None:
        """Stop the BIRD that this module started, which withdraws its routes, and delete the
        folder."""
        if (pid := self.pid()) is not None:
            os.kill(pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self.exited()
            except TimeoutError as error:
                raise Unavailable(f"BIRD (process {pid}) did not end") from error
        shutil.rmtree(self.folder, ignore_errors=True)

    def _program(self) -> str | None:
        return daemon.find("bird", self._search)

    async def _call(self, *options: str) -> tuple[int, str]:
        if (program := self._program()) is None:
            raise Refused("BIRD is not installed on this host", fix=_FIX)
        return await daemon.call(program, *options, search=self._search)


def read(path: Path) -> str:
    """Return the content of the file; empty if there is none."""
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def write(path: Path, text: str) -> None:
    """Replace the file in one step. Only its owner may read it: it may contain passwords. Raise
    Unavailable if that fails."""
    draft = path.with_suffix(".new")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        raise Unavailable(
            f"writing {path} failed: {error.strerror}",
            fix="make room on the file system of announce.bgp.directory, and make it writable",
        ) from error


def _text(output: str) -> str:
    lines = [line.removeprefix("bird: ").strip() for line in output.splitlines() if line.strip()]
    return "; ".join(lines[:3])[:400] or "it printed no message"
