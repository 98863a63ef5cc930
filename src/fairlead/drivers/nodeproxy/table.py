"""The table `inet fairlead` in the kernel: made, read and changed.

In: Changes. Out: nftables transactions; the Specs that the table holds. Works in the network
namespace where it was opened. Invariant: no other table is read or written, and a table of the
present layout is never touched by opening it: a start after kill -9 leaves every rule, counter and
element as it is. A table of another layout (an upgrade, other pod CIDRs) is replaced together with
its elements in one transaction, or not at all, so no packet meets an empty one."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import ParamSpec, TypeVar

from fairlead.drivers.nodeproxy.aftermath import FLOWS
from fairlead.drivers.nodeproxy.elements import Change, Element, Spec, by_owner, command, parsed
from fairlead.drivers.nodeproxy.skeleton import (
    TABLE,
    affinity_map,
    chain_of,
    layout,
    needed_first,
    on_demand,
    owned_sets,
    written_raw,
)
from fairlead.drivers.nodeproxy.wire import read, written
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import ServiceKey
from fairlead.net.nfnetlink import ElementChange, Nfnetlink
from fairlead.net.nftables import Nftables, Record

_FAMILY, _NAME = TABLE.split()
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Table:
    """Our table. One call at a time."""

    def __init__(self, commands: str, *, timeout_s: float) -> None:
        """`commands` make the empty table (see `skeleton`). `timeout_s`: for one transaction or
        listing."""
        marker = layout(commands)
        self._skeleton = f"{commands}add chain {TABLE} {marker}\n"
        self._marker = marker
        self._rules = _rules_of(self._skeleton)
        self._timeout_s = timeout_s
        self._nft = Nftables()
        self._netlink = Nfnetlink(timeout_s=timeout_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nftables")
        self._chains: set[str] = set()
        self._generation: int | None = None
        """The generation of the ruleset in which the table is as this object read and wrote it;
        None: unknown."""

    async def untouched(self) -> bool:
        """Whether the table is certainly as it was read and written here: nobody has run a
        transaction since."""
        return (
            self._generation is not None
            and await self._bounded(self._netlink.generation) == self._generation
        )

    async def intact(self) -> bool:
        """Whether all rules are there; elements are not looked at. However many Services there are,
        it takes a millisecond."""
        return self._whole(self._chains, await self._bounded(self._netlink.rules, _NAME))

    async def adopt(self) -> dict[ServiceKey, Spec]:
        """Make sure that the table is there in the present layout, with all its rules; return what
        it holds, by Service. Raises Unavailable where an old layout cannot be replaced: its rules
        are in force then as before."""
        self._generation = None
        before = await self._bounded(self._netlink.generation)
        chains = await self._present_chains()
        if self._marker in chains and self._whole(
            chains, await self._bounded(self._netlink.rules, _NAME)
        ):
            self._chains = chains
            specs = await self._bounded(self._read, owned_sets(chains))
            if await self._bounded(self._netlink.generation) == before:
                self._generation = before
            return specs
        self._generation = before  # lasts if the next transaction is ours
        if chains:
            return await self._replace(await self._owned(chains))
        await self._run(f"add table {TABLE}\ndelete table {TABLE}\n{self._skeleton}")
        self._chains = {self._marker}
        return {}

    def _whole(self, chains: Collection[str], there: Counter[str]) -> bool:
        """Whether the fixed chains and these have as many rules as they are made with. `nft flush
        table` leaves chains and elements; a rule that somebody adds may say anything."""
        ours = dict(self._rules)
        for name in chains:
            if name != self._marker and _is_on_demand(name):
                with contextlib.suppress(ValueError):  # somebody else's
                    ours[name] = 1 if written_raw(name) else _rules_of(on_demand(name))[name]
        return all(there[name] == count for name, count in ours.items())

    async def _replace(self, owned: Iterable[Record]) -> dict[ServiceKey, Spec]:
        """Make the table anew around the elements of the old one, in one transaction. An empty
        table in between would refuse every call until the loop has filled it; a table that is too
        large, or too strange, to be replaced so stays.

        Which flows may lead where is left out, as if nobody had looked: while there were no rules,
        what clients sent made flows that lead nowhere. The next pass forgets them."""
        try:
            listed = await self._bounded(parsed, owned)
            specs = {
                key: frozenset(
                    _of_today(each)
                    for each in spec
                    if not each.map.startswith(FLOWS) and not _is_outdated(each)
                )
                for key, spec in listed.items()
            }
            elements = list(chain.from_iterable(specs.values()))
            # A chain written raw cannot come in the same transaction: what goes there follows.
            at_once = [element for element in elements if not _raw_target(element)]
            chains = _chains_for(at_once, frozenset())
            emptied = f"delete table {TABLE}\n{self._skeleton}{''.join(map(on_demand, chains))}"
            await self._run(emptied + _commands(at_once))
        except (FairleadError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(
                f"replacing the table {TABLE}, which is of another version or configuration, or "
                "was changed by somebody else: "
                f"{error}; its rules stay in force",
                fix="if it stays so, take them away: fairlead node --cleanup",
            ) from error
        self._chains = {self._marker, *chains}
        later = [element for element in elements if _raw_target(element)]
        await self._write_raw(later)
        await self._run(_commands(later))
        return specs

    async def commit(self, changes: Sequence[Change]) -> None:
        """Carry out these Changes in one transaction. Raises what nftables raises; nothing has
        changed then."""
        added = [
            element for change in changes if change.verb == "add" for element in change.elements
        ]
        deleted = [
            element for change in changes if change.verb == "delete" for element in change.elements
        ]
        # A chain that nobody goes to yet is harmless, so chains need not come in the same
        # transaction.
        if chains := _chains_for(added, self._chains):
            await self._run("".join(map(on_demand, chains)))
            self._chains.update(chains)
        await self._write_raw(added)
        await self._bounded(self._change, self._write, deleted, added)
        # Chains for every time-out that was ever used would become many. The number of `pick`
        # chains is bounded by the largest number of endpoints.
        for name in sorted(
            {_target(each) for each in deleted if each.map.startswith("remember")} & self._chains
        ):
            await self._remove_if_unused(name)

    async def _remove_if_unused(self, chain: str) -> None:
        with contextlib.suppress(Conflict):
            await self._run(f"flush chain {TABLE} {chain}\ndelete chain {TABLE} {chain}\n")
            self._chains.discard(chain)

    async def clients(self, maps: Collection[int] | None = None) -> list[Element]:
        """The clients that are remembered for session affinity, in the maps of these numbers; None:
        in all."""
        names = {affinity_map(chain) for chain in self._chains if chain.startswith("recall")}
        wanted = sorted(
            name for name in names if maps is None or int(name.rpartition("_")[2]) in maps
        )
        return [element for name in wanted for element in await self._bounded(self._elements, name)]

    async def forget(self, clients: Iterable[Element]) -> None:
        """Forget remembered clients. One whose time is over meanwhile makes the kernel refuse all:
        then each goes alone."""
        clients = tuple(clients)
        try:
            await self._bounded(self._change, self._write, clients, ())
        except Conflict:
            for client in clients:
                with contextlib.suppress(Conflict):
                    await self._bounded(self._change, self._write, [client], ())

    async def close(self, *, remove: bool) -> None:
        """Let go; with `remove`, delete the table."""
        try:
            if remove:
                await self._run(f"add table {TABLE}\ndelete table {TABLE}")
        finally:
            await self._bounded(self._nft.close)
            self._netlink.close()
            self._thread.shutdown(wait=False)

    async def _present_chains(self) -> set[str]:
        found: set[str] = set()
        for record in await self._list(f"list chains {_FAMILY}"):
            described = record.get("chain")
            if isinstance(described, dict) and described["table"] == _NAME:
                found.add(described["name"])
        return found

    async def _owned(self, chains: Collection[str]) -> list[Record]:
        """The listing of our maps and sets whose elements belong to Services. One listing, and so
        one moment, of all."""
        wanted = set(owned_sets(chains))
        listed = await self._list(f"list table {TABLE}")
        return [
            record
            for record in listed
            if isinstance(described := record.get("map") or record.get("set"), dict)
            and described["name"] in wanted
        ]

    async def _write_raw(self, elements: Iterable[Element]) -> None:
        """Make the chains that these elements go to and that libnftables cannot write. One that
        nobody goes to is harmless."""
        for name in sorted(set(map(_raw_target, elements)) - self._chains - {""}):
            await self._bounded(
                self._change, self._netlink.add_chain, _NAME, name, written_raw(name)
            )
            self._chains.add(name)

    def _read(self, names: Iterable[str]) -> dict[ServiceKey, Spec]:
        """What the maps hold, by Service. Nobody else writes into them: they need not be read at
        one moment."""
        return by_owner([element for name in names for element in self._elements(name)])

    def _elements(self, name: str) -> list[Element]:
        return [read(name, listed) for listed in self._netlink.elements(_NAME, name)]

    def _write(self, deleted: Iterable[Element], added: Iterable[Element]) -> None:
        """All deletions first: a frontend may pass from one Service to another in the same
        transaction."""
        going = [
            ElementChange("delete", name, [written(element, key_only=True) for element in members])
            for name, members in _by_map(deleted).items()
        ]
        coming = [
            ElementChange("add", name, [written(element) for element in members])
            for name, members in _by_map(added).items()
        ]
        self._netlink.change(_NAME, [*going, *coming])

    async def _list(self, text: str) -> Sequence[Record]:
        return await self._bounded(self._nft.listing, text)

    async def _run(self, text: str) -> None:
        if text:
            await self._bounded(self._change, self._nft.run, text)

    def _change(self, call: Callable[..., object], *arguments: object) -> None:
        """Make one transaction, and note whether it was the only one."""
        before = self._netlink.generation()
        known, self._generation = self._generation, None
        try:
            call(*arguments)
        except Conflict:
            self._generation = known  # the kernel has applied nothing
            raise
        if known == before and self._netlink.generation() == before + 1:
            self._generation = before + 1

    async def _bounded(
        self,
        call: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """In a thread, as 5,000 elements take the kernel a tenth of a second. What outlives its
        deadline is waited for by those that come after it, so a reading always shows what became of
        it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, partial(call, *arguments, **named)
                )
        except TimeoutError as error:
            raise Unavailable(f"nftables did not come back within {self._timeout_s:g} s") from error


