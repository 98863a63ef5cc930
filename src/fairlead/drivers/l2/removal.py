"""Attach the program of layer 2 announcement, and remove everything that it has left on the host.

In: interfaces; a pin path. Out: filters at tc ingress; after removal, no filter, pin or multicast
membership. A removal first hands over the addresses that this host owns, through the maps alone: it
needs no process, and also works after a crash. Filters of other owners are not changed."""

import asyncio
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from fairlead.drivers import Component
from fairlead.drivers.l2 import maps as l2_maps
from fairlead.drivers.l2.maps import Maps
from fairlead.drivers.l2.records import Place
from fairlead.errors import FairleadError
from fairlead.net import interfaces, tc
from fairlead.net.memberships import leave
from fairlead.net.ndp import solicited_node
from fairlead.net.rtnetlink import open_rtnetlink

Role = Literal["gateway", "node"]

PRIORITIES: dict[Role, int] = {"gateway": 90, "node": 91}
"""Before a gateway's filter (100). A gateway and a node may run on one host."""
HAND_OVER_S = 3.0
"""How long a removal waits for other announcers to take over."""
OVERLAP_S = 1.0
"""How long this host still answers after another one has taken over."""
CHECK_S = 0.05


async def attach(pin_path: Path, role: Role, maps: Maps, wanted: Collection[int]) -> None:
    """Attach the program to these interfaces, unless it is attached already and uses our maps."""
    name = filter_name(pin_path)
    if not wanted:
        return
    attached = {each.interface: each.program for each in await tc.filters(name, list(wanted))}
    missing = [index for index in wanted if not maps.is_used_by(attached.get(index, 0))]
    if not missing:
        return
    program = await asyncio.to_thread(maps.program)
    with program:
        for index in missing:
            await tc.attach(index, program.descriptor, name=name, priority=PRIORITIES[role])
    await asyncio.to_thread(l2_maps.remove_older, pin_path)


async def detach(pin_path: Path, role: Role, *, but: Collection[int] = ()) -> list[str]:
    """Detach the program from all interfaces except these. Return descriptions."""
    removed = []
    for each in await tc.filters(filter_name(pin_path)):
        if each.interface not in but or each.priority != PRIORITIES[role]:
            await tc.detach(each)
            removed.append(f"layer 2 announcement at interface {each.interface}")
    return removed


def filter_name(pin_path: Path) -> str:
    """Return the name of our filters: two roles on one interface have different pin paths."""
    return f"fairlead-l2:{pin_path.absolute()}"


async def remove_l2(role: Role, pin_path: Path) -> list[str]:
    """Hand over what this host owns; then remove filters, memberships and pins. Return what was
    removed."""
    for directory in l2_maps.pinned(pin_path):
        # Another version may have other maps or records.
        with suppress(OSError, FairleadError, KeyError, ValueError, IndexError, struct.error):
            maps = Maps.open_pinned(directory)
            try:
                await hand_over(maps)
                await asyncio.to_thread(_leave_groups, list(maps.states()))
            finally:
                maps.close()
    removed = await detach(pin_path, role)
    return [*removed, *await asyncio.to_thread(l2_maps.remove, pin_path)]


async def hand_over(maps: Maps, limit_s: float = HAND_OVER_S) -> None:
    """Tell other announcers that this host leaves, and wait until they have taken over the
    addresses that it owns; this host still answers for a moment. Return at once if it owns none."""
    began_ns = time.monotonic_ns()
    mine = {place for place, owned in maps.states().items() if owned}
    presentations = maps.presentations()
    if not mine or all(each.deadline_ns < began_ns for each in presentations.values()):
        return
    for interface, each in presentations.items():
        maps.present(interface, each._replace(state="leaving"))
    waiting = set(mine)
    while waiting and time.monotonic_ns() - began_ns < limit_s * 1e9:
        await asyncio.sleep(CHECK_S)
        waiting -= {
            each.place
            for each in maps.claims()
            if each.kind == "announced" and each.seen_ns > began_ns
        }
    if waiting != mine:
        await asyncio.sleep(OVERLAP_S)


def _leave_groups(places: Sequence[Place]) -> None:
    names = {link.index: link.name for link in interfaces.links().values()}
    groups = {
        (place.interface, solicited_node(place.address)) for place in places if ":" in place.address
    }
    with open_rtnetlink("leaving multicast groups") as kernel:
        for index, group in groups:
            if index in names:
                leave(kernel, index, names[index], group)


class NoL2(Component):
    """The component of a role that announces nothing on layer 2: it removes what an earlier
    configuration left."""

    name = "no l2"

    def __init__(self, role: Role, pin_path: Path) -> None:
        self._role: Role = role
        self._pin_path = pin_path

    async def open(self) -> None:
        await self.remove()

    async def remove(self) -> Sequence[str]:
        return await remove_l2(self._role, self._pin_path)
