"""Creates, reads and changes the table `inet fairlead` in the kernel.

In: Changes. Out: nftables transactions; the Specs that the table holds. The network namespace is
the one in which the object was created. Invariants: no other table is read or written. Adopting a
table of the present layout does not change it: a start after kill -9 leaves every rule, counter and
element unchanged. A table of another layout (after an upgrade, or with other pod CIDRs) is replaced
together with its elements in one transaction, or not at all, so no packet encounters an empty
table."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import ParamSpec, TypeVar

from fairlead.drivers.nodeproxy.cleanup import FLOWS
from fairlead.drivers.nodeproxy.elements import Change, Element, Spec, by_owner, command, parsed
from fairlead.drivers.nodeproxy.skeleton import (
    TABLE,
    affinity_map,
    chain_of,
    layout,
    on_demand,
    owned_sets,
    prerequisites,
    raw_rule,
)
from fairlead.drivers.nodeproxy.wire import decode, encode
from fairlead.errors import Conflict, FairleadError, Unavailable, plain
from fairlead.model import ServiceKey
from fairlead.net.nfnetlink import ElementChange, Nfnetlink
from fairlead.net.nftables import Nftables, Record

_FAMILY, _NAME = TABLE.split()
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Table:
    """The table in the kernel. Calls must not overlap."""

    def __init__(self, commands: str, *, timeout_s: float) -> None:
        """`commands` create the empty table (see `skeleton`). `timeout_s` limits each transaction
        and each listing."""
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
        """The generation of the ruleset for which this object knows the content of the table; None
        if it does not."""

    async def untouched(self) -> bool:
        """Whether the table certainly has the content that was read and written here: the ruleset
        has not changed since."""
        return (
            self._generation is not None
            and await self._bounded(self._netlink.generation) == self._generation
        )

    async def intact(self) -> bool:
        """Whether all rules are present. Elements are not checked, so this takes a millisecond for
        any number of Services."""
        return self._complete(self._chains, await self._bounded(self._netlink.rules, _NAME))

    async def adopt(self) -> dict[ServiceKey, Spec]:
        """Make sure that the table exists in the present layout, with all its rules. Return the
        elements that it holds, by Service. Raise Unavailable if a table of an old layout cannot be
        replaced; its rules stay in force."""
        self._generation = None
        before = await self._bounded(self._netlink.generation)
        chains = await self._present_chains()
        if self._marker in chains and self._complete(
            chains, await self._bounded(self._netlink.rules, _NAME)
        ):
            self._chains = chains
            specs = await self._bounded(self._read, owned_sets(chains))
            if await self._bounded(self._netlink.generation) == before:
                self._generation = before
            return specs
        self._generation = before  # stays valid if the next transaction is ours
        if chains:
            return await self._replace(await self._owned(chains))
        await self._run(f"add table {TABLE}\ndelete table {TABLE}\n{self._skeleton}")
        self._chains = {self._marker}
        return {}

    def _complete(self, chains: Collection[str], existing: Counter[str]) -> bool:
        """Whether the fixed chains and `chains` have the number of rules with which they are
        created. The numbers are compared because `nft flush table` removes rules but leaves chains
        and elements, and a rule that another program adds may do anything."""
        ours = dict(self._rules)
        for name in chains:
            if name != self._marker and _is_on_demand(name):
                with contextlib.suppress(ValueError):  # another program's chain
                    ours[name] = 1 if raw_rule(name) else _rules_of(on_demand(name))[name]
        return all(existing[name] == count for name, count in ours.items())

    async def _replace(self, owned: Iterable[Record]) -> dict[ServiceKey, Spec]:
        """Recreate the table with the elements of the old one, in one transaction. An empty table
        in between would refuse every connection until the loop has filled it. A table that is too
        large, or too unlike ours, to be replaced in this way stays.

        The flow records are left out. While there were no rules, packets of clients may have
        created flows that lead to no endpoint. Without records, the next pass deletes such
        flows."""
        try:
            listed = await self._bounded(parsed, owned)
            specs = {
                key: frozenset(
                    _upgraded(each)
                    for each in spec
                    if not each.map.startswith(FLOWS) and not _is_obsolete(each)
                )
                for key, spec in listed.items()
            }
            elements = list(chain.from_iterable(specs.values()))
            # A chain that is written raw cannot be created in the same transaction, so the elements
            # that lead to such chains follow later.
            at_once = [element for element in elements if not _raw_target(element)]
            chains = _chains_for(at_once, frozenset())
            emptied = f"delete table {TABLE}\n{self._skeleton}{''.join(map(on_demand, chains))}"
            await self._run(emptied + _commands(at_once))
        except (FairleadError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(
                f"replacing the table {TABLE}, which has another version or configuration, or was "
                f"changed by another program: {plain(error)}; its rules stay in force",
                fix="if the problem persists, remove the table: fairlead node --cleanup",
            ) from error
        self._chains = {self._marker, *chains}
        later = [element for element in elements if _raw_target(element)]
        await self._write_raw(later)
        await self._run(_commands(later))
        return specs

    async def commit(self, changes: Sequence[Change]) -> None:
        """Carry out these Changes in one transaction. If nftables rejects it, raise the error;
        nothing has changed then."""
        added = [
            element for change in changes if change.verb == "add" for element in change.elements
        ]
        deleted = [
            element for change in changes if change.verb == "delete" for element in change.elements
        ]
        # A chain to which no verdict leads yet is harmless, so chains may be created in a
        # transaction before.
        if chains := _chains_for(added, self._chains):
            await self._run("".join(map(on_demand, chains)))
            self._chains.update(chains)
        await self._write_raw(added)
        await self._bounded(self._change, self._write, deleted, added)
        # Delete `remember` chains that are no longer used: their number grows with every time-out
        # that was ever used. `pick` chains stay, because their number is limited by the largest
        # number of endpoints.
        for name in sorted(
            {_target(each) for each in deleted if each.map.startswith("remember")} & self._chains
        ):
            await self._remove_if_unused(name)

    async def _remove_if_unused(self, chain: str) -> None:
        with contextlib.suppress(Conflict):
            await self._run(f"flush chain {TABLE} {chain}\ndelete chain {TABLE} {chain}\n")
            self._chains.discard(chain)

    async def clients(self, maps: Collection[int] | None = None) -> list[Element]:
        """Return the clients that are remembered for session affinity, in the maps with these
        numbers; with None, in all maps."""
        names = {affinity_map(chain) for chain in self._chains if chain.startswith("recall")}
        wanted = sorted(
            name for name in names if maps is None or int(name.rpartition("_")[2]) in maps
        )
        return [element for name in wanted for element in await self._bounded(self._elements, name)]

    async def forget(self, clients: Iterable[Element]) -> None:
        """Delete remembered clients. If one of them has just expired, the kernel rejects the whole
        transaction; each is then deleted by itself."""
        clients = tuple(clients)
        try:
            await self._bounded(self._change, self._write, clients, ())
        except Conflict:
            for client in clients:
                with contextlib.suppress(Conflict):
                    await self._bounded(self._change, self._write, [client], ())

    async def close(self, *, remove: bool) -> None:
        """Release the resources of this process; with `remove`, delete the table first."""
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
        """Return the listing of our maps and sets whose elements belong to Services. All are in one
        listing, so that it is consistent."""
        wanted = set(owned_sets(chains))
        listed = await self._list(f"list table {TABLE}")
        return [
            record
            for record in listed
            if isinstance(described := record.get("map") or record.get("set"), dict)
            and described["name"] in wanted
        ]

    async def _write_raw(self, elements: Iterable[Element]) -> None:
        """Create the chains to which these elements lead and that libnftables cannot write. A chain
        to which no verdict leads yet is harmless."""
        for name in sorted(set(map(_raw_target, elements)) - self._chains - {""}):
            await self._bounded(self._change, self._netlink.add_chain, _NAME, name, raw_rule(name))
            self._chains.add(name)

    def _read(self, names: Iterable[str]) -> dict[ServiceKey, Spec]:
        """Return what the maps hold, by Service. The maps are read one after the other, which is
        consistent because no other program writes into them."""
        return by_owner([element for name in names for element in self._elements(name)])

    def _elements(self, name: str) -> list[Element]:
        return [decode(name, listed) for listed in self._netlink.elements(_NAME, name)]

    def _write(self, deleted: Iterable[Element], added: Iterable[Element]) -> None:
        """Delete and add elements in one transaction. All deletions come first, because a frontend
        may pass from one Service to another."""
        going = [
            ElementChange("delete", name, [encode(element, key_only=True) for element in members])
            for name, members in _by_map(deleted).items()
        ]
        coming = [
            ElementChange("add", name, [encode(element) for element in members])
            for name, members in _by_map(added).items()
        ]
        self._netlink.change(_NAME, [*going, *coming])

    async def _list(self, text: str) -> Sequence[Record]:
        return await self._bounded(self._nft.listing, text)

    async def _run(self, text: str) -> None:
        if text:
            await self._bounded(self._change, self._nft.run, text)

    def _change(self, call: Callable[..., object], *arguments: object) -> None:
        """Run one transaction. Keep the known generation only if no other transaction ran at the
        same time."""
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
        """Run a call in our thread, because 5,000 elements take the kernel a tenth of a second.
        Raise Unavailable after the time-out. The call then continues, and later calls wait for its
        end, so that a reading always shows its result."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, partial(call, *arguments, **named)
                )
        except TimeoutError as error:
            raise Unavailable(f"nftables did not finish within {self._timeout_s:g} s") from error


