"""Copy the contents of the maps to those of a program of another layout, or to other table memory,
so that no connection moves.

In: a directory of pins of another layout, with the description that lies there, and our own
description. Out: a map for each of ours: the same one where nothing of it has changed, else a new
one, filled. A record is copied field by field, by name: fields that are new are zero, those that
have grown are filled up with zeros. What is counted by reason is copied by reasons' names.
Invariant: the maps that are there are only read. Their program goes on changing its tables of flows
until ours takes its place, some seconds later. What it has changed is done to ours as well
(`copy_changes`) right before and once more right after that, because entries are the one thing that
only the kernel knows. A description is JSON in a map of one element: a bpffs holds no files. Table
memory of another size is filled table by table without gaps, because it may be smaller; the
listeners, which contain the offsets of their tables, are copied with it."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import msgspec

from fairlead.drivers.direct.maps.records import CHUNK_BYTES, LISTENER, ListenerRecord
from fairlead.drivers.direct.maps.sizing import chunks
from fairlead.drivers.direct.maps.table_allocator import regions
from fairlead.errors import Refused
from fairlead.net.bpf import MAP_TYPE_PERCPU_ARRAY, Map
from fairlead.net.elf import MapSpec, ObjectFile

DESCRIPTION = "description"

_ARRAY, _LRU_HASH, _LPM_TRIE = 2, 9, 11
_FIRST = bytes(4)
_TRANSIENT = frozenset({"allowances", "fragments", "listener_cache", "news", "walks"})
"""Maps whose contents mean something for a moment only."""
_ARENA, _LISTENERS = "arena", "listeners"
_ONE_PACKET_PREFIX = "new_"
"""What the names of the tables begin with that hold flows of which one packet was seen."""
_CACHE = "listener_cache"
"""What a program keeps of `listeners`: two that may not work on the same ones must not share it."""

Copied = dict[str, dict[bytes, bytes]]
"""Of each table of flows that had to be translated what was in it, as the older program wrote
it."""

FieldPlace = tuple[str, int, int]
"""Name, offset and size in bytes. A record that is no struct is one field without a name."""


class Shape(msgspec.Struct, frozen=True):
    """A map without its number of entries, which can be configured. `least`: for an array, the
    number of entries that programs, or process and program together, need."""

    type: int
    flags: int
    key_size: int
    value_size: int
    key: tuple[FieldPlace, ...]
    value: tuple[FieldPlace, ...]
    least: int = 0


class Description(msgspec.Struct, frozen=True):
    """All that programs must agree on to work on the same maps. `events`: what is counted, with the
    numbers."""

    maps: Mapping[str, Shape]
    events: Mapping[str, int]


def describe(
    object_file: ObjectFile, entries: Mapping[str, int] = MappingProxyType({})
) -> Description:
    """The description of an object's maps, with these numbers of entries."""
    shapes = {}
    for name, spec in sorted(object_file.maps.items()):
        key, value = object_file.types.records(name)
        least = (
            entries.get(name, spec.max_entries)
            if spec.type in (_ARRAY, MAP_TYPE_PERCPU_ARRAY)
            else 0
        )
        shapes[name] = Shape(
            spec.type, spec.flags, spec.key_size, spec.value_size, key, value, least
        )
    return Description(shapes, object_file.types.enumerators("event"))


def write(description: Description, directory: Path) -> None:
    """Put it beside the maps."""
    data = msgspec.json.encode(description)
    with Map.create(MapSpec(DESCRIPTION, _ARRAY, 4, len(data), 1)) as made:
        made.update(_FIRST, data)
        made.pin(directory / DESCRIPTION)


def read(directory: Path) -> Description | None:
    """The description that lies there; None where a version without descriptions made the maps."""
    if not (directory / DESCRIPTION).exists():
        return None
    with Map.open(directory / DESCRIPTION) as opened:
        return msgspec.json.decode(opened.lookup(_FIRST) or b"", type=Description)


def check(before: Description, after: Description) -> None:
    """Whether all that the maps of `before` hold can be carried over. Raises Refused that names
    what cannot."""
    for name, new in after.maps.items():
        old = before.maps.get(name)
        if old is None or name in _TRANSIENT:
            continue
        same_keys = (old.key_size, old.key) == (new.key_size, new.key)
        if old.type != new.type or (
            not same_keys and new.type in (_LPM_TRIE, _ARRAY, MAP_TYPE_PERCPU_ARRAY)
        ):
            raise _refusal(name, "it is of another kind")
        for fields, others in ((old.key, new.key), (old.value, new.value)):
            sizes = {field: size for field, _, size in others}
            for field, _, size in fields:
                if field != "pad" and sizes.get(field, size) < size:
                    raise _refusal(name, f"its {field or 'value'} has become smaller")


def chunks_in_use(directory: Path) -> int:
    """How many chunks of table memory the listeners at this path use."""
    description = read(directory)
    if description is None:
        return 0
    places = {name: (offset, size) for name, offset, size in description.maps["listeners"].value}
    with Map.open(directory / "listeners") as listeners:
        records = [value for _, value in listeners.items()]
    sizes = (places["current_size"], places["previous_size"])
    return sum(
        chunks(int.from_bytes(each[at : at + size], sys.byteorder))
        for each in records
        for at, size in sizes
    )


def _refusal(name: str, why: str) -> Refused:
    return Refused(
        f"map {name} cannot be carried over to this version: {why}",
        fix="open connections in transition may move",
    )


