"""The maps of the program that answers for addresses, pinned so that they outlive the process.

In: the pin path of the gateway. Out: `Maps`, with the entries that a previous process left. The
maps of one layout are in `<pin path>/announce/layout-<digest>`, so a program never finds records of
another layout. `entries` is pinned last: a directory without it is incomplete, and is created
again. `bpf/neighbor.bpf.c` defines the records."""

import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self

from fairlead.net import bpffs
from fairlead.net.address import pack_address, unpack_address
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import ObjectFile, read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program, programs_with

OBJECT = Path(__file__).resolve().parents[2] / "objects" / "neighbor_tc.o"
OUTCOMES = ("answered", "dropped")
"""The names of the counters, in the order of `enum outcome` in bpf/neighbor.bpf.c."""
ENTRY, INTERFACE, CLAIM = Struct("=QI4x"), Struct("=Q6s2x"), Struct("=Q6s2x")
_INDEX, _COUNTER = Struct("=I"), Struct("=Q")
_PROGRAM, _COMPLETE, _LAYOUTS = "neighbor", "entries", "layout-*"
_LAYOUT = 1
"""Raised when a record changes without a change of its size."""


class Entry(NamedTuple):
    """What the program knows of one address. `deadline_ns`: in time of `now_ns`. `interface`: the
    index of the interface on which this host owns it; 0: another host owns it."""

    deadline_ns: int
    interface: int


class Claim(NamedTuple):
    """The last message of ARP or neighbor discovery in which another station used an address that
    this host owns. `mac`: as text. `age_s`: how long ago it arrived."""

    address: str
    mac: str
    age_s: float


class Maps:
    """The maps. Close them after use; pinned maps and attached programs stay."""

    def __init__(self, maps: Mapping[str, Map], object_file: ObjectFile, *, adopted: bool) -> None:
        self._maps = maps
        self._object_file = object_file
        self.adopted = adopted
        """Whether a previous process left the maps."""

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Adopt the maps that are pinned below the directory, or create and pin them."""
        object_file = read_object(OBJECT)
        layout = _layout_of(directory, object_file)
        if (layout / _COMPLETE).exists():
            maps = {name: Map.open(layout / name) for name in object_file.maps}
            return cls(maps, object_file, adopted=True)
        maps = create_maps([*object_file.maps.values()])
        bpffs.remove(layout)
        bpffs.prepare(layout)
        for name in sorted(maps, key=lambda each: each == _COMPLETE):
            maps[name].pin(layout / name)
        return cls(maps, object_file, adopted=False)

    @property
    def number(self) -> int:
        """The kernel's ID of the map `entries`, by which the programs that use these maps are
        recognized."""
        return self._maps[_COMPLETE].number

    def program(self) -> Program:
        """Load the program. The caller closes it."""
        return Program.load(
            self._object_file.programs[_PROGRAM],
            self._maps,
            program_type=PROGRAM_TYPE_SCHED_CLS,
            license_name=self._object_file.license,
        )

    def close(self) -> None:
        """Close the maps."""
        for each in self._maps.values():
            each.close()

    def entries(self) -> dict[str, Entry]:
        """Return all entries, by address, also those whose deadline has passed."""
        return _entries_in(self._maps[_COMPLETE])

    def set_entries(self, entries: Mapping[str, Entry]) -> None:
        """Set exactly these entries, and forget claims of addresses that this host does not own."""
        wanted = {pack_address(each): ENTRY.pack(*entry) for each, entry in entries.items()}
        self._maps[_COMPLETE].update_all(wanted)
        self._maps[_COMPLETE].delete_all(
            [key for key, _ in self._maps[_COMPLETE].items() if key not in wanted]
        )
        owned = {pack_address(each) for each, entry in entries.items() if entry.interface}
        self._maps["claims"].delete_all(
            [key for key, _ in self._maps["claims"].items() if key not in owned]
        )

    def set_interfaces(self, macs: Mapping[int, bytes]) -> None:
        """Set the MAC address with which the program answers on each interface, by index. It leaves
        frames of other interfaces alone."""
        table = self._maps["interfaces"]
        present = {_INDEX.unpack(key)[0]: INTERFACE.unpack(value) for key, value in table.items()}
        for index, mac in macs.items():
            last_ns, before = present.get(index, (0, b""))
            if before != mac:
                table.update(_INDEX.pack(index), INTERFACE.pack(last_ns, mac))
        table.delete_all([_INDEX.pack(index) for index in present if index not in macs])

    def last_request_ns(self, interface: int) -> int:
        """Return when a request for an address that is owned on this interface was last answered
        there; 0: never."""
        value = self._maps["interfaces"].lookup(_INDEX.pack(interface))
        return int(INTERFACE.unpack(value)[0]) if value else 0

    def claims(self) -> list[Claim]:
        """Return the last claim of each address by another station."""
        now = now_ns()
        found = ((key, *CLAIM.unpack(value)) for key, value in self._maps["claims"].items())
        return [
            Claim(unpack_address(key), mac.hex(":"), max(0.0, (now - seen_ns) / 1e9))
            for key, seen_ns, mac in found
        ]

    def counts(self) -> dict[str, int]:
        """Return the number of requests by outcome, since the maps were created."""
        table = self._maps["outcomes"]
        return {
            name: sum(_COUNTER.unpack(each)[0] for each in table.per_cpu(_INDEX.pack(number)))
            for number, name in enumerate(OUTCOMES)
        }


def now_ns() -> int:
    """Return the time of the program's clock, which goes on while the host is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def users(directory: Path) -> frozenset[int]:
    """Return the IDs of the programs, in every network namespace, that use the maps of any layout
    below the directory."""
    with ExitStack() as opened:
        found = [
            opened.enter_context(Map.open(each / _COMPLETE)).number for each in _layouts(directory)
        ]
        return programs_with(found)


def left_in(directory: Path) -> dict[str, Entry]:
    """Return the entries that a previous process left."""
    layout = _layout_of(directory, read_object(OBJECT))
    if not (layout / _COMPLETE).exists():
        return {}
    with Map.open(layout / _COMPLETE) as entries:
        return _entries_in(entries)


def indexes_of(entries: Mapping[str, Entry]) -> dict[str, int]:
    """Return the interface of each address, as in `Entry`."""
    return {address: each.interface for address, each in entries.items()}


def remove_older(directory: Path) -> None:
    """Remove the maps of other layouts, which no program uses any more."""
    present = _layout_of(directory, read_object(OBJECT))
    for each in _layouts(directory):
        if each != present:
            bpffs.remove(each)


def remove(directory: Path) -> list[str]:
    """Remove the maps of every layout, and return a description of them. Everything else below the
    directory belongs to another owner and stays."""
    layouts = _layouts(directory)
    for each in layouts:
        bpffs.remove(each)
    with suppress(OSError):  # it does not exist, or contains the pins of another owner
        directory.rmdir()
        directory.parent.rmdir()
    return [f"pins in {directory}"] if layouts else []


def _entries_in(table: Map) -> dict[str, Entry]:
    return {unpack_address(key): Entry(*ENTRY.unpack(value)) for key, value in table.items()}


def _layouts(directory: Path) -> list[Path]:
    return sorted(each.parent for each in directory.glob(f"{_LAYOUTS}/{_COMPLETE}"))


def _layout_of(directory: Path, object_file: ObjectFile) -> Path:
    text = repr((_LAYOUT, sorted(object_file.maps.values())))
    return directory / f"layout-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
