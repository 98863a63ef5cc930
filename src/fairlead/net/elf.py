"""Read the object files that clang writes for the eBPF target: maps and programs as plain data.

In: an ELF64 relocatable object. Out: an `ObjectFile`: a `MapSpec` for each map, a `ProgramSpec` for
each function; both are values that a caller may print and change before the kernel objects are
created. The counterpart of libbpf's `bpf_object__open`. Limits: no CO-RE relocations, no global
variables, no calls between functions; the loader rejects objects that use them."""

import struct
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Refused
from fairlead.net.btf import Types

_EM_BPF = 247
_REL, _SYMTAB = 9, 2
_R_BPF_64_64 = 1
_FUNCTION = 2
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class MapSpec(NamedTuple):
    """The definition of a map. `type` and `flags` are constants of linux/bpf.h; sizes are in
    bytes."""

    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int = 0


class ProgramSpec(NamedTuple):
    """A program: its instructions, and the byte offsets at which the file descriptor of a map is to
    be inserted, with the map's name."""

    name: str
    section: str
    instructions: bytes
    map_references: tuple[tuple[int, str], ...]


class ObjectFile(NamedTuple):
    """The contents of one object."""

    maps: dict[str, MapSpec]
    programs: dict[str, ProgramSpec]
    types: Types
    license: str


class _Section(NamedTuple):
    name: str
    type: int
    data: bytes
    info: int


class _Symbol(NamedTuple):
    name: str
    type: int
    section: int
    value: int
    size: int


def read_object(path: Path) -> ObjectFile:
    """Parse the object at `path`. Raise Refused if it is missing or not an eBPF object."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(
            f"cannot read the eBPF object {path}: {error.strerror}",
            fix="run: python hatch_build.py",
        ) from error
    if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", content, 18)[0] != _EM_BPF:
        raise Refused(
            f"{path} is not a 64-bit little-endian eBPF object",
            fix="rebuild it: python hatch_build.py",
        )
    sections = _sections(content)
    symbols = _symbols(sections)
    by_name = {section.name: section for section in sections}
    if ".BTF" not in by_name:
        raise Refused(
            f"{path} has no type information", fix="build it with clang -g: python hatch_build.py"
        )
    types = Types(by_name[".BTF"].data)
    in_maps = [
        symbol.name
        for symbol in symbols
        if sections[symbol.section].name == ".maps" and symbol.name
    ]
    return ObjectFile(
        {name: _map(types, name) for name in in_maps},
        {program.name: program for program in _programs(path, sections, symbols)},
        types,
        by_name["license"].data.rstrip(b"\0").decode() if "license" in by_name else "",
    )


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(content: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", content, 40)
    count, names_at = struct.unpack_from("<HH", content, 60)
    rows = [
        _SECTION_HEADER.unpack_from(content, start + i * _SECTION_HEADER.size) for i in range(count)
    ]
    names = content[rows[names_at][4] : rows[names_at][4] + rows[names_at][5]]
    return [
        _Section(_text(names, row[0]), row[1], content[row[4] : row[4] + row[5]], row[7])
        for row in rows
    ]


def _symbols(sections: list[_Section]) -> list[_Symbol]:
    table = next(section for section in sections if section.type == _SYMTAB)
    # clang uses one string table for sections and symbols.
    names = next(section for section in sections if section.name == ".strtab").data
    return [
        _Symbol(
            _text(names, name), info & 15, section if section < len(sections) else 0, value, size
        )
        for name, info, _, section, value, size in _SYMBOL.iter_unpack(table.data)
    ]


def _map(types: Types, name: str) -> MapSpec:
    fields = types.map_fields(name)
    # A ring buffer has neither.
    key_size, value_size = fields.get("key_size", 0), fields.get("value_size", 0)
    return MapSpec(
        name,
        fields["type"],
        key_size,
        value_size,
        fields["max_entries"],
        fields.get("map_flags", 0),
    )


def _programs(path: Path, sections: list[_Section], symbols: list[_Symbol]) -> list[ProgramSpec]:
    programs = []
    for symbol in symbols:
        section = sections[symbol.section]
        if symbol.type != _FUNCTION or section.name == ".text":
            continue
        begin, end = symbol.value, symbol.value + symbol.size
        references = []
        for relocation in (
            each for each in sections if each.type == _REL and each.info == symbol.section
        ):
            for offset, info in struct.iter_unpack("<QQ", relocation.data):
                target = symbols[info >> 32]
                if not begin <= offset < end:
                    continue
                if info & 0xFFFFFFFF != _R_BPF_64_64 or sections[target.section].name != ".maps":
                    raise Refused(
                        f"{path}: {symbol.name} refers to "
                        f"{target.name or sections[target.section].name}, which is not a map",
                        fix="make functions static __always_inline and keep state in maps",
                    )
                references.append((offset - begin, target.name))
        programs.append(
            ProgramSpec(symbol.name, section.name, section.data[begin:end], tuple(references))
        )
    return programs
