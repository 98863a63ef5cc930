"""Attach the eBPF programs to interfaces: the tc program to every interface, and XDP in front of it
where that is faster.

In: the configured interfaces, their properties, `gateway.attach`. Out: attached programs, and for
each interface which programs and why, and what keeps it from forwarding now: it is absent or down,
or another process has removed the program. The tc program is complete. The XDP program handles
common packets completely, and leaves all others to the tc program. Invariant: the kernel replaces a
program of the previous process in one step, and programs of other owners are never changed.

Why not XDP everywhere: according to measurements, XDP in the driver of a veth turns off
segmentation offload (bulk traffic needs 2.5 times the CPU time for each byte), and fails silently
in two ways (see `_VETH`). On a network card, XDP handles a packet before the kernel has spent any
time on it.

Why a filter of clsact and not a link of tcx (Linux 6.6), which `tc qdisc del` does not remove: a
link ends with its pin. A filter keeps forwarding when the pins are gone, because the bpffs was
mounted again or somebody deleted them, and its name shows whose it is without them; so the next
process can take over. That loss cannot be healed by a process that is not running, while a removed
filter is back within milliseconds if it is. An upgrade from the filter to the link would have both
programs at the hook for a moment, and a downgrade would leave the link in front of the filter. The
priority among the programs of an interface would become an order of attachment. And before Linux
6.6 the filter would still be needed, so every case would exist twice.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
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
from fairlead.net.selection import DEFAULT_ROUTE, Selection, is_name, is_pattern, select
from fairlead.role_state import InterfaceState

Mode = Literal["tc", "xdp", "xdp-generic"]

NOTHING_ATTACHED = "none"
"""What `InterfaceState.attach` shows for an interface without a program."""
_MODES = {"xdp": xdp.NATIVE, "xdp-generic": xdp.GENERIC}
_COSTLY = {"virtio_net": "XDP in it turns off receive offloads and needs a queue for each CPU"}
"""Drivers of devices on a bus that support XDP, but are faster without it."""
_VETH = (
    "in a veth it turns off segmentation offload; packets that it sends are lost unless the other "
    "end has an XDP program in its driver too, and connections from the other end hang unless its "
    "checksum offload is off (ethtool -K PEER tx off)"
)


class Choice(NamedTuple):
    """`mode`: only tc, or XDP in front of it."""

    mode: Mode
    why: str


class Programs(NamedTuple):
    """The programs of the gateway.

    `tc`, `xdp`: each returns a loaded program, which the caller closes. `before_replacing`: called
    when all programs are loaded, right before the first of them is attached.
    """

    tc: Callable[[], Program]
    xdp: Callable[[], Program]
    before_replacing: Callable[[], None]


def choose(wanted: AttachKind, interface: Interface, driver: Driver) -> Choice:
    """Return what to attach to an interface, and why."""
    what = driver.name or interface.kind or "no driver"
    if wanted != "auto":
        warning = f"; {_VETH}" if wanted == "xdp" and driver.name == "veth" else ""
        return Choice(wanted, f"requested by gateway.attach{warning}")
    if interface.vlan:
        return Choice(
            "tc",
            "it is a VLAN of another interface; an XDP program on that interface handles the "
            "frames of this one too",
        )
    if not driver.bus:
        return Choice("tc", f"it is a virtual interface ({what})")
    if driver.name in _COSTLY:
        return Choice("tc", f"its driver is {driver.name}: {_COSTLY[driver.name]}")
    return Choice("xdp", f"it is a network card ({what})")


def accepted_frames(
    interfaces: Iterable[Interface], with_xdp: Collection[int]
) -> dict[tuple[int, int], bytes]:
    """Return the frames that XDP accepts, as (interface, VLAN or 0 for no tag) and destination MAC
    address. These are the frames of the interfaces with XDP, and of the given VLANs of these
    interfaces."""
    wanted = {(each.number, 0): each.mac for each in interfaces if each.number in with_xdp}
    return wanted | {
        (each.parent, each.vlan): each.mac
        for each in interfaces
        if each.vlan and each.parent in with_xdp
    }


class Problems(NamedTuple):
    """The problems of the interfaces where packets for the gateway may arrive, by interface.

    `blocking`: packets for listeners are lost, because an interface is up without the program, or
    because no interface is left that forwards. `others`: interfaces that are absent, down or
    without carrier, while others forward."""

    blocking: Mapping[str, str]
    others: Mapping[str, str]

    def __str__(self) -> str:
        return "; ".join(self.blocking.values())


class Attachments:
    """The programs at the interfaces of one driver.

    `selectors`: the configured interfaces (see `net.selection`). Every call reads the interfaces
    again, because interfaces come and go. `pin_path`: the directory in which XDP links are pinned.
    `priority`: the priority of the filter among an interface's tc filters.
    """

    def __init__(
        self, selectors: Sequence[str], wanted: AttachKind, pin_path: Path, priority: int
    ) -> None:
        self._selectors = selectors
        self._selection = Selection({}, ())
        self._wanted = wanted
        self._pin_path = pin_path
        self._priority = priority
        self._indexes: dict[str, int] = {}
        self.choices: Mapping[str, Choice] = {}
        """What was attached to each interface, and why."""
        self._lost: frozenset[str] = frozenset()
        """The interfaces that have lost the program since, according to the last look."""
        self._present: Mapping[str, Interface] = {}
        self._tags: dict[tuple[int, int], bytes] = {}
        self._tc: Program | None = None
        self._xdp: Program | Refused | None = None
        """The loaded programs. They stay loaded, because the kernel takes a good part of a second
        to verify a program, and nothing is forwarded until a removed program is back."""

    def close(self) -> None:
        """Release the loaded programs. Attached programs stay."""
        for each in (self._tc, self._xdp):
            if isinstance(each, Program):
                each.close()
        self._tc = self._xdp = None

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
    def xdp_interfaces(self) -> frozenset[int]:
        """The interfaces that have XDP."""
        return frozenset(
            self._indexes[name] for name, choice in self.choices.items() if choice.mode != "tc"
        )

    @property
    def shown(self) -> tuple[InterfaceState, ...]:
        """The state of each selected interface, including those that are selected by name and do
        not exist."""
        names = dict.fromkeys((*self._selection.names, *filter(is_name, self._selectors)))
        return tuple(self._state(name) for name in names)

    def _state(self, name: str) -> InterfaceState:
        choice, interface = self.choices.get(name), self._present.get(name)
        if interface is None:
            return InterfaceState(name, NOTHING_ATTACHED, "", f"there is no interface {name}")
        if choice is None:
            problem = f"interface {name} does not have the gateway's program"
            return InterfaceState(name, NOTHING_ATTACHED, "", problem)
        mode, why = choice
        if name in self._lost:
            problem = f"another process has removed the gateway's program from interface {name}"
            return InterfaceState(name, NOTHING_ATTACHED, why, problem)
        if not interface.up:
            return InterfaceState(name, mode, why, f"interface {name} is down")
        return InterfaceState(
            name, mode, why, "" if interface.carrier else f"interface {name} has no carrier"
        )

    @property
    def problems(self) -> Problems:
        """What keeps interfaces from forwarding now.

        An interface that only a pattern selects, and that has no address, may be down: packets for
        this gateway do not arrive there, as at an unused port or a member of a bond."""
        shown = self.shown
        if not shown and self._selectors:
            return Problems({"": f"no interface matches {', '.join(self._selectors)}"}, {})
        needed = [each for each in shown if self._is_needed(each.name)] or shown
        wrong = {each.name: each.problem for each in needed if each.problem}
        # Packets still arrive at an interface that has lost only the program. From an interface
        # without a link the neighbours turn away, to the other interfaces of this host.
        blocking = {
            name: problem
            for name, problem in wrong.items()
            if len(wrong) == len(needed)
            or ((found := self._present.get(name)) is not None and found.carrier)
        }
        return Problems(blocking, {name: wrong[name] for name in wrong if name not in blocking})

    def _is_needed(self, name: str) -> bool:
        """Return whether packets for the gateway may arrive at the interface from other hosts."""
        by_pattern_only = all(
            is_pattern(selector)
            for selector, names in self._selection.chosen.items()
            if name in names or selector == name
        )
        has_address = any(each.addresses for each in self._selection.present if each.name == name)
        return name != "lo" and (not by_pattern_only or has_address)

    def check(self, present: Mapping[str, Interface]) -> None:
        """Raise Unavailable if an interface that is selected by name is missing, or no interface is
        selected."""
        self._select(present)
        if problem := self._selection.problem:
            raise Unavailable(
                problem,
                fix="check gateway.interfaces and gateway.interfacesByNode against `ip address`",
            )

    async def attach(self, programs: Programs, tags: Map, present: Mapping[str, Interface]) -> None:
        """Attach the programs to every selected interface that exists, in place of the programs of
        a previous process, and detach them from all other interfaces. Write to the map `tags` which
        frames XDP accepts.

        Raise Unavailable for a missing interface, after the programs are attached to all others.
        Raise Refused if a mode that was requested by name is not possible. If `auto` chose XDP and
        it is not possible, only tc is attached, and the reason is shown.
        """
        selected = self._select(present)
        chosen = [(each, choose(self._wanted, each, driver_of(each.name))) for each in selected]
        name = _filter_name(self._pin_path)
        choices = {}
        # All programs are loaded before the first one is attached, so that little time passes
        # between the attachments: flows that begin in this time get entries that only the older
        # programs know. The programs are loaded in a thread, because the kernel takes a good part
        # of a second to verify a program.
        xdp_program = await self._load_xdp(programs, [choice for _, choice in chosen])
        if self._tc is None:
            self._tc = await asyncio.to_thread(programs.tc)
        complete = self._tc
        programs.before_replacing()
        for interface, _ in chosen:
            await tc.attach(
                interface.number, complete.descriptor, name=name, priority=self._priority
            )
        for interface, choice in chosen:
            choices[interface.name] = await self._attach_xdp(interface, choice, xdp_program)
        self._indexes = {each.name: each.number for each in selected}
        self.choices, self._lost = choices, frozenset()
        self._tags = accepted_frames(selected, self.xdp_interfaces)
        _set_tags(tags, self._tags)
        await self._detach_others(name)
        self.check(present)

    def _select(self, present: Mapping[str, Interface]) -> list[Interface]:
        """Return the interfaces that the selectors choose now."""
        self._present = present
        found = interfaces.present(routes=DEFAULT_ROUTE in self._selectors)
        self._selection = select(self._selectors, found, self._selection)
        return [present[name] for name in self._selection.names if name in present]

    async def _load_xdp(
        self, programs: Programs, choices: Iterable[Choice]
    ) -> Program | Refused | None:
        """Return the program for XDP, or the error with which the kernel rejected it; None if no
        interface should have it. Raise Refused if the configuration requests XDP."""
        if all(choice.mode == "tc" for choice in choices):
            return None
        if self._xdp is None:
            try:
                self._xdp = await asyncio.to_thread(programs.xdp)
            except Refused as error:
                if self._wanted != "auto":
                    raise
                self._xdp = error
        return self._xdp

    async def _attach_xdp(
        self, interface: Interface, choice: Choice, xdp_program: Program | Refused | None
    ) -> Choice:
        """Attach XDP if it was chosen. Return the mode that the interface has now, and why."""
        if choice.mode == "tc" or xdp_program is None:
            return choice
        try:
            if isinstance(xdp_program, Refused):
                raise xdp_program
            await xdp.attach(
                interface.number, xdp_program, self._pin(interface.number), mode=_MODES[choice.mode]
            )
        except Refused as error:
            if self._wanted != "auto":
                raise
            return Choice("tc", f"{choice.why}, but {error}")
        return choice

    async def _detach_others(self, name: str) -> None:
        wanted = {(index, self._priority) for index in self._indexes.values()}
        for found in await tc.filters(name):
            if (found.interface, found.priority) not in wanted:
                await tc.detach(found)
        pins = {self._pin(index) for index in self.xdp_interfaces}
        for pin in _links(self._pin_path):
            if pin not in pins:
                xdp.detach(pin)

    def is_current(self, present: Mapping[str, Interface]) -> bool:
        """Return whether the selected interfaces are those of the last `attach`, and unchanged. The
        MAC address of an interface may have changed, for example."""
        selected = self._select(present)
        return {each.name: each.number for each in selected} == self._indexes and accepted_frames(
            selected, self.xdp_interfaces
        ) == self._tags

    async def look(self) -> frozenset[str]:
        """Return the interfaces that exist and have lost a program, and show those that forward
        nothing without it. Takes some 100 us for each interface."""
        existing = {name: index for name, index in self._indexes.items() if _exists(name, index)}
        found = await tc.filters(_filter_name(self._pin_path), existing.values())
        attached = {each.interface for each in found}
        self._lost = frozenset(name for name, index in existing.items() if index not in attached)
        links = {index: xdp.read_link(self._pin(index)) for index in self.xdp_interfaces}
        without_xdp = {index for index, link in links.items() if not (link and link.interface)}
        return self._lost.union(name for name, index in existing.items() if index in without_xdp)

    def _pin(self, index: int) -> Path:
        return self._pin_path / f"xdp-{index}"


def _set_tags(tags: Map, wanted: Mapping[tuple[int, int], bytes]) -> None:
    packed = {TAG_KEY.pack(*key): MAC.pack(mac) for key, mac in wanted.items()}
    tags.update_all(packed)
    tags.delete_all([key for key, _ in tags.items() if key not in packed])


def _exists(name: str, index: int) -> bool:
    try:
        return socket.if_nametoindex(name) == index
    except OSError:
        return False


def _links(pin_path: Path) -> list[Path]:
    return sorted(pin_path.glob("xdp-*"))


def _filter_name(pin_path: Path) -> str:
    """Return the name of our filters: two instances on one interface have different pin paths."""
    return f"fairlead:{pin_path.absolute()}"


class Attached(NamedTuple):
    """The programs that are attached with one pin path: tc filters, and pinned XDP links."""

    filters: tuple[tc.Filter, ...] = ()
    links: tuple[Path, ...] = ()


NOTHING = Attached()


async def attached(pin_path: Path) -> Attached:
    """Return the programs that are attached with this pin path now, by any process."""
    return Attached(await tc.filters(_filter_name(pin_path)), tuple(_links(pin_path)))


async def programs_here(before: Attached) -> frozenset[int]:
    """Return the IDs of these programs, without those that are attached in another network
    namespace. A link whose interface is gone is attached nowhere."""
    found = {each.program for each in before.filters}
    for link in filter(None, map(xdp.read_link, before.links)):
        if not link.interface:
            found.add(link.program_id)
            continue
        with suppress(Unavailable):  # no interface of this namespace has this index
            present = await xdp.attached(link.interface)
            found |= {present.program_id} if present else set()
    return frozenset(found)


def uses_map(before: Attached, searched: Map) -> bool:
    """Return whether one of these tc programs uses the map."""
    number = searched.number
    return any(number in maps_of(each.program) for each in before.filters)


async def detach(pin_path: Path, *, but: Attached = NOTHING) -> list[str]:
    """Detach every program that was attached with this pin path, except `but`. Return a description
    of each detached program."""
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
