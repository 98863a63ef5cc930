"""Changes the servers of a running HAProxy: add, move, delete, or set the weight.

In: the servers that listeners should have. Out: commands on the worker's socket, and a check of
their result. A server that is no longer wanted is put into maintenance, where it gets no
connections, and is deleted when no connection refers to it any more. Follows HAProxy 2.6's
management manual, `add server`, `set server`, `del server`."""

from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path

from fairlead.drivers.proxy import runtime
from fairlead.drivers.proxy.render import section_name, server_id, server_options
from fairlead.drivers.proxy.runtime import ServerState
from fairlead.drivers.proxy.spec import ProxyListener, ProxySpec, SetServers
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey

MAX_SECTION_READS = 20
"""For more listeners than this, the servers of all sections are read with one command."""

Present = Mapping[str, Mapping[str, ServerState]]
"""Servers by section and node."""


async def set_servers(
    path: Path, changes: Sequence[SetServers], specs: Mapping[ServiceKey, ProxySpec]
) -> set[tuple[str, str]]:
    """Give the listeners exactly these servers. Return the servers, as (section, node), that are
    now in maintenance and remain to be deleted. Raise Unavailable if HAProxy does not have the
    servers afterwards."""
    listeners = {
        section_name(service, each.listener.key): each.listener
        for service, one in specs.items()
        for each in one.listeners
    }
    wanted = {section_name(change.service, change.key): change for change in changes}
    present = await _present(path, wanted)
    leaving: set[tuple[str, str]] = set()
    commands: list[str] = []
    for section, change in wanted.items():
        existing = present.get(section, {})
        commands += await _add_and_move(path, section, listeners[section], change, existing)
        gone = existing.keys() - {each.node for each in change.servers}
        commands += [f"set server {section}/{node} state maint" for node in sorted(gone)]
        leaving |= {(section, node) for node in gone}
    await runtime.execute(path, commands)
    _check(wanted, await _present(path, wanted))
    return leaving


async def remove(path: Path, servers: Set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Delete servers in maintenance (section, node) unless a connection refers to them. Return the
    servers that still have connections. A server that is in use again, or already deleted, is
    skipped.

    `del server` checks for connections itself, but that is not enough: HAProxy 2.6.12 of Debian 12
    deletes a server that has just refused a connection, while that connection waits a second for
    its retry. HAProxy then reads and writes freed memory (issues 2298 and 2378 of haproxy/haproxy)
    and crashes, which closes every connection of the gateway."""
    if not servers:
        return set()
    left = await runtime.in_use(path) & servers
    for section, node in sorted(servers - left):
        if "connection" in (await runtime.query(path, f"del server {section}/{node}")).lower():
            left.add((section, node))
    return left


async def end_connections(master: Path, servers: Collection[tuple[str | None, str | None]]) -> None:
    """Close the connections to these servers (section, node), in the current worker and in old
    ones."""
    found, _ = await runtime.workers(master)
    for worker in found:
        # `shutdown sessions server` would be simpler, but it does not work in an old worker.
        for session in await runtime.sessions(master, worker.pid):
            if (session.get("be"), session.get("srv")) in servers:
                await runtime.query(master, f"@!{worker.pid} shutdown session {session['id']}")


async def _add_and_move(
    path: Path,
    section: str,
    listener: ProxyListener,
    change: SetServers,
    existing: Mapping[str, ServerState],
) -> list[str]:
    """Add missing servers and move servers to their addresses. Return the remaining commands, which
    print nothing if they succeed."""
    commands: list[str] = []
    taken = {each.number for each in existing.values()}
    for server in change.servers:
        name, found = f"{section}/{server.node}", existing.get(server.node)
        if found is None:
            number = server_id(server.node, taken)
            taken.add(number)
            await runtime.query(
                path, f"add server {name} {server_options(listener, server, number)}"
            )
            commands += [f"set server {name} state ready"] + [f"enable health {name}"] * bool(
                listener.settings.checks
            )
            continue
        if (found.address, found.port) != (server.address, server.port):
            await runtime.query(path, f"set server {name} addr {server.address} port {server.port}")
        if found.weight != server.weight:
            commands.append(f"set server {name} weight {server.weight}")
        if found.out:
            commands.append(f"set server {name} state ready")
    return commands


async def _present(
    path: Path, wanted: Mapping[str, SetServers]
) -> dict[str, dict[str, ServerState]]:
    found: dict[str, dict[str, ServerState]] = {}
    requested = [""] if len(wanted) > MAX_SECTION_READS else sorted(wanted)
    for section in requested:
        for each in await runtime.servers(path, section):
            found.setdefault(each.section, {})[each.node] = each
    return found


_Row = tuple[str, str, int, int]
"""A server: node, address, port, weight."""


def _check(wanted: Mapping[str, SetServers], present: Present) -> None:
    for section, change in wanted.items():
        rows = {
            (each.node, each.address, each.port, each.weight)
            for each in present.get(section, {}).values()
            if not each.out
        }
        requested = {(each.node, each.address, each.port, each.weight) for each in change.servers}
        if rows != requested:
            raise Unavailable(
                f"HAProxy does not have the servers of {section}: {_differences(rows, requested)}"
            )


def _differences(rows: set[_Row], requested: set[_Row]) -> str:
    """Describe the first three servers that HAProxy lacks, or has and should not have."""
    what = (
        (row, "missing" if row in requested else "unexpected")
        for row in sorted(rows ^ requested)[:3]
    )
    return ", ".join(
        f"{node} at {address}:{port} with weight {weight} is {state}"
        for (node, address, port, weight), state in what
    )
