"""Where in the kernel packets are taken: the tc program on every interface, XDP in front of it
where that is worth it.

In: the configured interfaces, what they are, what `gateway.attach` asks for. Out: the programs
attached, and of each interface which and why. The tc program is complete; the XDP program does the
common packets whole and leaves the others to it. Invariant: a program takes the place of its
predecessor in one step of the kernel, and what others attached is never touched. Why not XDP
everywhere: measured, in the driver of a veth it turns segmentation offload off (bulk at 2.5 times
the CPU per byte), and two silent failures wait there; on a network card it takes a packet before
the kernel has spent anything on it."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

from fairlead.config import AttachKind
from fairlead.drivers.direct.maps.records import MAC, TAG_KEY
from fairlead.errors import Refused, Unavailable
from fairlead.net import interfaces, tc, xdp
from fairlead.net.bpf import Map
from fairlead.net.ethtool import Driver, driver_of
from fairlead.net.program import Program, maps_of
from fairlead.net.routes import Interface
from fairlead.net.selection import DEFAULT_ROUTE, Selection, is_name, select
from fairlead.role_state import InterfaceState

Mode = Literal["tc", "xdp", "xdp-generic"]

_MODES = {"xdp": xdp.NATIVE, "xdp-generic": xdp.GENERIC}
_COSTLY = {"virtio_net": "XDP in it turns receive offloads off and takes a queue for each CPU"}
"""Drivers of devices on a bus that have XDP but are better off without it."""
_VETH = (
    "in a veth it turns segmentation offload off; what it sends is lost unless the other end has "
    "an XDP program in its driver"
    " too, and connections from there hang unless the other end's checksum offload is off "
    "(ethtool -K PEER tx off)"
)


class Choice(NamedTuple):
    """`mode`: tc alone, or XDP in front of it."""

    mode: Mode
    why: str


class Programs(NamedTuple):
    """`tc`, `xdp`: each makes a loaded program; the caller closes it. `before_replacing`: called
    once all programs are loaded, right before the first of them is attached."""

    tc: Callable[[], Program]
    xdp: Callable[[], Program]
    before_replacing: Callable[[], None]


def choose(wanted: AttachKind, interface: Interface, driver: Driver) -> Choice:
    """What to attach to an interface."""
    what = driver.name or interface.kind or "no driver"
    if wanted != "auto":
        warning = f"; {_VETH}" if wanted == "xdp" and driver.name == "veth" else ""
        return Choice(wanted, f"gateway.attach asks for it{warning}")
    if interface.vlan:
        return Choice(
            "tc",
            "it is a VLAN of another interface; where XDP is attached there, it takes this one's "
            "frames too",
        )
    if not driver.bus:
        return Choice("tc", f"it is no network card but made by software ({what})")
    if driver.name in _COSTLY:
        return Choice("tc", f"its driver is {driver.name}: {_COSTLY[driver.name]}")
    return Choice("xdp", f"it is a network card ({what})")


def tags_of(interfaces: Iterable[Interface], fast: Collection[int]) -> dict[tuple[int, int], bytes]:
    """Which frames XDP is to take: (interface, VLAN or 0 for no tag) -> the hardware address that
    they must be for. They are those of the configured interfaces that have XDP, and of those that
    are VLANs of one of them."""
    wanted = {(each.number, 0): each.mac for each in interfaces if each.number in fast}
    return wanted | {
        (each.parent, each.vlan): each.mac
        for each in interfaces
        if each.vlan and each.parent in fast
    }


class Attachments:
    """The programs at the interfaces of one driver.

    selectors: which interfaces these are (see `net.selection`); read again at each call, as
    interfaces come and go. pin_path: the links of XDP are pinned there. priority: of the filter
    among an interface's tc filters."""

    def __init__(
        self, selectors: Sequence[str], wanted: AttachKind, pin_path: Path, priority: int
    ) -> None:
        self._selectors = selectors
        self._selection = Selection({}, ())
        self._wanted = wanted
        self._pin_path = pin_path
        self._priority = priority
        self._indexes: dict[str, int] = {}
        self._tags: dict[tuple[int, int], bytes] = {}
        self.shown: tuple[InterfaceState, ...] = ()
        """What each interface has."""

    @property
    def names(self) -> frozenset[str]:
        """The interfaces that are selected by name, present or not, and the interfaces that the
        last selection chose."""
        return frozenset(filter(is_name, self._selectors)).union(self._selection.names)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The selectors that chose no interface at the last call."""
        return self._selection.unmatched

    @property
    def fast(self) -> frozenset[int]:
        """The interfaces that have XDP."""
        return frozenset(self._indexes[each.name] for each in self.shown if each.attach != "tc")

    def check(self, present: Mapping[str, Interface]) -> None:
        """Raises Unavailable if interfaces that are selected by name are missing, or no interface
        is chosen."""
        self._select(present)
        if problem := self._selection.problem:
            raise Unavailable(
                problem,
                fix="check gateway.interfaces and gateway.interfacesByNode against `ip address`",
            )

    async def attach(self, programs: Programs, tags: Map, present: Mapping[str, Interface]) -> None:
        """Have the programs on every interface that there is, in place of predecessors, and on no
        other; and in the map `tags` which frames are theirs.

        Raises Unavailable for an interface that there is not, after all others have theirs; Refused
        where what was asked for by name cannot be had. What `auto` chose and cannot be had is done
        without, with the reason shown."""
        there = self._select(present)
        chosen = [(each, choose(self._wanted, each, driver_of(each.name))) for each in there]
        name = _filter_name(self._pin_path)
        shown = []
        with ExitStack() as loaded:
            # All programs are loaded before the first one is attached: flows that begin in between
            # get entries that only the older programs know. They are loaded in a thread, because
            # the kernel takes a good part of a second to verify a program.
            fast = await self._load_fast(programs, [choice for _, choice in chosen])
            if isinstance(fast, Program):
                loaded.enter_context(fast)
            complete = loaded.enter_context(await asyncio.to_thread(programs.tc))
            programs.before_replacing()
            for interface, _ in chosen:
                await tc.attach(
                    interface.number, complete.descriptor, name=name, priority=self._priority
                )
            for interface, choice in chosen:
                shown.append(
                    InterfaceState(interface.name, *await self._front(interface, choice, fast))
                )
        self._indexes = {each.name: each.number for each in there}
        self.shown = tuple(shown)
        self._tags = tags_of(there, self.fast)
        _set_tags(tags, self._tags)
        await self._leave_others(name)
        self.check(present)

    def _select(self, present: Mapping[str, Interface]) -> list[Interface]:
        """The interfaces that the selectors choose now."""
        found = interfaces.present(routes=DEFAULT_ROUTE in self._selectors)
        self._selection = select(self._selectors, found, self._selection)
        return [present[name] for name in self._selection.names if name in present]

    async def _load_fast(
        self, programs: Programs, choices: Iterable[Choice]
    ) -> Program | Refused | None:
        """The program for XDP, or why the kernel refuses it; None if no interface is to have it.
        Raises Refused where the configuration asks for XDP."""
        if all(choice.mode == "tc" for choice in choices):
            return None
        try:
            return await asyncio.to_thread(programs.xdp)
        except Refused as error:
            if self._wanted != "auto":
                raise
            return error

    async def _front(
        self, interface: Interface, choice: Choice, fast: Program | Refused | None
    ) -> Choice:
        """Attach XDP if it was chosen; what came of it."""
        if choice.mode == "tc" or fast is None:
            return choice
        try:
            if isinstance(fast, Refused):
                raise fast
            await xdp.attach(
                interface.number, fast, self._pin(interface.number), mode=_MODES[choice.mode]
            )
        except Refused as error:
            if self._wanted != "auto":
                raise
            return Choice("tc", f"{choice.why}, but {error}")
        return choice

    async def _leave_others(self, name: str) -> None:
        wanted = {(index, self._priority) for index in self._indexes.values()}
        for found in await tc.filters(name):
            if (found.interface, found.priority) not in wanted:
                await tc.detach(found)
        fast = {self._pin(index) for index in self.fast}
        for pin in _links(self._pin_path):
            if pin not in fast:
                xdp.detach(pin)

    async def whole(self, present: Mapping[str, Interface]) -> bool:
        """Whether every interface that there is has what it should, and is what it was: a hardware
        address may have changed."""
        there = self._select(present)
        if {each.name: each.number for each in there} != self._indexes or tags_of(
            there, self.fast
        ) != self._tags:
            return False
        found = await tc.filters(_filter_name(self._pin_path), self._indexes.values())
        links = (xdp.read_link(self._pin(index)) for index in self.fast)
        return {each.interface for each in found} >= set(self._indexes.values()) and all(
            link and link.interface for link in links
        )

    def _pin(self, index: int) -> Path:
        return self._pin_path / f"xdp-{index}"


def _set_tags(tags: Map, wanted: Mapping[tuple[int, int], bytes]) -> None:
    packed = {TAG_KEY.pack(*key): MAC.pack(mac) for key, mac in wanted.items()}
    tags.update_all(packed)
    tags.delete_all([key for key, _ in tags.items() if key not in packed])


def _links(pin_path: Path) -> list[Path]:
    return sorted(pin_path.glob("xdp-*"))


def _filter_name(pin_path: Path) -> str:
    """What marks our filters: two instances on one interface have different pin paths."""
    return f"fairlead:{pin_path.absolute()}"


class Attached(NamedTuple):
    """The programs that are attached with one pin path: filters of tc, and pinned links of XDP."""

    filters: tuple[tc.Filter, ...] = ()
    links: tuple[Path, ...] = ()


NOTHING = Attached()


async def attached(pin_path: Path) -> Attached:
    """What is attached with this pin path now, by any process."""
    return Attached(await tc.filters(_filter_name(pin_path)), tuple(_links(pin_path)))


def works_on(before: Attached, worked_on: Map) -> bool:
    """Whether one of these programs uses this map."""
    number = worked_on.number
    return any(number in maps_of(each.program) for each in before.filters)


async def detach(pin_path: Path, *, but: Attached = NOTHING) -> list[str]:
    """Detach every program that was attached with this pin path, except `but`. Returns what was
    detached, in words."""
    found, removed = await attached(pin_path), []
    for pin in found.links:
        if pin not in but.links:
            xdp.detach(pin)
            removed.append(f"XDP program at interface {pin.name.removeprefix('xdp-')}")
    stay = {(each.interface, each.priority) for each in but.filters}
    for each in found.filters:
        if (each.interface, each.priority) not in stay:
            await tc.detach(each)
            removed.append(f"program at interface {each.interface}")
    return removed
