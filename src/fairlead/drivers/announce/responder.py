"""Answer ARP requests and neighbor solicitations for owned addresses by a program in the kernel
(bpf/neighbor.bpf.c).

In: the addresses that this host owns, each with its interface, and the addresses that other hosts
own. Out: pinned maps, a filter at the ingress of each interface, in front of a gateway's own
filter, and memberships in the multicast groups of owned IPv6 addresses. Invariants: an address is
answered by no host whose process has neither run nor been replaced for `lifetime_s`; until then the
kernel answers without a process, and a restart changes nothing. Filters and pins of other owners
are not changed."""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path

import structlog

from fairlead.drivers.announce import groups
from fairlead.drivers.announce import maps as announce_maps
from fairlead.drivers.announce.maps import Claim, Entry, Maps, now_ns
from fairlead.errors import FairleadError, Refused
from fairlead.net import bpffs, interfaces, tc
from fairlead.net.interfaces import Link
from fairlead.net.link_events import LinkChanges, LinkEvents
from fairlead.net.program import Program, maps_of

log = structlog.get_logger()

PRIORITY = 99
"""Before a gateway's filter (100)."""
FOLLOW_PAUSE_S = 0.05
"""Pause after a change of the networks. Changes in this time are handled together."""
RELEASED_S = 10.0
"""How long a cleanup waits for programs elsewhere to end: the kernel removes the programs of a
network namespace some time after the namespace."""
_CHECK_S = 0.1


class Responder:
    """The program and its maps. Call `open` first and `close` last, in the network namespace of the
    interfaces.

    - `names`: returns the names of the interfaces to use; called whenever the host's interfaces
      change. An interface that does not exist, or has no MAC address, is left out.
    - `pin_path`: the pin path of the gateway; the maps are in its subdirectory `announce`.
    - `lifetime_s`: how long the program goes on after the last `set` or `refresh`; longer than it
      takes other hosts to notice that this one is gone."""

    def __init__(
        self, names: Callable[[], Collection[str]], pin_path: Path, lifetime_s: float
    ) -> None:
        self._names = names
        self._pin_path, self._directory = pin_path, directory_of(pin_path)
        self._lifetime_ns = int(lifetime_s * 1e9)
        self._lock = -1
        self._maps: Maps | None = None
        self._program: Program | None = None
        self._links: dict[str, Link] = {}
        self._owned: dict[str, str] = {}
        self._known: frozenset[str] = frozenset()
        self._was_set = False
        self._attached: set[int] = set()
        """The interfaces to which this process has attached the program."""
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Adopt the maps of a previous process, and attach the program in place of its program; or
        create the maps, and leave the interfaces as they are until the first `set`. Raise Refused
        if the host does not permit it, or another process uses the pins."""
        self._lock = bpffs.lock(self._directory)
        try:
            self._maps = await asyncio.to_thread(Maps.open, self._directory)
            if self._maps.adopted:
                await self._follow()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Release the resources of this process. The program goes on until the deadlines."""
        for each in (self._program, self._maps):
            if each is not None:
                each.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._program, self._maps, self._lock = None, None, -1
        self._attached, self._was_set = set(), False

    async def set(self, owned: Mapping[str, str], known: Collection[str]) -> None:
        """Answer for exactly the addresses `owned`, each on the named interface, and drop requests
        for them on other interfaces. Drop requests for `known`, the addresses that other hosts own.
        Requests for other addresses are left to the host."""
        async with self._turn:
            self._owned, self._known = dict(owned), frozenset(known)
            self._was_set = True
            await self._follow()

    def prolong(self) -> None:
        """Before the first `set`: move the deadlines that have not passed to `lifetime_s` from now.
        For a time in which it cannot be known who owns the addresses that a previous process has
        left. Afterwards it does nothing."""
        if self._was_set:
            return
        now = now_ns()
        self._opened.set_entries(
            {
                address: entry._replace(deadline_ns=now + self._lifetime_ns)
                for address, entry in self._opened.entries().items()
                if entry.deadline_ns > now
            }
        )

    def refresh(self) -> None:
        """Move all deadlines to `lifetime_s` from now. Does nothing before the first `set`: the
        addresses that a previous process left may have another owner by now. See `prolong`."""
        if not self._was_set:
            return
        deadline_ns = now_ns() + self._lifetime_ns
        indexes = dict.fromkeys(self._known, 0) | self._owned_at()
        self._opened.set_entries(
            {address: Entry(deadline_ns, index) for address, index in indexes.items()}
        )

    async def run(self) -> None:
        """Until cancelled: follow the host's interfaces, and attach the program again if another
        process has removed it."""
        with closing(LinkEvents()) as events:
            while True:
                began_s = time.monotonic()
                async with self._turn:
                    try:
                        if self._was_set or self._opened.adopted:
                            await self._follow()
                    except FairleadError as error:
                        log.warning(
                            "answering for addresses after a change of the networks failed",
                            error=str(error),
                        )
                # If another program keeps undoing this, leave most of the time for other work.
                await asyncio.sleep(max(FOLLOW_PAUSE_S, 5 * (time.monotonic() - began_s)))
                while not self._is_affected(await events.next()):
                    pass

    async def remove(self) -> list[str]:
        """See `remove_responder`."""
        return await remove_responder(self._pin_path)

    def answered(self) -> dict[str, str]:
        """Return the addresses that the program answers now, also those of a previous process, each
        with the interface."""
        now, names = now_ns(), {each.index: name for name, each in self._links.items()}
        return {
            address: names[entry.interface]
            for address, entry in self._opened.entries().items()
            if entry.interface in names and entry.deadline_ns > now
        }

    def last_request(self, interface: str) -> float | None:
        """Return how many seconds ago a request for an owned address was last answered on the
        interface, also by a previous process; None if there was none."""
        link = self._links.get(interface)
        last_ns = self._opened.last_request_ns(link.index) if link else 0
        return max(0.0, (now_ns() - last_ns) / 1e9) if last_ns else None

    def claims(self) -> list[Claim]:
        """Return which stations with another MAC address used owned addresses last."""
        return self._opened.claims()

    def counts(self) -> dict[str, int]:
        """Return the number of requests that were answered, and that were dropped because another
        host owns the address."""
        return self._opened.counts()

    @property
    def _opened(self) -> Maps:
        if self._maps is None:
            raise RuntimeError("the responder is not open")
        return self._maps

    def _is_affected(self, changes: LinkChanges) -> bool:
        """Whether the changes may affect our interfaces. `names` may depend on addresses too."""
        return bool(changes.lost or changes.devices or changes.addresses) or not (
            self._attached.isdisjoint(changes.hooks)
        )

    async def _follow(self) -> None:
        """Bring memberships, maps and filters to the present interfaces. The maps come before the
        filters: the program never runs with missing entries. Memberships end before their entries
        and begin after them, because a later process knows of them only by the entries."""
        present = interfaces.links()
        found = [present[name] for name in self._names() if name in present]
        self._links = {link.name: link for link in found if link.mac}
        macs = {
            link.index: bytes.fromhex(link.mac.replace(":", "")) for link in self._links.values()
        }
        self._opened.set_interfaces(macs)
        names = {link.index: name for name, link in present.items()}
        before = groups.groups_of(announce_maps.indexes_of(self._opened.entries()))
        wanted = groups.groups_of(self._owned_at()) if self._was_set else before
        await asyncio.to_thread(groups.leave_all, before - wanted, names)
        self.refresh()
        await self._attach(macs)
        await asyncio.to_thread(groups.join_all, wanted, names)

    def _owned_at(self) -> dict[str, int]:
        """Return the index of the interface of each owned address; 0 if it does not exist."""
        links = self._links
        return {
            address: links[name].index if name in links else 0
            for address, name in self._owned.items()
        }

    async def _attach(self, wanted: Collection[int]) -> None:
        """Attach the program where it is missing, and detach it from all other interfaces."""
        name, number = filter_name(self._pin_path), self._opened.number
        using = {
            each.interface
            for each in await tc.filters(name, list(wanted))
            if each.priority == PRIORITY and number in maps_of(each.program)
        }
        for index in self._attached & set(wanted) - using:
            log.warning(
                "another process had removed the program that answers for addresses: it is "
                "attached again",
                interface=next(each.name for each in self._links.values() if each.index == index),
            )
        if self._program is None:
            self._program = await asyncio.to_thread(self._opened.program)
        for index in wanted:
            if index not in self._attached or index not in using:
                await tc.attach(index, self._program.descriptor, name=name, priority=PRIORITY)
        if self._attached != set(wanted):
            await _detach(name, but=wanted)
            await asyncio.to_thread(announce_maps.remove_older, self._directory)
        self._attached = set(wanted)


