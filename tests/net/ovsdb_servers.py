"""Servers of OVSDB for tests: one alone, and a RAFT cluster of three over TLS.

In: a directory. Out: running servers of a small database that has every type of column. A server
ends together with the test run, also after a kill -9 of it (prctl(2), PR_SET_PDEATHSIG)."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.openstack import places

from fairlead.lab.ports import free_ports
from fairlead.net.ovsdb import Changes, Database, Table, Tls

NAME = "Lab"
TIMEOUT_S = 60.0
ELECTION_TIMER_MS = 1000
_MAP = {"key": "string", "value": "string", "min": 0, "max": "unlimited"}
_WEAK = {"type": "uuid", "refTable": "Balancer", "refType": "weak"}
BALANCER: Mapping[str, Any] = {
    "name": "string",
    "vips": _MAP,
    "marks": _MAP,
    "protocol": {"key": {"type": "string", "enum": ["set", ["tcp", "udp"]]}, "min": 0, "max": 1},
    "fields": {"key": "string", "min": 0, "max": "unlimited"},
    "weights": {"key": "string", "value": "integer", "min": 0, "max": "unlimited"},
    "share": "real",
    "enabled": "boolean",
}
ROUTER: Mapping[str, Any] = {
    "name": "string",
    "balancers": {"key": _WEAK, "min": 0, "max": "unlimited"},
    "writes": "integer",
}
BALANCERS = Table(tuple(BALANCER))
ROUTERS = Table(tuple(ROUTER))
TABLES = {"Balancer": BALANCERS, "Router": ROUTERS}


def schema(*, without: str = "") -> dict[str, Any]:
    """Return the schema of the database. `without`: a column of Balancer that it lacks."""
    tables = {"Balancer": BALANCER, "Router": ROUTER}
    return {
        "name": NAME,
        "version": "1.1.0" if not without else "1.0.0",
        "tables": {
            name: {
                "columns": {
                    each: {"type": kind} for each, kind in columns.items() if each != without
                },
                "isRoot": True,
            }
            for name, columns in tables.items()
        },
    }


def tool(*words: str | Path) -> None:
    """Run ovsdb-tool."""
    subprocess.run([places.program("ovsdb-tool"), *words], check=True, capture_output=True)


class Server:
    """One process of ovsdb-server. `remotes`: where it listens."""

    def __init__(
        self,
        file: Path,
        *remotes: str,
        options: tuple[str, ...] = (),
        socket: Path | None = None,
    ) -> None:
        self.file = file
        self.socket = socket or file.with_suffix(".sock")
        self.remotes = remotes
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def remote(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        self.socket.unlink(missing_ok=True)
        log = self.file.with_suffix(".log")
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    places.program("ovsdb-server"),
                    self.file,
                    f"--remote=punix:{self.socket}",
                    *(f"--remote={each}" for each in self.remotes),
                    *self.options,
                    f"--unixctl={self.file.with_suffix('.ctl')}",
                    *("--no-chdir", "-vconsole:info"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"OVS_RUNDIR": str(self.file.parent)},
            )
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.socket.exists():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


def standalone(directory: Path, *, without: str = "") -> Server:
    """Return a server of a new database that runs."""
    (directory / "lab.ovsschema").write_text(json.dumps(schema(without=without)))
    file = directory / "lab.db"
    tool("create", file, directory / "lab.ovsschema")
    server = Server(file)
    server.start()
    return server


class Cluster:
    """Three servers that replicate one database over TLS. `schema_file`: its schema, else that of
    the small database. `name`: its name there."""

    def __init__(self, directory: Path, schema_file: Path | None = None, name: str = NAME) -> None:
        self.directory = directory
        self.schema_file, self.name = schema_file, name
        self.tls = certificates(directory, "cluster")
        ports = free_ports(6)
        self.raft = [f"ssl:127.0.0.1:{port}" for port in ports[:3]]
        self.remotes = [f"ssl:127.0.0.1:{port}" for port in ports[3:]]
        options = (
            f"--ca-cert={self.tls.ca}",
            f"--certificate={self.tls.certificate}",
            f"--private-key={self.tls.key}",
        )
        self.servers = [
            Server(directory / f"lab{n}.db", f"pssl:{port}:127.0.0.1", options=options)
            for n, port in enumerate(ports[3:])
        ]

    def start(self) -> None:
        """Create the cluster, and start its members."""
        file = self.schema_file or self.directory / "lab.ovsschema"
        if self.schema_file is None:
            file.write_text(json.dumps(schema()))
        first, *others = self.servers
        timer = f"--election-timer={ELECTION_TIMER_MS}"
        tool(timer, "create-cluster", first.file, file, self.raft[0])
        first.start()
        for server, address in zip(others, self.raft[1:], strict=True):
            tool("join-cluster", server.file, self.name, address, self.raft[0])
            server.start()

    def end(self) -> None:
        for server in self.servers:
            server.kill()

    def port(self, number: int) -> int:
        """Return the port of a member for clients."""
        return int(self.remotes[number].rpartition(":")[2])

    def member(self, remote: str) -> Server:
        """Return the server that listens at the address."""
        return self.servers[self.remotes.index(remote)]


def certificates(directory: Path, name: str) -> Tls:
    """Create a CA, and a certificate for servers and clients that has no name of a host."""
    files = {
        each: directory / f"{name}-{each}" for each in ("ca", "ca-key", "request", "crt", "key")
    }
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl(
        *("req", "-x509", *curve, "-keyout", files["ca-key"], "-out", files["ca"], "-days", "2"),
        *("-subj", "/CN=ca of the lab"),
    )
    _openssl(
        *("req", *curve, "-keyout", files["key"], "-out", files["request"], "-subj", "/CN=ovsdb"),
    )
    _openssl(
        *("x509", "-req", "-in", files["request"], "-CA", files["ca"], "-CAkey", files["ca-key"]),
        *("-CAcreateserial", "-out", files["crt"], "-days", "2"),
    )
    return Tls(files["ca"], files["crt"], files["key"])


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@asynccontextmanager
async def connected(
    *remotes: str,
    tables: Mapping[str, Table] = TABLES,
    tls: Tls | None = None,
    leader_only: bool = False,
    on_change: Callable[[Changes], None] = lambda changes: None,
    echo_after_s: float = TIMEOUT_S,
    echo_timeout_s: float = TIMEOUT_S,
    synced: bool = True,
) -> AsyncIterator[Database]:
    """Run a client; with `synced`, wait until it has read all rows. Echo requests are late by
    default, so that a test whose process is not scheduled loses no connection."""
    database = Database(
        NAME,
        remotes,
        tables,
        tls=tls,
        leader_only=leader_only,
        on_change=on_change,
        echo_after_s=echo_after_s,
        echo_timeout_s=echo_timeout_s,
    )
    running = asyncio.create_task(database.run())
    try:
        if synced:
            await database.wait_synced(TIMEOUT_S)
        yield database
    finally:
        assert not running.done(), running
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.01)


class Relay:
    """Forwards connections to a server, and can cut them at a chosen byte.

    In: the path of a Unix socket, on which it listens as well, or the port of a server on TLS.
    `received_bytes`: how much the server has sent. While `refuses`, new connections are closed."""

    TO_SERVER, TO_CLIENT = "to the server", "to the client"

    def __init__(self, directory: Path, server: Path | int) -> None:
        self.remote = ""
        self.received_bytes = 0
        self.cuts = 0
        self.refuses = False
        self._path = directory / "relay"
        self._server = server
        self._left: dict[str, int] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    def cut_after(self, direction: str, size_bytes: int) -> None:
        """Cut the connections after this many further bytes in a direction; a size that is never
        reached cuts nothing."""
        self._left = {direction: size_bytes}

    def cut(self) -> None:
        """Reset all connections."""
        self._left.clear()
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> "Relay":
        if isinstance(self._server, Path):
            self._listener = await asyncio.start_unix_server(self._serve, self._path)
            self.remote = f"unix:{self._path}"
        else:
            (port,) = free_ports(1)
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", port)
            self.remote = f"ssl:127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        if self.refuses:
            writer.transport.abort()
            return
        if isinstance(self._server, Path):
            far_reader, far_writer = await asyncio.open_unix_connection(self._server)
        else:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server)
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(
                self._copy(reader, far_writer, self.TO_SERVER),
                self._copy(far_reader, writer, self.TO_CLIENT),
            )
        finally:
            self._writers -= ends
            for each in ends:
                each.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str
    ) -> None:
        while True:
            try:
                data = await reader.read(1 << 16)
            except OSError:
                data = b""
            left = self._left.get(direction)
            writer.write(data if left is None else data[:left])
            if direction == self.TO_CLIENT:
                self.received_bytes += len(data)
            if left is not None:
                self._left[direction] = left - len(data)
                if left <= len(data):
                    # What was written is delivered first, because `abort` would drop it.
                    await _flushed(writer)
                    self.cut()
            if not data:
                writer.transport.abort()
                return


async def _flushed(writer: asyncio.StreamWriter) -> None:
    while writer.transport.get_write_buffer_size() and not writer.is_closing():
        await asyncio.sleep(0)
