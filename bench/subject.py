"""A measured process, seen from outside: start it, follow its stages, query its figures, end it.

In: a command line and the API server's `Access`. Out: its `Usage` at each stage, and its driver
calls. Every wait has a deadline.
"""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from bench.figures import Usage
from bench.fixture import Size

from fairlead.errors import Unavailable
from fairlead.kube.access import Access

PATIENCE_S = 600.0
STAGES = ("started", "synced", "planned")
ROOT = Path(__file__).parent.parent


class Message(msgspec.Struct):
    """A line of a measured process. Which fields are set depends on the command that it answers."""

    at_s: float = 0.0
    cpu_s: float = 0.0
    resident_kib: int = 0
    peak_kib: int = 0
    stage: str = ""
    seen: int = 0
    calls: int = 0
    applied: dict[str, float] = {}

    @property
    def usage(self) -> Usage:
        return Usage(self.at_s, self.cpu_s, self.resident_kib, self.peak_kib)


class Subject:
    """A running process. `stages` holds its usage at each stage."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.stages: dict[str, Usage] = {}
        self._process = process

    async def reach(self, *stages: str) -> None:
        for stage in stages:
            message = await self._read()
            if message.stage != stage:
                raise Unavailable(f"{self.name}: expected stage {stage}, received {message}")
            self.stages[stage] = message.usage

    async def ask(self, what: str) -> Message:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        await self._process.stdin.drain()
        return await self._read()

    async def has_seen(self, services: int) -> None:
        """Wait until the driver was called for this number of Services since `begin`."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.ask("seen")).seen < services:
                await asyncio.sleep(0.25)

    async def _read(self) -> Message:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise Unavailable(
                f"{self.name} exited early, with {await self._process.wait()}; see its log"
            )
        return msgspec.json.decode(line, type=Message)


@asynccontextmanager
async def running(
    name: str, argv: Sequence[str], access: Access, size: Size, log: Path
) -> AsyncIterator[Subject]:
    """Run a subject, which has planned everything when the block begins. Its standard error goes to
    `log`."""
    expected: Mapping[str, int] = {
        "services": size.services,
        "slices": size.services,
        "nodes": size.nodes,
    }
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=errors, cwd=ROOT, limit=1 << 26
        )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode({"access": access, "expected": expected}) + b"\n")
        subject = Subject(name, process)
        await subject.reach(*STAGES)
        yield subject
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