def directory_of(pin_path: Path) -> Path:
    """Return the directory of the responder's pins, for a gateway with this pin path."""
    return pin_path / "announce"


def filter_name(pin_path: Path) -> str:
    """Return the name of our filters: two instances on one interface have different pin paths."""
    return f"fairlead-announce:{pin_path.absolute()}"


async def remove_responder(pin_path: Path) -> list[str]:
    """Remove the filters that a process left in this network namespace, and its pins. Return what
    was removed, as text for the user. Raise Refused, and remove nothing, while a process uses the
    pins, or a gateway in another network namespace answers with them."""
    directory = directory_of(pin_path)
    lock = bpffs.lock(directory) if await asyncio.to_thread(directory.exists) else -1
    try:
        await _check_owner(pin_path)
        detached = await _detach(filter_name(pin_path))
        left = groups.groups_of(announce_maps.indexes_of(announce_maps.left_in(directory)))
        names = {link.index: name for name, link in interfaces.links().items()}
        await asyncio.to_thread(groups.leave_all, left, names)
        ended = [
            f"memberships in multicast groups at interface {index}"
            for index in sorted({index for index, _ in left})
        ]
        return [*detached, *ended, *await asyncio.to_thread(announce_maps.remove, directory)]
    finally:
        if lock >= 0:
            os.close(lock)


async def _detach(name: str, *, but: Collection[int] = ()) -> list[str]:
    removed = []
    for each in await tc.filters(name):
        if each.interface not in but or each.priority != PRIORITY:
            await tc.detach(each)
            removed.append(f"program that answers for addresses at interface {each.interface}")
    return removed


async def _check_owner(pin_path: Path) -> None:
    until_s = time.monotonic() + RELEASED_S
    while True:
        used = await asyncio.to_thread(announce_maps.users, directory_of(pin_path))
        if used <= {each.program for each in await tc.filters(filter_name(pin_path))}:
            return
        if time.monotonic() > until_s:
            raise Refused(
                "a gateway in another network namespace answers for addresses with the maps in "
                f"{directory_of(pin_path)}: nothing is removed",
                fix="run the command in the network namespace of that gateway, or give the "
                "--pin-path of the gateway to remove",
            )
        await asyncio.sleep(_CHECK_S)