async def remove_table(*, timeout_s: float = 60.0) -> bool:
    """Delete our table from this network namespace, whoever left it there; whether there was one.
    Raises Refused without libnftables or without the right to use it, Unavailable if the kernel
    does not come back in time."""
    with Nftables() as nft:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(_remove, nft)
        except TimeoutError as error:
            raise Unavailable(
                f"deleting the table {TABLE}: nftables did not come back within {timeout_s:g} s"
            ) from error


def _remove(nft: Nftables) -> bool:
    described = [record.get("table") for record in nft.listing(f"list tables {_FAMILY}")]
    there = any(isinstance(each, dict) and each["name"] == _NAME for each in described)
    if there:
        nft.run(f"delete table {TABLE}")
    return there


def _chains_for(elements: Iterable[Element], present: Collection[str]) -> tuple[str, ...]:
    """The chains that do not exist yet: those to which these elements lead, those whose maps
    contain the elements, and before each of them the chains that it needs itself."""
    elements = tuple(elements)
    targets = dict.fromkeys(
        target for element in elements if (target := _target(element)) and _is_on_demand(target)
    )
    homes = dict.fromkeys(
        chain for name in {element.map for element in elements} if (chain := chain_of(name))
    )
    chains = dict.fromkeys(needed for chain in (*targets, *homes) for needed in needed_first(chain))
    return tuple(name for name in chains if name not in present and not written_raw(name))


