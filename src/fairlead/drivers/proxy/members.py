"""Change the servers of a HAProxy that runs: add, weigh, move, take out.

In: the servers that listeners should have. Out: commands on the worker's socket, and a look at what
has become of them. A server that is not wanted any more gets no connections and is put into
maintenance; it is removed once none names it. Follows HAProxy 2.6's management manual, `add
server`, `set server`, `del server`."""

from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path

from fairlead.drivers.proxy import runtime
from fairlead.drivers.proxy.render import number_of, section_name, server_words
from fairlead.drivers.proxy.runtime import Shown
from fairlead.drivers.proxy.spec import ProxyListener, ProxySpec, SetServers
from fairlead.errors import Unavailable
from fairlead.model import ServiceKey

FEW = 20
"""Of more listeners than this the whole list of servers is asked for at once."""

Present = Mapping[str, Mapping[str, Shown]]
"""By section and node."""


async def set_servers(
    path: Path, changes: Sequence[SetServers], specs: Mapping[ServiceKey, ProxySpec]
) -> set[tuple[str, str]]:
    """Have these servers; says which are to be removed, as (section, node). Raises Unavailable if
    not all is so in the end."""
    listeners = {
        section_name(service, each.listener.key): each.listener
        for service, one in specs.items()
        for each in one.listeners
    }
    wanted = {section_name(change.service, change.key): change for change in changes}
    present = await _present(path, wanted)
    leaving: set[tuple[str, str]] = set()
    quiet: list[str] = []
    for section, change in wanted.items():
        there = present.get(section, {})
        quiet += await _bring(path, section, listeners[section], change, there)
        gone = there.keys() - {each.node for each in change.servers}
        quiet += [f"set server {section}/{node} state maint" for node in sorted(gone)]
        leaving |= {(section, node) for node in gone}
    await runtime.tell(path, quiet)
    _check(wanted, await _present(path, wanted))
    return leaving


async def remove(path: Path, places: Set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Take away servers in maintenance (section, node), but for those that connections go to; which
    these are. One that is in use again, or gone, is no matter.

    HAProxy's own word does not suffice: Debian 12's 2.6.12 takes away a server that has just
    refused a connection, while that connection waits for a second to be tried again. It then reads
    and writes memory that is another's (issues 2298 and 2378 of haproxy/haproxy: a crash, and with
    it every connection of the gateway)."""
    if not places:
        return set()
    left = await runtime.in_use(path) & places
    for section, node in sorted(places - left):
        if "connection" in (await runtime.ask(path, f"del server {section}/{node}")).lower():
            left.add((section, node))
    return left


async def end_connections(master: Path, places: Collection[tuple[str | None, str | None]]) -> None:
    """End the connections to these servers (section, node), in the worker that runs and in those
    before it."""
    found, _ = await runtime.workers(master)
    for worker in found:
        # `shutdown sessions server` would do, but not in a worker that takes nothing new any more.
        for session in await runtime.sessions(master, worker.pid):
            if (session.get("be"), session.get("srv")) in places:
                await runtime.ask(master, f"@!{worker.pid} shutdown session {session['id']}")


async def _bring(
    path: Path,
    section: str,
    listener: ProxyListener,
    change: SetServers,
    there: Mapping[str, Shown],
) -> list[str]:
    """Make what is missing; the commands for the rest."""
    quiet: list[str] = []
    taken = {each.number for each in there.values()}
    for server in change.servers:
        name, found = f"{section}/{server.node}", there.get(server.node)
        if found is None:
            number = number_of(server.node, taken)
            taken.add(number)
            await runtime.ask(path, f"add server {name} {server_words(listener, server, number)}")
            quiet += [f"set server {name} state ready"] + [f"enable health {name}"] * bool(
                listener.settings.checks
            )
            continue
        if (found.address, found.port) != (server.address, server.port):
            await runtime.ask(path, f"set server {name} addr {server.address} port {server.port}")
        if found.weight != server.weight:
            quiet.append(f"set server {name} weight {server.weight}")
        if found.out:
            quiet.append(f"set server {name} state ready")
    return quiet


async def _present(path: Path, wanted: Mapping[str, SetServers]) -> dict[str, dict[str, Shown]]:
    found: dict[str, dict[str, Shown]] = {}
    asked = [""] if len(wanted) > FEW else sorted(wanted)
    for section in asked:
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
        asked = {(each.node, each.address, each.port, each.weight) for each in change.servers}
        if rows != asked:
            raise Unavailable(
                f"HAProxy does not have the servers of {section}: {_differences(rows, asked)}"
            )


def _differences(rows: set[_Row], asked: set[_Row]) -> str:
    """The first three servers that HAProxy lacks, or has and should not."""
    what = (
        (row, "missing" if row in asked else "not asked for") for row in sorted(rows ^ asked)[:3]
    )
    return ", ".join(
        f"{node} at {address}:{port} with weight {weight} is {state}"
        for (node, address, port, weight), state in what
    )
