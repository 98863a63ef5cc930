"""Create the maps, or adopt the maps that a previous process pinned.

In: the directory for pins, the object files, sizes. Out: `Pins`: the maps, the programs that use
them, and the directories of older layouts.

The maps of one layout are in `<pin path>/layout-<digest>`. The digest is that of the layout's
description (see `upgrade`), so a program never finds records of another layout. `settings` is
pinned last: a directory without it is incomplete, and is recreated. The content of another layout
is copied into our maps before our program replaces the program of that layout. The sizes of maps
are part of the layout, so a start with other sizes is an upgrade.

Invariant: one process at a time uses a pin path. It holds a lock on the directory, which ends with
the process.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import structlog

from fairlead.drivers.direct.maps import upgrade
from fairlead.drivers.direct.maps.flow_shares import usable
from fairlead.drivers.direct.maps.records import CHUNK_BYTES
from fairlead.drivers.direct.maps.sizing import RETAINED_PER_LISTENER, max_listeners
from fairlead.errors import FairleadError, Refused
from fairlead.net import bpffs
from fairlead.net.bpf import MAP_TYPE_LRU_HASH, Map, create_maps
from fairlead.net.elf import ObjectFile, read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, PROGRAM_TYPE_XDP, Program, programs_with

log = structlog.get_logger()

OBJECTS = Path(__file__).resolve().parents[3] / "objects"
OBJECT = OBJECTS / "direct_tc.o"
_XDP_OBJECT = "direct_xdp.o"
_COMPLETE = "settings"
_LAYOUTS = "layout-*"


class Sizes(NamedTuple):
    """The sizes of the maps that take most of the memory, which the kernel reserves when it creates
    them. A map keeps its size if its content would not fit into the new one."""

    arena_bytes: int = 128 << 20
    """Memory for slots: 2 KiB to 128 KiB for a listener, and twice that while slots are in
    transition. The number of listeners follows from it."""
    connections: int = 131072
    """Flow entries for TCP and SCTP connections in slots that changed; about 100 bytes each."""
    datagrams: int = 65536
    """Flow entries for UDP. Entries beyond the shares of namespaces are apart, half as many as
    `connections`."""

    def entries(self) -> dict[str, int]:
        """Return the number of entries of each map, by name."""
        arena = self.arena_bytes // CHUNK_BYTES
        listeners = max_listeners(arena)
        return {
            "arena": arena,
            **dict.fromkeys(("listeners", "owners", "addresses", "statistics"), listeners),
            "retained_nodes": RETAINED_PER_LISTENER * listeners,
            "connections": self.connections,
            "new_connections": self.connections,
            "closing_connections": self.connections // 4,
            "excess_flows": self.connections // 2,
            "datagrams": self.datagrams,
            "new_datagrams": 2 * self.datagrams,
            "fragments": self.datagrams // 4,
        }


class Pins(NamedTuple):
    """The maps by name, and the objects whose programs use them."""

    maps: dict[str, Map]
    object_file: ObjectFile
    objects: Path
    older: tuple[Path, ...]
    """Directories of other layouts, the newest last. The program of the newest may still be
    forwarding."""
    description: upgrade.Description
    copied_description: upgrade.Description | None
    """The description of the newest other layout, if its content was copied into our maps."""
    copied: upgrade.Copied
    """The content of the other layout's flow tables when they were last read. Empty if another
    process copied them and ended."""
    directory: Path
    """The directory in which the maps are pinned."""
    empty: bool
    """Whether this start has created the maps without content: neither adopted nor copied."""

    def tc(self) -> Program:
        """Load the complete program, for tc."""
        return _load(self.object_file, self.maps, PROGRAM_TYPE_SCHED_CLS)

    def xdp(self) -> Program:
        """Load the program for XDP."""
        return _load(read_object(self.objects / _XDP_OBJECT), self.maps, PROGRAM_TYPE_XDP)

    @property
    def complete(self) -> bool:
        """Whether our maps contain everything that forwarding needs. If not, the program of an
        older layout has to continue."""
        return not self.older or self.copied_description is not None

    def copy_changes_of_older(self, *, forwarding: bool) -> None:
        """Copy to our flow tables what an older program has changed in its own tables since the
        last copy.

        `forwarding`: whether our program forwards already. See `upgrade.copy_changes`.
        """
        if self.older and self.copied_description:
            upgrade.copy_changes(
                *(
                    self.older[-1],
                    self.copied_description,
                    self.description,
                    self.maps,
                    self.copied,
                ),
                forwarding=forwarding or not self.copied,
            )

    def remove_older(self) -> Self:
        """Remove the maps of older layouts. Our program must be forwarding: no other program uses
        them then."""
        self.copy_changes_of_older(forwarding=True)
        for path in self.older:
            bpffs.remove(path)
        return self._replace(older=(), copied_description=None, copied={})

    def discard(self) -> None:
        """Remove the pins of maps that this start created empty, so that a failed start leaves no
        memory in use. Other pins stay."""
        if self.empty:
            bpffs.remove(self.directory)

    def close(self) -> None:
        """Close all maps. Pinned maps and attached programs stay."""
        for each in self.maps.values():
            each.close()


def _load(object_file: ObjectFile, maps: Mapping[str, Map], program_type: int) -> Program:
    return Program.load(
        object_file.programs["direct"],
        maps,
        program_type=program_type,
        license_name=object_file.license,
    )


def open_pins(pin_path: Path, sizes: Sizes, objects: Path = OBJECTS) -> Pins:
    """Return the maps below `pin_path`. Creating them takes about 100 ms.

    `objects`: the directory of the compiled programs.
    """
    object_file = read_object(objects / OBJECT.name)
    entries = _entries(pin_path, sizes.entries())
    description = upgrade.describe(object_file, entries)
    directory = pin_path / f"layout-{_digest(description)}"
    others = [path for path in pin_path.glob(_LAYOUTS) if path != directory and is_layout(path)]
    older = [path for path in others if (path / _COMPLETE).exists()]
    for incomplete in set(others) - set(older):
        bpffs.remove(incomplete)
    older.sort(key=lambda path: (path / _COMPLETE).stat().st_mtime_ns)
    copied_description = _copyable_description(older, description)
    copied: upgrade.Copied = {}
    adopted = (directory / _COMPLETE).exists()
    if adopted:
        maps = {name: Map.open(directory / name) for name in object_file.maps}
    else:
        specs = {
            name: spec._replace(max_entries=entries.get(name, spec.max_entries))
            for name, spec in object_file.maps.items()
        }
        if copied_description:
            maps, copied = upgrade.carry_over(older[-1], copied_description, description, specs)
        else:
            maps = create_maps([*specs.values()])
        _pin(maps, description, directory)
    empty = not adopted and copied_description is None
    return Pins(
        maps,
        object_file,
        objects,
        tuple(older),
        description,
        copied_description,
        copied,
        directory,
        empty,
    )


def is_layout(path: Path) -> bool:
    """Return whether a gateway made this directory: its first pin is the description, or, in
    versions without descriptions, it has a map of settings. A start that was interrupted may have
    left it empty."""
    names = {each.name for each in path.iterdir()} if path.is_dir() else {""}
    if not names:
        return True
    try:
        if upgrade.DESCRIPTION in names:
            return upgrade.read(path) is not None
        if _COMPLETE in names:
            Map.open(path / _COMPLETE).close()
            return True
    except (FairleadError, msgspec.DecodeError):
        pass
    return False


def check_names(pin_path: Path) -> None:
    """Raise Refused if a directory below the path has only the name of a gateway's pins."""
    for layout in pin_path.glob(_LAYOUTS):
        if not is_layout(layout):
            raise Refused(
                f"{layout} is not of a gateway: nothing is removed",
                fix="move it elsewhere, or give the --pin-path of the gateway to remove",
            )


