"""HAProxy's sockets: ask a running worker, or the master above it.

In: commands of the runtime API. Out: what HAProxy answers. Each question goes over a connection of its own, which HAProxy
closes after its answer; many that answer nothing go in one line.
Follows HAProxy 2.6's management manual, section 9.3 (UNIX socket commands) and 9.4 (master CLI).
"""

import asyncio
import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Unavailable

LONGEST_LINE = 8192
"""HAProxy reads a line into a buffer of 16 kB."""
ANSWER_S = 10.0


class Worker(NamedTuple):
    """`reloads`: that it has seen. `old`: it takes nothing new."""

    pid: int
    old: bool
    reloads: int = 0


class Shown(NamedTuple):
    """A server as the running process has it. `out`: it is in maintenance, where a server waits for its removal."""

    section: str
    node: str
    number: int
    address: str
    port: int
    weight: int
    out: bool


async def ask(path: Path | str, command: str, timeout_s: float = ANSWER_S) -> str:
    """One answer. Raises Unavailable if there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(command.encode() + b"\n")
                writer.write_eof()  # or the master waits for another command
                return (await reader.read(-1)).decode(errors="replace")
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise Unavailable(
            f"HAProxy does not answer {command.split(';')[0][:80]!r} on {path}: {error or 'timed out'}"
        ) from error


async def tell(path: Path | str, commands: Iterable[str]) -> None:
    """Commands that say nothing where they succeed. Raises Unavailable with HAProxy's words where one does not."""
    for line in joined(commands):
        if said := (await ask(path, line)).strip():
            raise Unavailable(f"HAProxy refused a command of {line[:120]!r}: {said[:300]}")


def joined(commands: Iterable[str]) -> Iterator[str]:
    """As few lines as HAProxy can read."""
    waiting: list[str] = []
    size = 0
    for command in commands:
        if waiting and size + len(command) + 1 > LONGEST_LINE:
            yield ";".join(waiting)
            waiting, size = [], 0
        waiting.append(command)
        size += len(command) + 1
    if waiting:
        yield ";".join(waiting)


async def replace_ranges(path: Path | str, numbers: Sequence[int], name: str, cidrs: Sequence[str]) -> None:
    """Put these patterns in the place of those of the lists, at one moment for each: of those that have these numbers, or of
    the one that was read from a file, whichever the worker has. Raises Unavailable if it has neither."""
    versions: dict[str, str] = {}
    for each in (*(f"#{number}" for number in numbers), name):
        version = (await ask(path, f"prepare acl {each}")).strip().rpartition(" ")[2]
        if version.isdecimal():
            versions[each] = version
    if name not in versions and len(versions) < len(numbers):
        raise Unavailable(f"HAProxy has no list {name}")
    await tell(path, (f"add acl @{version} {each} {cidr}" for each, version in versions.items() for cidr in cidrs))
    await tell(path, [f"commit acl @{version} {each}" for each, version in versions.items()])


async def description(path: Path | str) -> str:
    """What the configuration of the worker is called."""
    for line in (await ask(path, "show info")).splitlines():
        name, _, value = line.partition(": ")
        if name.lower() == "description":
            return value.strip()
    return ""


async def servers(path: Path | str, section: str = "") -> list[Shown]:
    """All servers, or those of one section."""
    return list(read_servers(await ask(path, f"show servers state {section}".strip())))


def read_servers(text: str) -> Iterator[Shown]:
    lines = text.splitlines()
    names = next((line.removeprefix("# ").split() for line in lines if line.startswith("# ")), [])
    for line in lines:
        row = dict(zip(names, line.split(), strict=False))
        if line.startswith("#") or "srv_name" not in row:
            continue
        yield Shown(
            row["be_name"],
            row["srv_name"],
            int(row["srv_id"]),
            row["srv_addr"],
            int(row["srv_port"]),
            int(row["srv_uweight"]),
            bool(int(row["srv_admin_state"]) & 1),
        )


async def statistics(path: Path | str) -> list[Mapping[str, str]]:
    """The rows of `show stat`, by the names of its columns."""
    text = await ask(path, "show stat")
    return list(csv.DictReader(io.StringIO(text.removeprefix("# "))))


async def workers(master: Path | str) -> tuple[list[Worker], int]:
    """The workers, and how many reloads in a row have failed."""
    text = await ask(master, "show proc")
    found, failed, old = [], 0, False
    for line in text.splitlines():
        words = line.split()
        old = old or line.startswith("# old workers")
        if len(words) > 1 and words[1] == "worker":
            found.append(Worker(int(words[0]), old, int(words[2])))
        elif len(words) > 1 and words[1] == "master" and "[failed:" in words:
            failed = int(words[words.index("[failed:") + 1].rstrip("]"))
    return found, failed


async def sessions(master: Path, pid: int) -> list[Mapping[str, str]]:
    """The connections of one of the workers; `id` is what it calls each. Asked by way of the master: an old one is not to be
    reached otherwise."""
    text = await ask(master, f"@!{pid} show sess")
    rows = (line.partition(": ") for line in text.splitlines())
    return [{"id": name, **dict(word.partition("=")[::2] for word in words.split())} for name, _, words in rows]
