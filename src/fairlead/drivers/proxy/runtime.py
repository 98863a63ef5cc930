"""Commands on HAProxy's sockets: of a running worker, or of the master.

In: commands of the runtime API. Out: HAProxy's answers. Each command uses a connection of its own,
which HAProxy closes after the answer. Commands without an answer are joined to long lines. Follows
HAProxy 2.6's management manual, section 9.3 (UNIX socket commands) and 9.4 (master CLI)."""

import asyncio
import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Unavailable, plain

MAX_LINE_LENGTH = 8192
"""Maximum length of a line in characters. HAProxy reads a line into a buffer of 16 kB."""
ANSWER_S = 10.0
_IN_USE = re.compile(r" be=(\S+) srv=(\S+) ")
_LISTED = re.compile(r"(?P<number>\d+) \(\) acl 'src' file '.*' line (?P<line>\d+)")


class Worker(NamedTuple):
    """A worker process. `old`: it accepts no new connections. `reloads`: the number of reloads
    since its start."""

    pid: int
    old: bool
    reloads: int = 0


class Info(NamedTuple):
    """A worker's process id, its open client connections, and their maximum, which depends on its
    limit of file descriptors."""

    pid: int = 0
    connections: int = 0
    limit: int = 0


class ServerState(NamedTuple):
    """A server as the running worker has it. `out`: the server is in maintenance, where it waits
    for its deletion."""

    section: str
    node: str
    number: int
    address: str
    port: int
    weight: int
    out: bool


