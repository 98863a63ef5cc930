"""Converts elements of the table's maps between nft's text and the bytes of netlink messages.

In: Elements, or listed elements. Out: the other form. Pure. Invariant: `decode` returns the Element
that was passed to `encode`. The fields of a key follow each other, each padded to four bytes.
Numbers are in network byte order, except the value of `numgen`, which is in host byte order."""

import re
import socket
import struct
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address, ip_network, summarize_address_range
from typing import NamedTuple

from fairlead.drivers.nodeproxy.elements import Element
from fairlead.net import nfelements
from fairlead.net.nfelements import DROP, GOTO, JUMP, Listed

_PORT, _PROTOCOL, _SLOT = struct.Struct(">Hxx"), struct.Struct("Bxxx"), struct.Struct("=I")


class _Field(NamedTuple):
    """One part of a key or value: its length in bytes, and how it is written and read."""

    length: int
    write: Callable[[str], bytes]
    read: Callable[[bytes], str]


def _number(layout: struct.Struct) -> _Field:
    return _Field(
        4,
        lru_cache(70_000)(lambda text: layout.pack(int(text))),
        lambda data: str(layout.unpack(data)[0]),
    )


_ADDRESSES = {
    "4": _Field(4, socket.inet_aton, socket.inet_ntoa),
    "6": _Field(
        16,
        lambda text: socket.inet_pton(socket.AF_INET6, text),
        lambda data: socket.inet_ntop(socket.AF_INET6, data),
    ),
}
_NAME = re.compile(r"(?:local_)?(\D+)([46])(?:_\d+)?")
"""The name of a map: its kind, address family, and a number, which is the number of endpoints or
the number of the map among the maps of its kind."""
_CODES = {"drop": DROP, "goto": GOTO, "jump": JUMP}
_VERBS = {code: verb for verb, code in _CODES.items()}
_PORTS, _PROTOCOLS, _SLOTS = _number(_PORT), _number(_PROTOCOL), _number(_SLOT)


class _Fields:
    """A sequence of fields. Recent results are cached, because many elements have equal parts."""

    def __init__(self, *fields: _Field) -> None:
        self._fields = fields
        self.write = lru_cache(8192)(self._write)

    def _write(self, text: str) -> bytes:
        return b"".join(
            [field.write(part) for field, part in zip(self._fields, text.split(" . "), strict=True)]
        )

    def read(self, data: bytes) -> list[str]:
        parts = []
        at = 0
        for field in self._fields:
            parts.append(field.read(data[at : at + field.length]))
            at += field.length
        return parts

    def with_more(self, fields: tuple[_Field, ...]) -> "_Fields":
        """Return these fields followed by others."""
        return _Fields(*self._fields, *fields)


_ADDRESS = {number: _Fields(address) for number, address in _ADDRESSES.items()}
_FRONTEND = {number: _Fields(address, _PROTOCOLS, _PORTS) for number, address in _ADDRESSES.items()}
_ENDPOINT = {number: _Fields(address, _PORTS) for number, address in _ADDRESSES.items()}


class _Layout(NamedTuple):
    """The layout of the elements of a map."""

    key: _Fields
    first: _Fields
    """The first part of a key, which many elements share: a frontend, or an address."""
    rest: tuple[_Field, ...]
    value: _Fields | None
    """None if the value is a verdict, or if it is a set."""
    ranges: bool
    """Whether the last field of a key may be a CIDR."""


@lru_cache(4096)
def _layout(name: str) -> _Layout:
    """Return the layout of the map with this name; see `skeleton`."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"no map is called {name}")
    kind, number = found.groups()
    address = _ADDRESSES[number]
    first = _ADDRESS[number] if kind == "cluster_ips" else _FRONTEND[number]
    rest: tuple[_Field, ...] = {
        "endpoints": (_SLOTS,),
        "hairpin": (address, address),
        "flows": (address, _PORTS),
        "allowed": (address,),
        "affinity": (address,),
    }.get(kind, ())
    value = _ENDPOINT[number] if kind in ("endpoints", "affinity") else None
    return _Layout(first.with_more(rest), first, rest, value, kind == "allowed")


def encode(element: Element, *, key_only: bool = False) -> bytes:
    """Return the element as bytes for the kernel. `key_only` suffices to delete it."""
    layout = _layout(element.map)
    # Write the first part of the key by itself: many elements share it, so it is mostly cached.
    end = b""
    if not layout.rest:
        key = layout.first.write(element.key)
    elif layout.ranges:
        first, _, addresses = element.key.rpartition(" . ")
        lowest, highest = map(layout.rest[0].write, _ends(addresses))
        begin = layout.first.write(first)
        key, end = begin + lowest, begin + highest
    elif len(layout.rest) == 1:
        first, _, last = element.key.rpartition(" . ")
        key = layout.first.write(first) + layout.rest[0].write(last)
    else:
        first, *rest = element.key.rsplit(" . ", len(layout.rest))
        key = layout.first.write(first) + b"".join(
            field.write(part) for field, part in zip(layout.rest, rest, strict=True)
        )
    if key_only:
        return nfelements.element(key, end)
    value = b""
    if layout.value is not None:
        value = nfelements.value(layout.value.write(element.value))
    elif element.value:
        value = _verdict(element.value)
    return nfelements.element(
        key, end, value + nfelements.comment(element.comment) if element.comment else value
    )


def decode(name: str, listed: Listed) -> Element:
    """Return a listed element of the map with this name."""
    layout = _layout(name)
    parts = layout.key.read(listed.key)
    if layout.ranges:
        parts[-1] = _cidr(parts[-1], layout.key.read(listed.end)[-1] if listed.end else parts[-1])
    value = ""
    if listed.verdict is not None:
        value = _verdict_text(listed.verdict, listed.chain)
    elif layout.value is not None:
        value = " . ".join(layout.value.read(listed.value))
    return Element(name, " . ".join(parts), value, listed.comment)


@lru_cache(4096)
def _verdict(text: str) -> bytes:
    verb, _, chain = text.partition(" ")
    return nfelements.verdict(_CODES[verb], chain)


def _verdict_text(code: int, chain: str) -> str:
    """Return a verdict as text. A verdict that we never write is shown by its number: it differs
    from every planned verdict, so the element is deleted, for which its key suffices."""
    return f"{_VERBS.get(code, f'verdict {code}')} {chain}".rstrip()


def _ends(text: str) -> tuple[str, str]:
    """Return the first and the last address of a CIDR, an address, or a range."""
    if "-" in text:
        first, _, last = text.partition("-")
        return first, last
    if "/" not in text:
        return text, text
    network = ip_network(text)
    return str(network[0]), str(network[-1])


def _cidr(first: str, last: str) -> str:
    """Return the addresses as a CIDR, as `skeleton.of_family` writes it, or as a range if they are
    not a CIDR."""
    if first == last:
        return str(ip_address(first))
    networks = list(summarize_address_range(ip_address(first), ip_address(last)))
    return str(networks[0]) if len(networks) == 1 else f"{first}-{last}"
