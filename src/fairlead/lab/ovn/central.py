"""The central part of OVN: the northbound and the southbound database, and northd, which translates
the first into the second.

In: a directory with a short path, the name of a lab. Out: the addresses of the databases; the
output of ovn-nbctl(8) and ovn-sbctl(8); the rows of a table. Unix sockets are reachable from every
network namespace, so the hypervisors need no network for them."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fairlead.errors import Unavailable
from fairlead.lab import process
from fairlead.lab.ovn.programs import program, schema

Database = Literal["nb", "sb"]
TIMEOUT_S = 60
"""The time that a command may take on a busy machine. Without a limit, `--wait=hv` would wait
forever for a hypervisor that is gone."""


class Central:
    """The databases and northd, in the network namespace `inside`. Call `start` once."""

    def __init__(self, lab: str, directory: Path, inside: str, logs: Path | None = None) -> None:
        """`logs`: the folder of the logs of all programs of this OVN; None: each program's own
        directory."""
        self.lab, self.directory, self.inside, self._logs = lab, directory, inside, logs

    def remote(self, database: Database) -> str:
        """Return the address of a database."""
        return f"unix:{self.directory}/{database}.sock"

    async def start(self) -> None:
        """Start the databases and northd, and return when the databases are initialized."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in ("nb", "sb"):
            await self.start_database(name, create=True)
            await self.control(name, "init")
        self.start_northd()

    async def start_database(self, name: Database, *, create: bool = False) -> process.Process:
        """Start the server of a database; `create`: with an empty database."""
        file, socket = self.directory / f"{name}.db", self.directory / f"{name}.sock"
        if create:
            made = (str(program("ovsdb-tool")), "create", str(file))
            await self.run((*made, str(schema(f"ovn-{name}.ovsschema"))))
        argv = (str(program("ovsdb-server")), str(file), f"--remote=punix:{socket}")
        started = self._spawn(f"ovsdb-{name}", argv)
        is_ready = partial(accepts, socket)
        await process.await_ready(started, is_ready, log=self._log(f"ovsdb-{name}"))
        return started

    def start_northd(self) -> process.Process:
        """Start northd."""
        databases = [f"--ovn{name}-db={self.remote(name)}" for name in ("nb", "sb")]
        return self._spawn("northd", (str(program("ovn-northd")), *databases))

    async def control(self, database: Database, *command: str) -> str:
        """Return the output of ovn-nbctl or ovn-sbctl. Raise Unavailable if the command fails."""
        remote = f"--db={self.remote(database)}"
        tool = str(program(f"ovn-{database}ctl"))
        return await self.run((tool, remote, f"--timeout={TIMEOUT_S}", *command))

    async def rows(self, table: str, database: Database = "nb") -> Sequence[Mapping[str, Any]]:
        """Return all rows of a table: maps as dicts, sets as lists."""
        answer = json.loads(await self.control(database, "--format=json", "list", table))
        return [
            dict(zip(answer["headings"], map(plain, row), strict=True)) for row in answer["data"]
        ]

    async def synchronize(self) -> None:
        """Return when every hypervisor handles packets by the present northbound database."""
        await self.control("nb", "--wait=hv", "sync")

    async def run(self, argv: Sequence[str]) -> str:
        """Return the output of a command. Raise Unavailable if it fails."""
        code, output, errors = await process.run(
            self.inside, argv, lab=self.lab, timeout_s=2 * TIMEOUT_S
        )
        if code:
            raise Unavailable(f"{' '.join(argv)} failed: {(output + errors).strip()[-2000:]}")
        return output

    def _spawn(self, name: str, argv: Sequence[str]) -> process.Process:
        control = (f"--unixctl={self.directory}/{name}.ctl", "--no-chdir", "-vconsole:warn")
        return process.spawn(
            self.lab,
            f"ovn/{name}",
            (*argv, *control),
            log=self._log(name),
            inside=self.inside,
            nice=process.SUPPORT_NICE,
        )

    def log(self, part: str, name: str, directory: Path) -> Path:
        """Return the log of a program of a part of OVN, which has this directory."""
        return (
            directory / f"{name}.log" if self._logs is None else self._logs / f"{part}-{name}.log"
        )

    def _log(self, name: str) -> Path:
        return self.log("ovn", name, self.directory)


async def accepts(path: Path) -> bool:
    """Return whether a server accepts connections at this Unix socket. The file alone is no proof,
    because it exists before the server listens."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


def plain(value: Any) -> Any:
    """Convert a value of RFC 7047 to a Python value."""
    match value:
        case ["map", pairs]:
            return {plain(key): plain(each) for key, each in pairs}
        case ["set", members]:
            return [plain(each) for each in members]
        case ["uuid", text]:
            return text
    return value
