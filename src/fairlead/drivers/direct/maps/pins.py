"""Make the maps, or adopt those that a predecessor left pinned.

In: the directory for pins, the objects, sizes. Out: `Pins`: the maps, programs on them, and what
older layouts lie beside. The maps of one layout lie in `<pin path>/layout-<digest>`, the digest
taken over its description (see `upgrade`), so that a program never meets records of another shape.
`settings` is pinned last: a directory without it was left half made, and is made anew. What another
layout holds is carried over into ours before our program takes the other's place. Invariant: one
process at a time works with a pin path; a lock on the directory, which ends with its process, sees
to that."""

import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import structlog

from fairlead.drivers.direct.maps import upgrade
from fairlead.drivers.direct.maps.records import CHUNK_BYTES
from fairlead.errors import Refused
from fairlead.net import bpffs
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import ObjectFile, read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, PROGRAM_TYPE_XDP, Program

log = structlog.get_logger()

OBJECTS = Path(__file__).resolve().parents[3] / "objects"
OBJECT = OBJECTS / "direct_tc.o"
_XDP_OBJECT = "direct_xdp.o"
_COMPLETE = "settings"
_IN_MIB = ("size_mib", "configured_mib", "used_mib")


class Sizes(NamedTuple):
    """Sizes of maps that are made, in locked memory. Those of flows stay as a predecessor has made
    them."""

    arena_bytes: int = 128 << 20
    """For slots: 2 KiB to 128 KiB a listener, twice that while old connections are kept in place.
    The tables of a predecessor are copied into memory of this size, if they fit."""
    connections: int = 131072
    """Entries for TCP connections in slots that changed; some 100 bytes each."""
    datagrams: int = 65536
    """Entries for UDP flows."""

    def entries(self) -> dict[str, int]:
        """How many each map has, by its name."""
        return {
            "arena": self.arena_bytes // CHUNK_BYTES,
            "connections": self.connections,
            "datagrams": self.datagrams,
        }


class Pins(NamedTuple):
    """The maps by name, and the objects whose programs work on them."""

    maps: dict[str, Map]
    object_file: ObjectFile
    objects: Path
    older: tuple[Path, ...]
    """Directories of other layouts, the newest last: its program may still be forwarding."""
    description: upgrade.Description
    predecessor: upgrade.Description | None
    """Of the newest, if what it holds could be carried over, and so is in our maps."""
    copied: upgrade.Copied
    """What its tables of flows held when they were last read. Empty where another process carried
    them over and ended."""
    directory: Path
    """Where the maps are pinned."""
    empty: bool
    """Whether this start has made the maps with nothing in them, neither adopted nor carried
    over."""

    def tc(self) -> Program:
        """The complete program, for tc."""
        return _load(self.object_file, self.maps, PROGRAM_TYPE_SCHED_CLS)

    def xdp(self) -> Program:
        """The program for XDP."""
        return _load(read_object(self.objects / _XDP_OBJECT), self.maps, PROGRAM_TYPE_XDP)

    @property
    def complete(self) -> bool:
        """Whether our maps hold all there is to forward by. If not, the program of an older layout
        is to go on."""
        return not self.older or self.predecessor is not None

    def copy_changes_of_older(self, *, forwarding: bool) -> None:
        """Have in our tables of flows what an older program has changed in its own since. See
        `upgrade.copy_changes`."""
        if self.older and self.predecessor:
            upgrade.copy_changes(
                *(self.older[-1], self.predecessor, self.description, self.maps, self.copied),
                forwarding=forwarding or not self.copied,
            )

    def remove_older(self) -> Self:
        """Take away what older layouts left, now that our program forwards: but for it, nothing
        works on their maps."""
        self.copy_changes_of_older(forwarding=True)
        for path in self.older:
            bpffs.remove(path)
        return self._replace(older=(), predecessor=None, copied={})

    def discard(self) -> None:
        """Remove the pins of empty maps again, so that a start that failed leaves no memory in use.
        Other pins stay."""
        if self.empty:
            bpffs.remove(self.directory)

    def close(self) -> None:
        """Let go of everything; what is pinned or attached stays."""
        for each in self.maps.values():
            each.close()


def _load(object_file: ObjectFile, maps: Mapping[str, Map], program_type: int) -> Program:
    return Program.load(
        object_file.programs["direct"],
        maps,
        program_type=program_type,
        license_name=object_file.license,
    )