def carry_over(
    old: Path, before: Description, after: Description, specs: Mapping[str, MapSpec]
) -> tuple[dict[str, Map], Copied]:
    """Our maps, with what those in `old` hold. `check` has passed. Raises Refused where there is
    not enough memory or room."""
    made: dict[str, Map] = {}
    copied: Copied = {}
    moved = before.maps.get(_ARENA) not in (None, after.maps[_ARENA])
    try:
        for name, spec in specs.items():
            present = before.maps.get(name)
            shared = name != _CACHE and not (name == "events" and before.events != after.events)
            if present == after.maps[name] and shared and not (moved and name == _LISTENERS):
                made[name] = Map.open(old / name)
                continue
            made[name] = Map.create(spec)
            if present and name not in _TRANSIENT and name != _ARENA:
                with Map.open(old / name) as source:
                    there = dict(source.items())
                made[name].update_all(dict(_translated(name, there.items(), before, after)))
                if spec.type == _LRU_HASH:
                    copied[name] = there
        if moved:
            with Map.open(old / _ARENA) as source:
                _move_tables(made[_LISTENERS], source, made[_ARENA])
    except BaseException:
        for each in made.values():
            each.close()
        raise
    return made, copied


def _move_tables(listeners: Map, source: Map, target: Map) -> None:
    """Copy the tables of these listeners from one arena to another, and write the new offsets into
    the listeners."""
    moved: dict[bytes, bytes] = {}
    end = 0
    with closing(source.memory()) as old, closing(target.memory()) as new:
        for key, value in listeners.items():
            record = ListenerRecord(*LISTENER.unpack(value))
            offsets = []
            for offset, length in regions(record):
                table = old[offset * CHUNK_BYTES : (offset + length) * CHUNK_BYTES]
                new[end * CHUNK_BYTES : (end + length) * CHUNK_BYTES] = table
                offsets.append(end)
                end += length
            moved[key] = LISTENER.pack(
                *record._replace(current_offset=offsets[0], previous_offset=offsets[1])
            )
    listeners.update_all(moved)


def copy_changes(
    old: Path,
    before: Description,
    after: Description,
    maps: Mapping[str, Map],
    copied: Copied,
    *,
    forwarding: bool,
) -> None:
    """Do to our tables of flows what was done to those in `old` since they were `copied`, which
    then says what these hold now.

    forwarding: our program has taken the other's place. What ours have changed since is newer then,
    and stays."""
    # Notes first: a flow whose note becomes an entry meanwhile is then found in one of the two
    # tables, or in both.
    for name, shape in sorted(
        after.maps.items(), key=lambda each: not each[0].startswith(_ONE_PACKET_PREFIX)
    ):
        if (
            shape.type == _LRU_HASH
            and name not in _TRANSIENT
            and before.maps.get(name, shape) != shape
        ):
            with Map.open(old / name) as source:
                there = dict(source.items())
            had, ours = copied.get(name, {}), maps[name]
            other = [key for key in there.keys() | had.keys() if had.get(key) != there.get(key)]
            # Mostly few: a full table takes a second to translate.
            was, now = (
                dict(
                    _translated(
                        name, ((key, each[key]) for key in other if key in each), before, after
                    )
                )
                for each in (had, there)
            )
            if forwarding:
                newer = {
                    key
                    for key in was.keys() | now.keys()
                    if ours.lookup(key) not in (None, was.get(key))
                }
                was, now = ({key: each[key] for key in each.keys() - newer} for each in (was, now))
            ours.update_all(now)
            ours.delete_all([key for key in was if key not in now])
            copied[name] = there


def _translated(
    name: str, elements: Iterable[tuple[bytes, bytes]], before: Description, after: Description
) -> Iterator[tuple[bytes, bytes]]:
    """The elements of the map of this name as our program reads them."""
    old, new = before.maps[name], after.maps[name]
    reasons = {
        before.events[event]: number
        for event, number in after.events.items()
        if event in before.events
    }
    for key, value in elements:
        if name == "events":
            number = reasons.get(int.from_bytes(key, "little"))
            if number is not None:
                yield number.to_bytes(4, "little"), value
            continue
        stride = -(-old.value_size // 8) * 8 if old.type == MAP_TYPE_PERCPU_ARRAY else len(value)
        values = (value[at : at + stride] for at in range(0, len(value), stride))
        room = -(-new.value_size // 8) * 8 if new.type == MAP_TYPE_PERCPU_ARRAY else new.value_size
        translated = (
            translate(each, old.value, new.value, new.value_size, reasons).ljust(room, b"\0")
            for each in values
        )
        yield translate(key, old.key, new.key, new.key_size, {}), b"".join(translated)


def translate(
    record: bytes,
    before: tuple[FieldPlace, ...],
    after: tuple[FieldPlace, ...],
    size: int,
    reasons: Mapping[int, int],
) -> bytes:
    """The record with its fields where they are now. `reasons`: the new number for each old one,
    for the field `drops`."""
    made = bytearray(size)
    places = {name: (offset, length) for name, offset, length in before}
    for name, offset, length in after:
        if name == "pad" or name not in places:
            continue
        at, old_length = places[name]
        data = record[at : at + old_length]
        if name == "drops":
            data = _by_reason(data, length, reasons)
        made[offset : offset + len(data)] = data
    return bytes(made)


def _by_reason(counts: bytes, length: int, reasons: Mapping[int, int]) -> bytes:
    """An array of 64-bit counters, one for each reason, in the new order."""
    made = bytearray(length)
    for old, new in reasons.items():
        if old * 8 < len(counts) and new * 8 < length:
            made[new * 8 : new * 8 + 8] = counts[old * 8 : old * 8 + 8]
    return bytes(made)
