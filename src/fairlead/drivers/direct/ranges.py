"""The source ranges of Services in the map `ranges`: for each Service two sets, one for each family.

In: CIDRs as a plan writes them. Out: the same in a trie that the program asks for every packet of a listener with RANGES. The
sets of a Service are 2 * n for IPv4 and 2 * n + 1 for IPv6 and `struct listener` names the one of its own family, so that ::/0
lets no IPv4 client in. A set may be empty: then nobody is let in.
Invariant: what this mirrors is in the map. A set is changed in place, what comes before what goes; of a change that fails only
what is to go has gone, so that an error lets nobody in who should not be.
"""

import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fairlead.drivers.direct.layout import RANGE_KEY
from fairlead.errors import FairleadError
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map

_MAPPED = bytes(10) + b"\xff\xff"
_SET_BITS, _MAPPED_BITS = 32, 96
_VALUE = struct.pack("=I", 1)


class Sets(NamedTuple):
    """The sets of one Service: their number n, what is in them, and what a plan said that made them so."""

    number: int
    members: frozenset[bytes]
    cidrs: tuple[str, ...]


class Ranges:
    """The map, mirrored. What is read in a thread (`survey`) changes nothing; `adopt` makes it count."""

    def __init__(self, ranges: Map) -> None:
        self._map = ranges
        self._of: dict[ServiceKey, Sets] = {}
        self._free: list[int] = []
        self._next = 0

    def survey(self) -> dict[int, frozenset[bytes]]:
        """What is in the map, by number; changes nothing."""
        found: dict[int, set[bytes]] = {}
        for key in dict(self._map.items()):
            found.setdefault(RANGE_KEY.unpack(key)[1] >> 1, set()).add(key)
        return {number: frozenset(members) for number, members in found.items()}

    def adopt(self, found: Mapping[int, frozenset[bytes]], named: Mapping[ServiceKey, int]) -> None:
        """Have the mirror be what was found. `named`: the number that a Service's listeners name. What none names is left of
        an interrupted change, and goes."""
        for number in found.keys() - set(named.values()):
            self._map.delete_all(found[number])
        known, self._of = self._of, {}
        for service, number in named.items():
            members = found.get(number, frozenset())
            old = known.get(service)
            same = old is not None and (old.number, old.members) == (number, members)
            self._of[service] = old if same and old else Sets(number, members, _texts(members))
        self._next = max(named.values(), default=-1) + 1
        self._free = [number for number in range(self._next) if number not in set(named.values())]

    def of(self, service: ServiceKey) -> tuple[str, ...]:
        """The CIDRs that the Service's sets have."""
        return self._of[service].cidrs if service in self._of else ()

    def number(self, service: ServiceKey) -> int:
        """The number of the Service's sets; made, and empty, if it has none yet."""
        if service not in self._of:
            number = self._free.pop() if self._free else self._next
            self._next = max(self._next, number + 1)
            self._of[service] = Sets(number, frozenset(), ())
        return self._of[service].number

    def set(self, service: ServiceKey, cidrs: tuple[str, ...]) -> None:
        """Have the Service's sets be these. Raises Refused when the map is full."""
        number = self.number(service)
        held, wanted = self._of[service].members, packed(number, cidrs)
        try:
            self._map.update_all(dict.fromkeys(wanted - held, _VALUE))
        except FairleadError:
            self._map.delete_all(wanted - held)
            self._map.delete_all(held - wanted)
            left = held & wanted
            self._of[service] = Sets(number, left, _texts(left))
            raise
        self._map.delete_all(held - wanted)
        self._of[service] = Sets(number, wanted, cidrs)

    def remove(self, service: ServiceKey) -> None:
        """Take the Service's sets away. No listener may name them any more."""
        if (gone := self._of.pop(service, None)) is not None:
            self._map.delete_all(gone.members)
            self._free.append(gone.number)


def packed(number: int, cidrs: Collection[str]) -> frozenset[bytes]:
    """The keys of these CIDRs in the sets of this number."""
    return frozenset(_key(number, cidr) for cidr in cidrs)


def _key(number: int, cidr: str) -> bytes:
    address, _, length = cidr.partition("/")
    if ":" in address:
        return RANGE_KEY.pack(_SET_BITS + int(length), 2 * number + 1, socket.inet_pton(socket.AF_INET6, address))
    octets = _MAPPED + socket.inet_aton(address)
    return RANGE_KEY.pack(_SET_BITS + _MAPPED_BITS + int(length), 2 * number, octets)


def _texts(members: Iterable[bytes]) -> tuple[str, ...]:
    """The CIDRs, sorted as plans sort them."""
    return tuple(sorted(map(_text, members)))


def _text(key: bytes) -> str:
    bits, number, address = RANGE_KEY.unpack(key)
    if number & 1:
        return f"{socket.inet_ntop(socket.AF_INET6, address)}/{bits - _SET_BITS}"
    return f"{socket.inet_ntoa(address[12:])}/{bits - _SET_BITS - _MAPPED_BITS}"