def lock(pin_path: Path) -> int:
    """Have the pin path to ourselves until the descriptor that is returned is closed. Makes the
    directory, mounts the bpffs."""
    bpffs.prepare(pin_path)
    descriptor = os.open(pin_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Refused(
            f"another process works with the pins in {pin_path}",
            fix="stop it first, or use another pin path",
        ) from error
    return descriptor


def open_pins(pin_path: Path, sizes: Sizes, objects: Path = OBJECTS) -> Pins:
    """The maps below `pin_path`. Takes some 100 ms when they are made anew.

    `objects`: the folder of the programs.
    """
    entries = sizes.entries()
    object_file = read_object(objects / OBJECT.name)
    entries["arena"] = _arena_entries(pin_path, entries["arena"])
    description = upgrade.describe(object_file, {"arena": entries["arena"]})
    directory = pin_path / f"layout-{_digest(description)}"
    others = [path for path in pin_path.glob("layout-*") if path != directory]
    older = [path for path in others if (path / _COMPLETE).exists()]
    for incomplete in set(others) - set(older):
        bpffs.remove(incomplete)
    older.sort(key=lambda path: (path / _COMPLETE).stat().st_mtime_ns)
    predecessor = _describe_predecessor(older, description)
    copied: upgrade.Copied = {}
    adopted = (directory / _COMPLETE).exists()
    if adopted:
        maps = {name: Map.open(directory / name) for name in object_file.maps}
    else:
        specs = {
            name: spec._replace(max_entries=entries.get(name, spec.max_entries))
            for name, spec in object_file.maps.items()
        }
        if predecessor:
            maps, copied = upgrade.carry_over(older[-1], predecessor, description, specs)
        else:
            maps = create_maps([*specs.values()])
        _pin(maps, description, directory)
    empty = not adopted and predecessor is None
    return Pins(
        maps, object_file, objects, tuple(older), description, predecessor, copied, directory, empty
    )


def remove(pin_path: Path) -> list[str]:
    """Remove the maps that are pinned here, of every layout. Returns what was removed, in words.
    Everything else below the path, such as the pins of another gateway whose path is longer,
    belongs to another owner and stays."""
    layouts = list(pin_path.glob("layout-*"))
    for layout in layouts:
        bpffs.remove(layout)
    existed = pin_path.exists()
    with suppress(OSError):  # it does not exist, or another owner's pins are in it
        pin_path.rmdir()
    return [f"pins in {pin_path}"] if layouts or (existed and not pin_path.exists()) else []


def _arena_entries(pin_path: Path, wanted: int) -> int:
    """The number of chunks that the arena is to have: `wanted`, or the present number if its tables
    would not fit."""
    complete = sorted(
        pin_path.glob(f"layout-*/{_COMPLETE}"), key=lambda path: path.stat().st_mtime_ns
    )
    if not complete:
        return wanted
    newest = complete[-1].parent
    if not (newest / "arena").exists():
        return wanted
    with Map.open(newest / "arena") as arena:
        present = arena.spec.max_entries
    if present > wanted and (used := upgrade.chunks_in_use(newest)) > wanted:
        mib = (each * CHUNK_BYTES / (1 << 20) for each in (present, wanted, used))
        log.warning(
            "the table memory keeps its size: its tables need more",
            **dict(zip(_IN_MIB, mib, strict=True)),
        )
        return present
    return wanted


def _digest(description: upgrade.Description) -> str:
    """Equal for objects that can work on each other's maps."""
    return hashlib.blake2b(msgspec.json.encode(description), digest_size=6).hexdigest()


def _describe_predecessor(
    older: Sequence[Path], ours: upgrade.Description
) -> upgrade.Description | None:
    """What lies in the newest of the older layouts, if it can be carried over."""
    theirs = upgrade.read(older[-1]) if older else None
    if theirs:
        try:
            upgrade.check(theirs, ours)
        except Refused as error:
            log.warning("not carried over", error=str(error))
            return None
    return theirs


def _pin(maps: Mapping[str, Map], description: upgrade.Description, directory: Path) -> None:
    bpffs.remove(directory)
    bpffs.prepare(directory)
    upgrade.write(description, directory)
    for name in sorted(maps, key=lambda each: each == _COMPLETE):
        maps[name].pin(directory / name)
