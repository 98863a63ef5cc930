"""The source ranges of Services in the map `ranges`: for each Service two sets, one for each
family.

In: CIDRs as a plan writes them. Out: the same in a trie that the program asks for every packet of a
listener with RANGES. The sets of a Service are 2 * n for IPv4 and 2 * n + 1 for IPv6 and `struct
listener` names the one of its own family, so that ::/0 lets no IPv4 client in. A set may be empty:
then nobody is let in. Invariant: what this mirrors is in the map. A set is changed in place, what
comes before what goes; of a change that fails only what is to go has removed, so that an error lets
nobody in who should not be."""

import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from fairlead.drivers.direct.maps.quota import NO_USE, Quota
from fairlead.drivers.direct.maps.records import RANGE_KEY
from fairlead.errors import FairleadError
from fairlead.model import ServiceKey
from fairlead.net.address import MAPPED_PREFIX, is_ipv6
from fairlead.net.bpf import Map

_SET_BITS, _MAPPED_BITS = 32, 96
_VALUE = struct.pack("=I", 1)


class Sets(NamedTuple):
    """The sets of one Service: their number n, what is in them, and what a plan said that made them
    so."""

    number: int
    members: frozenset[bytes]
    cidrs: tuple[str, ...]


class Ranges:
    """The map, mirrored. What is read (`survey`) changes nothing; `adopt` makes it count."""

    def __init__(self, ranges: Map, quota: Quota) -> None:
        self._map = ranges
        self._quota = quota
        self._of: dict[ServiceKey, Sets] = {}
        self._free: list[int] = []
        self._next = 0
        self.changed_since_survey: set[int] = set()
        """Numbers of sets that were changed since whoever surveys has emptied it."""

    def survey(self) -> Iterator[tuple[int, bytes]]:
        """What is in the map, a number and one of its ranges at a time; changes nothing."""
        return ((RANGE_KEY.unpack(key)[1] >> 1, key) for key, _ in self._map.items())

    def adopt(self, found: Mapping[int, Set[bytes]], named: Mapping[ServiceKey, int]) -> None:
        """Have the mirror be what was found, but for what was changed since. `named`: the number
        that a Service's listeners name. What none names is left of an interrupted change, and
        goes."""
        for service, sets in tuple(self._of.items()):
            if sets.number not in self.changed_since_survey and named.get(service) != sets.number:
                self._note(service, None)
        for number in found.keys() - set(named.values()) - self.changed_since_survey:
            self._map.delete_all(found[number])
        for service, number in named.items():
            if number in self.changed_since_survey:
                continue
            members, old = frozenset(found.get(number, ())), self._of.get(service)
            if old is None or (old.number, old.members) != (number, members):
                self._note(service, Sets(number, members, _texts(members)))
        used = {sets.number for sets in self._of.values()}
        self._next = max(used, default=-1) + 1
        self._free = [number for number in range(self._next) if number not in used]

    def has(self, service: ServiceKey) -> bool:
        """Whether the Service has sets, be they empty."""
        return service in self._of

    def of(self, service: ServiceKey) -> tuple[str, ...]:
        """The CIDRs that the Service's sets have."""
        return self._of[service].cidrs if service in self._of else ()

    def number(self, service: ServiceKey) -> int:
        """The number of the Service's sets; made, and empty, if it has none yet."""
        if service not in self._of:
            number = self._free.pop() if self._free else self._next
            self._next = max(self._next, number + 1)
            self._note(service, Sets(number, frozenset(), ()))
            self.changed_since_survey.add(number)
        return self._of[service].number

    def set(self, service: ServiceKey, cidrs: tuple[str, ...]) -> None:
        """Set the range sets of the Service. Raises OutOfMemory if its namespace may not have as many,
        and the kernel's error if the kernel has no room."""
        number = self.number(service)
        held, wanted = self._of[service].members, packed(number, cidrs)
        self.changed_since_survey.add(number)
        try:
            if len(wanted) - len(held) > self._quota.available(
                service.namespace, changing=bool(held)
            ):
                raise self._quota.refusal(service)
            self._map.update_all(dict.fromkeys(wanted - held, _VALUE))
        except FairleadError:
            self._map.delete_all(wanted - held)
            self._map.delete_all(held - wanted)
            left = held & wanted
            self._note(service, Sets(number, left, _texts(left)))
            raise
        self._map.delete_all(held - wanted)
        self._note(service, Sets(number, wanted, cidrs))

    def remove(self, service: ServiceKey) -> None:
        """Take the Service's sets away. No listener may name them any more."""
        if (removed := self._of.get(service)) is not None:
            self.changed_since_survey.add(removed.number)
            self._map.delete_all(removed.members)
            self._note(service, None)
            self._free.append(removed.number)

    def _note(self, service: ServiceKey, sets: Sets | None) -> None:
        """Record the sets that the Service has from now on."""
        before = self._of.pop(service, None)
        if sets is not None:
            self._of[service] = sets
        uses = (
            (service.namespace, len(each.members)) if each else NO_USE for each in (before, sets)
        )
        self._quota.change(*uses)


def packed(number: int, cidrs: Collection[str]) -> frozenset[bytes]:
    """The keys of these CIDRs in the sets of this number."""
    return frozenset(_key(number, cidr) for cidr in cidrs)


def _key(number: int, cidr: str) -> bytes:
    address, _, length = cidr.partition("/")
    if is_ipv6(address):
        return RANGE_KEY.pack(
            _SET_BITS + int(length), 2 * number + 1, socket.inet_pton(socket.AF_INET6, address)
        )
    octets = MAPPED_PREFIX + socket.inet_aton(address)
    return RANGE_KEY.pack(_SET_BITS + _MAPPED_BITS + int(length), 2 * number, octets)


def _texts(members: Iterable[bytes]) -> tuple[str, ...]:
    """The CIDRs, sorted as plans sort them."""
    return tuple(sorted(map(_text, members)))


def _text(key: bytes) -> str:
    bits, number, address = RANGE_KEY.unpack(key)
    if number & 1:
        return f"{socket.inet_ntop(socket.AF_INET6, address)}/{bits - _SET_BITS}"
    return f"{socket.inet_ntoa(address[12:])}/{bits - _SET_BITS - _MAPPED_BITS}"