async def remove_table(*, timeout_s: float = 60.0) -> bool:
    """Delete our table from this network namespace, whichever process left it. Return whether it
    existed. Raise Refused without libnftables or without the right to use it, Unavailable if the
    kernel does not finish in time."""
    with Nftables() as nft:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(_remove, nft)
        except TimeoutError as error:
            raise Unavailable(
                f"deleting the table {TABLE}: nftables did not finish within {timeout_s:g} s"
            ) from error


def _remove(nft: Nftables) -> bool:
    described = [record.get("table") for record in nft.listing(f"list tables {_FAMILY}")]
    existing = any(isinstance(each, dict) and each["name"] == _NAME for each in described)
    if existing:
        nft.run(f"delete table {TABLE}")
    return existing


def _chains_for(elements: Iterable[Element], present: Collection[str]) -> tuple[str, ...]:
    """Return the missing chains for these elements: the chains to which the elements lead, the
    chains with whose maps the elements are stored, and before each of them the chains that it needs
    itself."""
    elements = tuple(elements)
    targets = dict.fromkeys(
        target for element in elements if (target := _target(element)) and _is_on_demand(target)
    )
    sources = dict.fromkeys(
        chain for name in {element.map for element in elements} if (chain := chain_of(name))
    )
    chains = dict.fromkeys(
        needed for chain in (*targets, *sources) for needed in prerequisites(chain)
    )
    return tuple(name for name in chains if name not in present and not raw_rule(name))


