"""Copy the content of maps with another layout, or to table memory of another size, so that no
connection moves.

In: the pin directory of another layout, which contains its description, and the description of our
layout. Out: our maps. A map whose layout has not changed is shared. Every other map is created and
filled. Records are copied field by field, by name: new fields are zero, and grown fields are padded
with zeros. Counters by reason are copied by the names of the reasons.

Invariant: the existing maps are only read. Their program changes its flow tables until our program
replaces it some seconds later. `copy_changes` copies these changes right before and again right
after the replacement, because flow entries are the one content that only the kernel knows.

A description is JSON in a map with one element, because a bpffs cannot contain files. Table memory
of another size is filled table by table without gaps, because it may be smaller; the listeners,
which contain the offsets of their tables, are rewritten. If the counters of a listener are beyond
the end of a smaller map, all listeners get new indexes of counters.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import msgspec

from fairlead.drivers.direct.maps.records import CHUNK_BYTES, INDEX, LISTENER, ListenerRecord
from fairlead.drivers.direct.maps.sizing import chunks
from fairlead.drivers.direct.maps.table_allocator import regions
from fairlead.errors import Refused
from fairlead.net.bpf import MAP_TYPE_LRU_HASH, MAP_TYPE_PERCPU_ARRAY, Map
from fairlead.net.elf import MapSpec, ObjectFile

DESCRIPTION = "description"

_ARRAY, _LPM_TRIE = 2, 11
_FIRST = bytes(4)
_TRANSIENT = frozenset(
    {
        "allowances",
        "fragments",
        "listener_cache",
        "flow_reports",
        "namespace_allowances",
        "walks",
    }
)
"""Maps whose content is meaningful only for a moment."""
_ARENA, _LISTENERS, _STATISTICS = "arena", "listeners", "statistics"
_INDEXED = {_LISTENERS, _STATISTICS, "retained_nodes"}
"""The maps that contain indexes of counters: of the last two, the key begins with one."""
_ONE_PACKET_PREFIX = "new_"
"""The prefix of the names of tables for flows with only one packet so far."""
_CACHE = "listener_cache"
"""The program's cache of `listeners`. Programs that do not share `listeners` must not share the
cache."""

Copied = dict[str, dict[bytes, bytes]]
"""The content of each flow table that was translated, as the older program wrote it."""

FieldPlace = tuple[str, int, int]
"""Name, offset and size in bytes of a field. A record that is not a struct is one field without a
name."""


class MapLayout(msgspec.Struct, frozen=True):
    """The layout of a map.

    `entries`: the number of entries; 0 if it is not known. Its name in the description is that of
    earlier versions, which wrote it for arrays only.
    """

    type: int
    flags: int
    key_size: int
    value_size: int
    key: tuple[FieldPlace, ...]
    value: tuple[FieldPlace, ...]
    entries: int = msgspec.field(default=0, name="least")


class Description(msgspec.Struct, frozen=True):
    """Everything on which programs that share maps must agree. `events`: the counted events and
    their numbers."""

    maps: Mapping[str, MapLayout]
    events: Mapping[str, int]


def describe(
    object_file: ObjectFile, entries: Mapping[str, int] = MappingProxyType({})
) -> Description:
    """Return the description of an object's maps. `entries`: numbers of entries that differ from
    the object file."""
    layouts = {}
    for name, spec in sorted(object_file.maps.items()):
        key, value = object_file.types.records(name)
        size = entries.get(name, spec.max_entries)
        layouts[name] = MapLayout(
            spec.type, spec.flags, spec.key_size, spec.value_size, key, value, size
        )
    return Description(layouts, object_file.types.enumerators("event"))


def write(description: Description, directory: Path) -> None:
    """Pin the description beside the maps."""
    data = msgspec.json.encode(description)
    with Map.create(MapSpec(DESCRIPTION, _ARRAY, 4, len(data), 1)) as made:
        made.update(_FIRST, data)
        made.pin(directory / DESCRIPTION)


def read(directory: Path) -> Description | None:
    """Return the description in this directory; None if the maps are of a version without
    descriptions."""
    if not (directory / DESCRIPTION).exists():
        return None
    with Map.open(directory / DESCRIPTION) as opened:
        return msgspec.json.decode(opened.lookup(_FIRST) or b"", type=Description)


def read_with_sizes(directory: Path) -> Description | None:
    """Like `read`, with the numbers of entries that are not part of the description. All maps in
    the directory are pinned."""
    description = read(directory)
    if description is None:
        return None
    layouts = dict(description.maps)
    for name, layout in layouts.items():
        if not layout.entries:
            with Map.open(directory / name) as present:
                size = present.spec.max_entries
            layouts[name] = msgspec.structs.replace(layout, entries=size)
    return msgspec.structs.replace(description, maps=layouts)


def check(before: Description, after: Description) -> None:
    """Check that the whole content of the maps in `before` can be copied. Raise Refused with the
    first obstacle."""
    for name, new in after.maps.items():
        old = before.maps.get(name)
        if old is None or name in _TRANSIENT:
            continue
        same_keys = (old.key_size, old.key) == (new.key_size, new.key)
        if old.type != new.type or (
            not same_keys and new.type in (_LPM_TRIE, _ARRAY, MAP_TYPE_PERCPU_ARRAY)
        ):
            raise _refusal(name, "its type has changed")
        for fields, others in ((old.key, new.key), (old.value, new.value)):
            sizes = {field: size for field, _, size in others}
            for field, _, size in fields:
                if field != "pad" and sizes.get(field, size) < size:
                    raise _refusal(name, f"its {field or 'value'} has become smaller")


def entries_in_use(directory: Path, present: Map) -> int:
    """Return the number of entries that a map in this directory needs: of table memory and of
    counters, those of the listeners; of another map, those that it has."""
    description = read(directory)
    if description is None or present.spec.name not in (_ARENA, _STATISTICS):
        return present.count()
    if present.spec.name == _STATISTICS:
        return len(_fields_of_listeners(directory, description, "statistics"))
    sizes = _fields_of_listeners(directory, description, "current_size", "previous_size")
    return sum(chunks(size) for each in sizes for size in each)


def _fields_of_listeners(
    directory: Path, description: Description, *names: str
) -> list[tuple[int, ...]]:
    """Return these fields of each listener in the directory."""
    places = {name: (at, size) for name, at, size in description.maps[_LISTENERS].value}
    with Map.open(directory / _LISTENERS) as listeners:
        records = [value for _, value in listeners.items()]
    return [
        tuple(
            int.from_bytes(each[at : at + size], sys.byteorder)
            for at, size in (places[name] for name in names)
        )
        for each in records
    ]


def _refusal(name: str, why: str) -> Refused:
    return Refused(
        f"the content of map {name} cannot be copied to this version: {why}",
        fix="open connections in transition may move",
    )


def carry_over(
    old: Path, before: Description, after: Description, specs: Mapping[str, MapSpec]
) -> tuple[dict[str, Map], Copied]:
    """Return our maps with the content of the maps in `old`, and the content of translated flow
    tables.

    The caller has called `check`. Raise Refused if there is not enough memory, or a map is too
    small.
    """
    made: dict[str, Map] = {}
    copied: Copied = {}
    moved = before.maps.get(_ARENA) not in (None, after.maps[_ARENA])
    indexes = _new_indexes(old, before, specs[_STATISTICS].max_entries)
    renumbered = any(new != index for index, new in indexes.items())
    private = {_CACHE} | ({_LISTENERS} if moved else set()) | (_INDEXED if renumbered else set())
    if before.events != after.events:
        private.add("events")
    try:
        for name, spec in specs.items():
            present = before.maps.get(name)
            if present == after.maps[name] and name not in private:
                made[name] = Map.open(old / name)
                continue
            made[name] = Map.create(spec)
            if present and name not in _TRANSIENT and name != _ARENA:
                with Map.open(old / name) as source:
                    content = dict(source.items())
                elements = _translated(name, content.items(), before, after)
                if name == _STATISTICS or (renumbered and name in _INDEXED):
                    elements = _renumbered(name, elements, indexes)
                made[name].update_all(dict(elements))
                if spec.type == MAP_TYPE_LRU_HASH:
                    copied[name] = content
        if moved:
            with Map.open(old / _ARENA) as source:
                _move_tables(made[_LISTENERS], source, made[_ARENA])
    except BaseException:
        for each in made.values():
            each.close()
        raise
    return made, copied


def _new_indexes(old: Path, before: Description, size: int) -> dict[int, int]:
    """Return the new index of each listener's counters, by the present index: the present ones, if
    all of them are smaller than `size`."""
    present = sorted(index for (index,) in _fields_of_listeners(old, before, "statistics"))
    if not present or present[-1] < size:
        return {index: index for index in present}
    return {index: new for new, index in enumerate(present)}


def _renumbered(
    name: str, elements: Iterable[tuple[bytes, bytes]], indexes: Mapping[int, int]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the elements, which are in our layout, with new indexes of counters. Elements of
    listeners that do not exist are left out."""
    for key, value in elements:
        if name == _LISTENERS:
            record = ListenerRecord(*LISTENER.unpack(value))
            renumbered = record._replace(statistics=indexes[record.statistics])
            yield key, LISTENER.pack(*renumbered)
        elif (new := indexes.get(INDEX.unpack_from(key)[0])) is not None:
            yield INDEX.pack(new) + key[INDEX.size :], value


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
    """Apply to our flow tables the changes since the last copy in the flow tables of `old`, and
    update `copied`.

    `forwarding`: our program has replaced the other one. Entries that it has changed since are
    newer, and stay.
    """
    # Tables of flows with one packet come first: a flow that moves to another table meanwhile is
    # then found in one of the two tables, or in both.
    for name, layout in sorted(
        after.maps.items(), key=lambda each: not each[0].startswith(_ONE_PACKET_PREFIX)
    ):
        if (
            layout.type == MAP_TYPE_LRU_HASH
            and name not in _TRANSIENT
            and before.maps.get(name, layout) != layout
        ):
            with Map.open(old / name) as source:
                present = dict(source.items())
            previous, ours = copied.get(name, {}), maps[name]
            changed = [
                key
                for key in present.keys() | previous.keys()
                if previous.get(key) != present.get(key)
            ]
            # Only changed entries are translated. They are mostly few, while a full table takes a
            # second.
            old_entries, new_entries = (
                dict(
                    _translated(
                        name, ((key, each[key]) for key in changed if key in each), before, after
                    )
                )
                for each in (previous, present)
            )
            if forwarding:
                newer = {
                    key
                    for key in old_entries.keys() | new_entries.keys()
                    if ours.lookup(key) not in (None, old_entries.get(key))
                }
                old_entries, new_entries = (
                    {key: each[key] for key in each.keys() - newer}
                    for each in (old_entries, new_entries)
                )
            ours.update_all(new_entries)
            ours.delete_all([key for key in old_entries if key not in new_entries])
            copied[name] = present


def _translated(
    name: str, elements: Iterable[tuple[bytes, bytes]], before: Description, after: Description
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the elements of the map in the layout of our program."""
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
        padded = (
            -(-new.value_size // 8) * 8 if new.type == MAP_TYPE_PERCPU_ARRAY else new.value_size
        )
        translated = (
            translate(each, old.value, new.value, new.value_size, reasons).ljust(padded, b"\0")
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
    """Return the record with its fields at their new offsets.

    `reasons`: the new number of each old reason, for the field `drops`.
    """
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
    """Return an array of 64-bit counters, one for each reason, in the new order."""
    made = bytearray(length)
    for old, new in reasons.items():
        if old * 8 < len(counts) and new * 8 < length:
            made[new * 8 : new * 8 + 8] = counts[old * 8 : old * 8 + 8]
    return bytes(made)