def users(pin_path: Path) -> frozenset[int]:
    """Return the IDs of the programs, in every network namespace, that use the maps of any layout
    below the path."""
    with ExitStack() as opened:
        maps = [
            opened.enter_context(Map.open(path)).number for path in pin_path.glob(f"{_LAYOUTS}/*")
        ]
        return programs_with(maps)


def remove(pin_path: Path) -> list[str]:
    """Remove the maps of every layout that are pinned here, and return a description of each.

    Everything else below the path, such as a subdirectory that is the pin path of another gateway,
    belongs to another owner and stays. So does the directory itself if it contained no maps.
    """
    layouts = [path for path in pin_path.glob(_LAYOUTS) if is_layout(path)]
    for layout in layouts:
        bpffs.remove(layout)
    if not layouts:
        return []
    with suppress(OSError):  # it contains the pins of another owner
        pin_path.rmdir()
    return [f"pins in {pin_path}"]


def _entries(pin_path: Path, wanted: Mapping[str, int]) -> Mapping[str, int]:
    """Return the number of entries of each map: that in `wanted`, or the present number if the
    present content would not fit into `wanted`."""
    complete = sorted(
        pin_path.glob(f"layout-*/{_COMPLETE}"), key=lambda path: path.stat().st_mtime_ns
    )
    if not complete:
        return wanted
    newest = complete[-1].parent
    kept = {}
    for name, entries in wanted.items():
        if not (newest / name).exists():
            continue
        with Map.open(newest / name) as present:
            size = present.spec.max_entries
            if size > entries and upgrade.entries_in_use(newest, present) > _room(present, entries):
                kept[name] = size
    if kept:
        log.warning(
            "maps keep their sizes, because their content would not fit into the configured sizes",
            entries=kept,
            configured={name: wanted[name] for name in kept},
        )
    return {**wanted, **kept}


def _room(present: Map, entries: int) -> int:
    """Return how many entries of this map a map of this size can hold. More entries of flows would
    displace each other."""
    return usable(entries) if present.spec.type == MAP_TYPE_LRU_HASH else entries


def _digest(description: upgrade.Description) -> str:
    """Return a digest that is equal for objects that can use each other's maps."""
    return hashlib.blake2b(msgspec.json.encode(description), digest_size=6).hexdigest()


def _copyable_description(
    older: Sequence[Path], ours: upgrade.Description
) -> upgrade.Description | None:
    """Return the description of the newest older layout if its content can be copied, otherwise
    None."""
    theirs = upgrade.read_with_sizes(older[-1]) if older else None
    if theirs:
        try:
            upgrade.check(theirs, ours)
        except Refused as error:
            log.warning("the maps of the previous version are not copied", error=str(error))
            return None
    return theirs


def _pin(maps: Mapping[str, Map], description: upgrade.Description, directory: Path) -> None:
    bpffs.remove(directory)
    bpffs.prepare(directory)
    upgrade.write(description, directory)
    for name in sorted(maps, key=lambda each: each == _COMPLETE):
        maps[name].pin(directory / name)
