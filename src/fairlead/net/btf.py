"""Read BTF, the type information that clang writes into an eBPF object.

In: the bytes of an object's `.BTF` section. Out: types by number and by name, their sizes, and the
fields of structs. Only types that describe maps and their records are decoded; functions and line
numbers are skipped. Follows Documentation/bpf/btf.rst of the Linux kernel."""

import struct
from typing import NamedTuple

from fairlead.errors import Refused

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")

_INT, _POINTER, _ARRAY, _STRUCT, _UNION, _ENUM = 1, 2, 3, 4, 5, 6
_FUNCTION_PROTOTYPE, _VARIABLE, _SECTION, _DECLARATION_TAG, _ENUM64 = 13, 14, 15, 17, 19
_ALIASES = frozenset((8, 9, 10, 11, 18))  # typedef, volatile, const, restrict, type tag

# The bytes that follow the head of a type: (fixed part, part for each of its `vlen` members).
_TRAILER = {
    _INT: (4, 0),
    _ARRAY: (12, 0),
    _STRUCT: (0, 12),
    _UNION: (0, 12),
    _ENUM: (0, 8),
    _FUNCTION_PROTOTYPE: (0, 8),
    _VARIABLE: (4, 0),
    _SECTION: (0, 12),
    _DECLARATION_TAG: (4, 0),
    _ENUM64: (0, 12),
}


class Field(NamedTuple):
    """A member of a struct: its offset in bytes, and the number of its type."""

    name: str
    offset: int
    type_id: int


class _Type(NamedTuple):
    kind: int
    name: str
    size_or_type: int
    members: tuple[Field, ...] = ()
    element: tuple[int, int] = (0, 0)
    """For an array: the number of its element type, and the number of elements."""


class Types:
    """The types of one object. Methods raise KeyError for unknown names."""

    def __init__(self, section: bytes) -> None:
        magic, _, _, header_size, type_offset, type_size, string_offset, _ = _HEADER.unpack_from(
            section
        )
        if magic != _MAGIC:
            raise Refused(
                "the eBPF object's type section (.BTF) cannot be read",
                fix="rebuild it with clang -g",
            )
        self._strings = section[header_size + string_offset :]
        self._types = [_Type(0, "void", 0)]
        self._read(section[header_size + type_offset : header_size + type_offset + type_size])
        self._ids = {
            (each.kind, each.name): number for number, each in enumerate(self._types) if each.name
        }

    def _string(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _read(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            name, info, size_or_type = _TYPE.unpack_from(data, position)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            position += _TYPE.size
            fixed, each = _TRAILER.get(kind, (0, 0))
            members: tuple[Field, ...] = ()
            element = (0, 0)
            if kind in (_STRUCT, _UNION):
                rows = (_TYPE.unpack_from(data, position + 12 * i) for i in range(count))
                # If the kind flag is set, the upper byte of the offset is the size of a bit field.
                mask = 0xFFFFFF if info >> 31 else 0xFFFFFFFF
                members = tuple(
                    Field(self._string(text), (bits & mask) // 8, type_id)
                    for text, type_id, bits in rows
                )
            elif kind == _ENUM:
                pairs = (struct.unpack_from("<Ii", data, position + 8 * i) for i in range(count))
                members = tuple(Field(self._string(text), value, 0) for text, value in pairs)
            elif kind == _ARRAY:
                of, _, many = _TYPE.unpack_from(data, position)
                element = (of, many)
            self._types.append(_Type(kind, self._string(name), size_or_type, members, element))
            position += fixed + each * count

    def _resolve(self, type_id: int) -> _Type:
        found = self._types[type_id]
        while found.kind in _ALIASES:
            found = self._types[found.size_or_type]
        return found

    def size(self, type_id: int) -> int:
        """Return the size of a value of the type, in bytes."""
        found = self._resolve(type_id)
        if found.kind == _ARRAY:
            of, many = found.element
            return self.size(of) * many
        return 8 if found.kind == _POINTER else found.size_or_type

    def struct_size(self, name: str) -> int:
        """Return the size of `struct name`, in bytes."""
        return self._types[self._ids[_STRUCT, name]].size_or_type

    def fields(self, name: str) -> tuple[Field, ...]:
        """Return the fields of `struct name`, in order."""
        return self._types[self._ids[_STRUCT, name]].members

    def enumerators(self, name: str) -> dict[str, int]:
        """Return the names of `enum name` with their values."""
        return {
            member.name: member.offset for member in self._types[self._ids[_ENUM, name]].members
        }

    def map_fields(self, variable: str) -> dict[str, int]:
        """Return the attributes of a map definition in the `.maps` section, as numbers: `type`,
        `max_entries`, `map_flags` ..., and the sizes of `key` and `value` in bytes as `key_size`
        and `value_size`.

        libbpf's `__uint(name, n)` is a pointer to an array of n ints, `__type(name, t)` a pointer
        to t."""
        definition = self._resolve(self._types[self._ids[_VARIABLE, variable]].size_or_type)
        fields: dict[str, int] = {}
        for field in definition.members:
            target = self._resolve(field.type_id).size_or_type
            if field.name in ("key", "value"):
                fields[f"{field.name}_size"] = self.size(target)
            else:
                fields[field.name] = self._resolve(target).element[1]
        return fields

    def records(self, variable: str) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """Return the layout of the key and the value of a map: (name, offset, size) of each field,
        in order.

        A type that is not a struct is one field without a name. A map without keys or values has no
        fields."""
        definition = self._resolve(self._types[self._ids[_VARIABLE, variable]].size_or_type)
        targets = {
            field.name: self._resolve(field.type_id).size_or_type for field in definition.members
        }
        return tuple(
            self._record(targets[part]) if part in targets else () for part in ("key", "value")
        )

    def _record(self, type_id: int) -> tuple[tuple[str, int, int], ...]:
        found = self._resolve(type_id)
        if found.kind != _STRUCT:
            return (("", 0, self.size(type_id)),)
        return tuple(
            (field.name, field.offset, self.size(field.type_id)) for field in found.members
        )
