"""Make the maps, or adopt those that a predecessor left pinned.

In: the directory for pins, the object, sizes. Out: `Pins`: the maps, the loaded program, and what older layouts lie beside.
The maps of one layout lie in `<pin path>/layout-<digest>`, the digest taken over all definitions and fields, so that a program
never meets records of another shape. `settings` is pinned last: a directory without it was left half made, and is made anew.
Invariant: one process at a time works with a pin path; a lock on the directory, which ends with its process, sees to that.
"""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Refused
from fairlead.net import bpffs
from fairlead.net.bpf import PROGRAM_TYPE_SCHED_CLS, Map, Program, create_maps
from fairlead.net.elf import ObjectFile, read_object

OBJECT = Path(__file__).resolve().parents[2] / "objects" / "direct_tc.o"
_COMPLETE = "settings"
_STRUCTS = ("listener_key", "listener", "chunk", "node", "flow_key", "flow", "traffic", "owner", "node_name", "settings")


class Pins(NamedTuple):
    """The maps by name, and the program that works on them."""

    maps: dict[str, Map]
    program: Program
    object_file: ObjectFile
    adopted: bool
    older: tuple[Path, ...]
    """Directories of other layouts: their program may still be forwarding."""

    def close(self) -> None:
        """Let go of everything; what is pinned or attached stays."""
        self.program.close()
        for each in self.maps.values():
            each.close()


def lock(pin_path: Path) -> int:
    """Have the pin path to ourselves until the descriptor that is returned is closed. Makes the directory, mounts the bpffs."""
    bpffs.prepare(pin_path)
    descriptor = os.open(pin_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Refused(
            f"another process works with the pins in {pin_path}", fix="stop it first, or use another pin path"
        ) from error
    return descriptor


def layout_digest(object_file: ObjectFile) -> str:
    """Equal for objects that can work on each other's maps."""
    shapes = sorted((spec.name, spec.type, spec.key_size, spec.value_size, spec.flags) for spec in object_file.maps.values())
    fields = [
        (name, [(field.name, field.offset, object_file.types.size(field.type_id)) for field in object_file.types.fields(name)])
        for name in _STRUCTS
    ]
    return hashlib.blake2b(repr((shapes, fields)).encode(), digest_size=6).hexdigest()


def open_pins(pin_path: Path, sizes: Mapping[str, int]) -> Pins:
    """The maps below `pin_path` and a program on them, not attached yet. Takes some 100 ms when they are made anew.

    `sizes`: entries of maps that are to differ from the object's; maps that are adopted stay as large as they are.
    """
    object_file = read_object(OBJECT)
    directory = pin_path / f"layout-{layout_digest(object_file)}"
    older = tuple(sorted(path for path in pin_path.glob("layout-*") if path != directory and (path / _COMPLETE).exists()))
    adopted = (directory / _COMPLETE).exists()
    maps = {name: Map.open(directory / name) for name in object_file.maps} if adopted else _make(object_file, directory, sizes)
    program = Program.load(
        object_file.programs["direct"], maps, program_type=PROGRAM_TYPE_SCHED_CLS, license_name=object_file.license
    )
    return Pins(maps, program, object_file, adopted, older)


def _make(object_file: ObjectFile, directory: Path, sizes: Mapping[str, int]) -> dict[str, Map]:
    bpffs.remove(directory)
    bpffs.prepare(directory)
    specs = [spec._replace(max_entries=sizes.get(spec.name, spec.max_entries)) for spec in object_file.maps.values()]
    maps = create_maps(specs)
    for name in sorted(maps, key=lambda each: each == _COMPLETE):
        maps[name].pin(directory / name)
    return maps