async def query(path: Path | str, command: str, timeout_s: float | None = None) -> str:
    """Send a command and return the answer. Raise Unavailable if no answer comes in this time, by
    default `ANSWER_S`."""
    try:
        async with asyncio.timeout(ANSWER_S if timeout_s is None else timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(command.encode() + b"\n")
                writer.write_eof()  # otherwise the master waits for another command
                return (await reader.read(-1)).decode(errors="replace")
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise Unavailable(
            f"HAProxy does not answer {command.split(';')[0][:80]!r} on {path}: {plain(error)}"
        ) from error


async def execute(path: Path | str, commands: Iterable[str]) -> None:
    """Send commands that print nothing if they succeed. Raise Unavailable with HAProxy's output if
    one fails."""
    for line in joined(commands):
        if said := (await query(path, line)).strip():
            raise Unavailable(f"HAProxy rejected a command in {line[:120]!r}: {said[:300]}")


def joined(commands: Iterable[str]) -> Iterator[str]:
    """Join commands to as few lines as HAProxy can read."""
    waiting: list[str] = []
    size = 0
    for command in commands:
        if waiting and size + len(command) + 1 > MAX_LINE_LENGTH:
            yield ";".join(waiting)
            waiting, size = [], 0
        waiting.append(command)
        size += len(command) + 1
    if waiting:
        yield ";".join(waiting)


async def acl_lists(path: Path | str) -> dict[int, int]:
    """Return the numbers of the ACL lists that are written in the configuration, by their line
    numbers there."""
    found = map(_LISTED.match, (await query(path, "show acl")).splitlines())
    return {int(each["line"]): int(each["number"]) for each in found if each}


async def replace_ranges(
    path: Path | str, listeners: Sequence[Sequence[int]], name: str, cidrs: Sequence[str]
) -> None:
    """Replace the source ranges of listeners. `listeners`: the numbers of each listener's ACL
    lists. A listener without numbers uses the list that was read from the file `name`. Raise
    Unavailable if there is no such list.

    The first list of a listener gets all ranges, in one atomic step; then the other lists are
    emptied."""
    await _replace(path, [*(f"#{numbers[0]}" for numbers in listeners if numbers)], cidrs)
    await _replace(path, [f"#{number}" for numbers in listeners for number in numbers[1:]], ())
    if not all(listeners):
        await _replace(path, [name], cidrs)


async def _replace(path: Path | str, names: Sequence[str], cidrs: Sequence[str]) -> None:
    """Replace the content of each list with these ranges."""
    versions: dict[str, str] = {}
    for each in names:
        version = (await query(path, f"prepare acl {each}")).strip().rpartition(" ")[2]
        if not version.isdecimal():
            raise Unavailable(f"HAProxy has no ACL list {each}")
        versions[each] = version
    await execute(
        path,
        (
            f"add acl @{version} {each} {cidr}"
            for each, version in versions.items()
            for cidr in cidrs
        ),
    )
    await execute(path, [f"commit acl @{version} {each}" for each, version in versions.items()])


async def shut_down(path: Path | str, sections: Iterable[str]) -> None:
    """Close the listening sockets of these sections for good. Open connections continue."""
    commands = [f"shutdown frontend {each}" for each in sections]
    for line in joined(commands):
        answers = (await query(path, line)).split("\n")
        if said := [each for each in answers if each and "already shut down" not in each]:
            raise Unavailable(f"HAProxy rejected a command in {line[:120]!r}: {said[0][:300]}")


async def listening(path: Path | str) -> set[str]:
    """Return the sections whose listening sockets have not been closed."""
    _, _, table = (await query(path, "show stat -1 1 -1")).partition("# ")
    return {row["pxname"] for row in _rows(table, ("pxname", "status")) if row["status"] != "STOP"}


async def description(path: Path | str) -> str:
    """Return the `description` in the worker's configuration."""
    return _parse_info(await query(path, "show info")).get("description", "")


def _parse_info(text: str) -> dict[str, str]:
    """Parse the output of `show info`; the names are converted to lower case."""
    return {
        name.lower(): value.strip()
        for name, _, value in (line.partition(": ") for line in text.splitlines())
    }


async def servers(path: Path | str, section: str = "") -> list[ServerState]:
    """Return all servers, or the servers of one section."""
    return list(read_servers(await query(path, f"show servers state {section}".strip())))


def read_servers(text: str) -> Iterator[ServerState]:
    """Parse the output of `show servers state`."""
    lines = text.splitlines()
    names = next((line.removeprefix("# ").split() for line in lines if line.startswith("# ")), [])
    for line in lines:
        row = dict(zip(names, line.split(), strict=False))
        if line.startswith("#") or "srv_name" not in row:
            continue
        yield ServerState(
            row["be_name"],
            row["srv_name"],
            int(row["srv_id"]),
            row["srv_addr"],
            int(row["srv_port"]),
            int(row["srv_uweight"]),
            bool(int(row["srv_admin_state"]) & 1),
        )


async def statistics(path: Path | str) -> list[Mapping[str, str]]:
    """Return the rows of `show stat`, keyed by the names of its columns."""
    text = await query(path, "show stat")
    return list(csv.DictReader(io.StringIO(text.removeprefix("# "))))


async def totals(
    path: Path | str, columns: Sequence[str]
) -> tuple[Info, Iterator[Mapping[str, str]]]:
    """Return these columns of `show stat` for all frontends and backends, but not for single
    servers: for a thousand Services these would be ten times as much output, which counting does
    not need.

    Also return the Info of the worker. Both come in one answer, so they are from the same
    worker."""
    text, _, table = (await query(path, "show info;show stat -1 3 -1")).partition("\n# ")
    said = _parse_info(text)
    return Info(*(int(said.get(name) or 0) for name in ("pid", "currconns", "maxconn"))), _rows(
        table, columns
    )


async def open_connections(master: Path | str, pid: int) -> dict[str, int]:
    """Return the number of open connections of one worker by section, through the master as in
    `sessions`."""
    _, _, table = (await query(master, f"@!{pid} show stat -1 1 -1")).partition("# ")
    return {row["pxname"]: int(row["scur"]) for row in _rows(table, ("pxname", "scur"))}


def _rows(table: str, columns: Sequence[str]) -> Iterator[Mapping[str, str]]:
    rows = csv.reader(io.StringIO(table))
    places = {name: at for at, name in enumerate(next(rows, [])) if name in columns}
    return ({name: row[at] for name, at in places.items()} for row in rows if row)


async def workers(master: Path | str) -> tuple[list[Worker], int]:
    """Return the workers, and the number of failed reloads in a row."""
    text = await query(master, "show proc")
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
    """Return the connections of one worker, where `id` is the worker's name for each. The command
    goes through the master, because an old worker cannot be reached otherwise."""
    text = await query(master, f"@!{pid} show sess")
    rows = (line.partition(": ") for line in text.splitlines())
    return [
        {"id": name, **dict(word.partition("=")[::2] for word in words.split())}
        for name, _, words in rows
    ]


async def in_use(path: Path) -> set[tuple[str, str]]:
    """Return the servers (section, node) to which a connection of this worker leads or is being
    tried."""
    return set(_IN_USE.findall(await query(path, "show sess")))
