"""BGP communities: from the notation of the configuration to numbers. Pure.

In: texts, weights. Out: standard communities (RFC 1997), large communities (RFC 8092), and the
extended community of a link bandwidth (RFC 10005)."""

import re
import struct
from typing import NamedTuple

WELL_KNOWN = {
    "graceful-shutdown": (65535, 0),
    "accept-own": (65535, 1),
    "llgr-stale": (65535, 6),
    "no-llgr": (65535, 7),
    "blackhole": (65535, 666),
    "no-export": (65535, 65281),
    "no-advertise": (65535, 65282),
    "no-export-subconfed": (65535, 65283),
    "no-peer": (65535, 65284),
}
"""The registered names of communities."""
GRACEFUL_SHUTDOWN = WELL_KNOWN["graceful-shutdown"]
BYTES_PER_POD = 125_000
"""The link bandwidth that stands for one pod, in bytes per second: 1 Mbit/s. Routers use the ratio.
FRR rounds smaller values, and stores the sum in 32 bits."""
_NOTATION = re.compile(r"\d{1,10}(:\d{1,10}){1,2}")
_TWO_BYTES, _FOUR_BYTES = 0xFFFF, 0xFFFF_FFFF
_LINK_BANDWIDTH = 0x0004
"""Type and subtype of the transitive form, which is passed on to external peers."""
_AS_TRANS = 23_456
"""Stands for an AS number of more than 16 bits (RFC 6793)."""


class Communities(NamedTuple):
    """The communities of a route, each kind sorted."""

    standard: tuple[tuple[int, int], ...] = ()
    large: tuple[tuple[int, int, int], ...] = ()


def parse(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a community: two for a standard one, three for a large one. None if the
    text is not a community."""
    if text in WELL_KNOWN:
        return WELL_KNOWN[text]
    if _NOTATION.fullmatch(text) is None:
        return None
    numbers = tuple(int(part) for part in text.split(":"))
    limit = _TWO_BYTES if len(numbers) == 2 else _FOUR_BYTES
    return numbers if max(numbers) <= limit else None


def collected(texts: tuple[str, ...], *, weight: int, asn: int, leaving: bool) -> Communities:
    """Return the communities of a route: those of the configuration, one with the weight for
    routers that do not know link bandwidth, and graceful shutdown if the route is about to be
    withdrawn. Texts that are not communities are left out."""
    standard: set[tuple[int, int]] = {GRACEFUL_SHUTDOWN} if leaving else set()
    large: set[tuple[int, int, int]] = set()
    for numbers in map(parse, texts):
        match numbers:
            case (first, second):
                standard.add((first, second))
            case (first, second, third):
                large.add((first, second, third))
    match weight_community(asn, weight) if weight else ():
        case (first, second):
            standard.add((first, second))
        case (first, second, third):
            large.add((first, second, third))
    return Communities(tuple(sorted(standard)), tuple(sorted(large)))


def weight_community(asn: int, weight: int) -> tuple[int, ...]:
    """Return the community that contains a weight: a standard one, or a large one if the AS number
    has more than 16 bits."""
    return (asn, min(weight, _TWO_BYTES)) if asn <= _TWO_BYTES else (asn, 0, weight)


def link_bandwidth(weight: int, asn: int) -> tuple[int, int]:
    """Return the extended community of a weight as two numbers of 32 bits: type, subtype and AS
    number; the bandwidth in bytes per second, as IEEE 754."""
    (bits,) = struct.unpack("!I", struct.pack("!f", float(weight * BYTES_PER_POD)))
    return _LINK_BANDWIDTH << 16 | (asn if asn <= _TWO_BYTES else _AS_TRANS), bits