def _target(element: Element) -> str:
    """Return the chain to which the element leads; empty if there is none."""
    verb, _, chain = element.value.partition(" ")
    return chain if verb in ("goto", "jump") else ""


def _is_on_demand(name: str) -> bool:
    """Whether the chain is created when first needed: its name ends in a number."""
    return name.rpartition("_")[2].isdecimal()


def _rules_of(commands: str) -> Counter[str]:
    """Return the number of rules of each chain that these commands create."""
    return Counter(
        line.split()[4] for line in commands.splitlines() if line.startswith(f"add rule {TABLE} ")
    )


def _is_obsolete(element: Element) -> bool:
    """Whether the element refers to the single map that earlier versions used for the clients of
    all Services: `goto remember4_10800`."""
    return element.map.startswith("remember") and element.value.count("_") == 1


def _upgraded(element: Element) -> Element:
    """Return the element with the chain `pick_3` in place of `affine_3`, which earlier versions
    used for frontends with session affinity."""
    return element._replace(value=element.value.replace("goto affine_", "goto pick_", 1))


def _raw_target(element: Element) -> str:
    """Return the chain to which the element leads if libnftables cannot write that chain; otherwise
    empty."""
    target = _target(element) if element.map.startswith("remember") else ""
    return target if raw_rule(target) else ""


def _by_map(elements: Iterable[Element]) -> dict[str, list[Element]]:
    by_map: dict[str, list[Element]] = {}
    for element in elements:
        by_map.setdefault(element.map, []).append(element)
    return by_map


def _commands(elements: Iterable[Element]) -> str:
    """Return commands that add these elements: one command per map, because many small commands are
    slower."""
    return "".join(
        f"{command('add', name, members)}\n" for name, members in _by_map(elements).items()
    )
