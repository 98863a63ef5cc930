"""The maps and the program of layer 2 announcement, pinned so that they outlive the process.

In: the directory for pins. Out: `Maps`, with the addresses that a previous process left. The maps
of one layout are in `<pin path>/layout-<digest>`, so a program never finds records of another
layout. `hosts` is pinned last: a directory without it is incomplete, and is created again.

Invariant: the role and its helper process both use the maps. One role at a time uses a pin path; it
holds a lock on the directory, which ends with the process."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from fairlead.drivers.l2.records import (
    COUNTER,
    ENTRY,
    EVENTS,
    INDEX,
    OWNED,
    SILENT,
    Claim,
    Place,
    Presentation,
    place_of,
    presentation_of,
    recorded_claim,
)
from fairlead.net import bpffs
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import ObjectFile, read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program, maps_of
from fairlead.net.ringbuf import RingBuffer

OBJECT = Path(__file__).resolve().parents[2] / "objects" / "neighbors_tc.o"
_PROGRAM = "neighbors"
_COMPLETE = "hosts"
_COPIED = ("entries", "hosts")
"""The maps whose elements are copied from another layout."""
_LAYOUT = 1
"""Raised when a record of bpf/neighbors.h changes without a change of its size."""


class Maps:
    """The maps. Close them after use; pinned maps and attached programs stay."""

    def __init__(self, maps: Mapping[str, Map], object_file: ObjectFile | None = None) -> None:
        self._maps = maps
        self._object_file = object_file

    @classmethod
    def create(cls) -> Self:
        """Create empty maps that are not pinned."""
        object_file = read_object(OBJECT)
        return cls(create_maps([*object_file.maps.values()]), object_file)

    @classmethod
    def open(cls, pin_path: Path) -> Self:
        """Adopt the maps that are pinned, or create and pin them. The addresses of another layout,
        and how this host presents itself, are copied, unless their records have changed."""
        object_file = read_object(OBJECT)
        directory = directory_of(pin_path, object_file)
        if (directory / _COMPLETE).exists():
            return cls({name: Map.open(directory / name) for name in object_file.maps}, object_file)
        made = cls(create_maps([*object_file.maps.values()]), object_file)
        for older in sorted(pin_path.glob(f"layout-*/{_COMPLETE}")):
            for name in _COPIED:
                with Map.open(older.with_name(name)) as found:
                    if found.spec[1:4] == made._maps[name].spec[1:4]:
                        made._maps[name].update_all(dict(found.items()))
        bpffs.remove(directory)
        bpffs.prepare(directory)
        for name in sorted(made._maps, key=lambda each: each == _COMPLETE):
            made._maps[name].pin(directory / name)
        return made

    @classmethod
    def open_pinned(cls, directory: Path) -> Self:
        """Open the maps that are pinned in the directory of a layout."""
        return cls({each.name: Map.open(each) for each in directory.iterdir()})

    def program(self) -> Program:
        """Load the program. The caller closes it."""
        assert self._object_file is not None
        return Program.load(
            self._object_file.programs[_PROGRAM],
            self._maps,
            program_type=PROGRAM_TYPE_SCHED_CLS,
            license_name=self._object_file.license,
        )

    def is_used_by(self, program_id: int) -> bool:
        """Return whether the attached program with this ID uses these maps."""
        return bool(program_id) and self._maps["entries"].number in maps_of(program_id)

    def close(self) -> None:
        """Close the maps."""
        for each in self._maps.values():
            each.close()

    def states(self) -> dict[Place, bool]:
        """Return the addresses, and whether the kernel answers for them."""
        return {
            place_of(key): ENTRY.unpack(value)[0] == OWNED
            for key, value in self._maps["entries"].items()
        }

    def set_states(self, owned: Mapping[Place, bool]) -> None:
        """Let the kernel answer for these addresses, or drop requests for them."""
        self._maps["entries"].update_all(
            {place.key(): ENTRY.pack(OWNED if mine else SILENT) for place, mine in owned.items()}
        )

    def forget(self, places: Collection[Place]) -> None:
        """Let the kernel ignore requests for these addresses."""
        keys = [place.key() for place in places]
        self._maps["entries"].delete_all(keys)
        for key in keys:
            self._maps["claims"].delete(key)

    def claims(self) -> Iterable[Claim]:
        """Return the last claim of each address by another station."""
        return [recorded_claim(*each) for each in self._maps["claims"].items()]

    def present(self, interface: int, presentation: Presentation) -> None:
        """Set how this host presents itself on an interface."""
        self._maps["hosts"].update(INDEX.pack(interface), presentation.pack())

    def presentations(self) -> dict[int, Presentation]:
        """Return how this host presents itself, by interface."""
        return {
            INDEX.unpack(key)[0]: presentation_of(value)
            for key, value in self._maps["hosts"].items()
        }

    def withdraw(self, interface: int) -> None:
        """Do not answer other announcers on this interface."""
        self._maps["hosts"].delete(INDEX.pack(interface))

    def reports(self) -> RingBuffer:
        """Return the reader of reported claims. The caller closes it."""
        return RingBuffer(self._maps["reports"])

    def counters(self) -> dict[str, int]:
        """Return the number of each event, since the maps were created."""
        events = self._maps["neighbor_events"]
        return {
            name: sum(COUNTER.unpack(each)[0] for each in events.per_cpu(INDEX.pack(number)))
            for number, name in enumerate(EVENTS)
        }


def directory_of(pin_path: Path, object_file: ObjectFile | None = None) -> Path:
    """Return the directory of the maps of the present layout."""
    maps = (object_file or read_object(OBJECT)).maps
    text = repr((_LAYOUT, sorted(maps.values())))
    return pin_path / f"layout-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def pinned(pin_path: Path) -> list[Path]:
    """Return the directories of all complete layouts."""
    return sorted(each.parent for each in pin_path.glob(f"layout-*/{_COMPLETE}"))


def remove_older(pin_path: Path) -> None:
    """Remove the maps of other layouts, which no program uses any more."""
    present = directory_of(pin_path)
    for each in pin_path.glob("layout-*"):
        if each != present:
            bpffs.remove(each)


def remove(pin_path: Path) -> list[str]:
    """Remove all pins, and return a description of each."""
    layouts = list(pin_path.glob("layout-*"))
    for each in layouts:
        bpffs.remove(each)
    with suppress(OSError):  # it does not exist, or contains the pins of another owner
        pin_path.rmdir()
        # A role that only announces has nothing else in the directory above.
        pin_path.parent.rmdir()
    return [f"pins in {pin_path}"] if layouts else []