def _target(element: Element) -> str:
    """The chain to which the element leads, or nothing."""
    verb, _, chain = element.value.partition(" ")
    return chain if verb in ("goto", "jump") else ""


def _is_on_demand(name: str) -> bool:
    return name.rpartition("_")[2].isdecimal()


def _rules_of(commands: str) -> Counter[str]:
    """How many rules each chain has that these commands make."""
    return Counter(
        line.split()[4] for line in commands.splitlines() if line.startswith(f"add rule {TABLE} ")
    )


def _is_outdated(element: Element) -> bool:
    """Whether it is about the one map that earlier versions had for the clients of all Services:
    `goto remember4_10800`."""
    return element.map.startswith("remember") and element.value.count("_") == 1


def _of_today(element: Element) -> Element:
    """The element with the chain that picks endpoints in the place of the one that recalled clients
    before, `affine_3`."""
    return element._replace(value=element.value.replace("goto affine_", "goto pick_", 1))


def _raw_target(element: Element) -> str:
    """The chain that the element goes to, if it is one that libnftables cannot write; else
    nothing."""
    target = _target(element) if element.map.startswith("remember") else ""
    return target if written_raw(target) else ""


def _by_map(elements: Iterable[Element]) -> dict[str, list[Element]]:
    by_map: dict[str, list[Element]] = {}
    for element in elements:
        by_map.setdefault(element.map, []).append(element)
    return by_map


def _commands(elements: Iterable[Element]) -> str:
    """Add these: one command for each map, for many small ones cost more."""
    return "".join(
        f"{command('add', name, members)}\n" for name, members in _by_map(elements).items()
    )
