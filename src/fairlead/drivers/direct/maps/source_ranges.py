"""The source ranges of Services in the map `ranges`, which contains two sets for each Service, one
for each address family.

In: CIDRs of a plan. Out: a trie in which the program looks up the source of every packet of a
listener with the flag RANGES. The sets of a Service have the numbers 2 * n for IPv4 and 2 * n + 1
for IPv6, and `struct listener` names the set of its own family: so ::/0 admits no IPv4 client. An
empty set admits no client.

Invariant: the map contains what is mirrored here. A set is changed in place: new ranges are added
before old ones are removed. If adding fails, only the removal is carried out, so an error never
admits a client that should be excluded.
"""

import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from fairlead.drivers.direct.maps.quota import NO_USAGE, Quota
from fairlead.drivers.direct.maps.records import RANGE_KEY
from fairlead.errors import FairleadError
from fairlead.model import ServiceKey
from fairlead.net.address import MAPPED_PREFIX, is_ipv6
from fairlead.net.bpf import Map

_SET_BITS, _MAPPED_BITS = 32, 96
_VALUE = struct.pack("=I", 1)


class Sets(NamedTuple):
    """The sets of one Service: their number n, their keys, and the CIDRs of the plan from which
    they were made."""

    number: int
    members: frozenset[bytes]
    cidrs: tuple[str, ...]


class Ranges:
    """The map, mirrored. `survey` reads it and changes nothing; `adopt` puts the result into the
    mirror."""

    def __init__(self, ranges: Map, quota: Quota) -> None:
        self._map = ranges
        self._quota = quota
        self._of: dict[ServiceKey, Sets] = {}
        self._free: list[int] = []
        self._next = 0
        self.changed_since_survey: set[int] = set()
        """Numbers of sets that were changed since the last survey began."""

    def survey(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number of the sets and the key of each range. Nothing is changed."""
        return ((RANGE_KEY.unpack(key)[1] >> 1, key) for key, _ in self._map.items())

    def adopt(self, found: Mapping[int, Set[bytes]], named: Mapping[ServiceKey, int]) -> None:
        """Set the mirror to what was found, except for sets that have changed since the survey
        began.

        `named`: the number that the listeners of each Service name. Sets that no listener names are
        left over from an interrupted change, and are removed.
        """
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
        """Return whether the Service has sets, which may be empty."""
        return service in self._of

    def of(self, service: ServiceKey) -> tuple[str, ...]:
        """Return the CIDRs of the Service's sets."""
        return self._of[service].cidrs if service in self._of else ()

    def number(self, service: ServiceKey) -> int:
        """Return the number of the Service's sets. Create empty sets if the Service has none."""
        if service not in self._of:
            number = self._free.pop() if self._free else self._next
            self._next = max(self._next, number + 1)
            self._note(service, Sets(number, frozenset(), ()))
            self.changed_since_survey.add(number)
        return self._of[service].number

    def set(self, service: ServiceKey, cidrs: tuple[str, ...]) -> None:
        """Set the CIDRs of the Service.

        Raise OutOfMemory if the quota of its namespace does not permit them, and the kernel's error
        if the map is full.
        """
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
        """Remove the Service's sets. No listener may name them any more."""
        if (removed := self._of.get(service)) is not None:
            self.changed_since_survey.add(removed.number)
            self._map.delete_all(removed.members)
            self._note(service, None)
            self._free.append(removed.number)

    def _note(self, service: ServiceKey, sets: Sets | None) -> None:
        """Record the present sets of the Service."""
        before = self._of.pop(service, None)
        if sets is not None:
            self._of[service] = sets
        uses = (
            (service.namespace, len(each.members)) if each else NO_USAGE for each in (before, sets)
        )
        self._quota.change(*uses)


def packed(number: int, cidrs: Collection[str]) -> frozenset[bytes]:
    """Return the keys of these CIDRs in the sets with this number."""
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
    """Return the CIDRs, sorted as in plans."""
    return tuple(sorted(map(_text, members)))


def _text(key: bytes) -> str:
    bits, number, address = RANGE_KEY.unpack(key)
    if number & 1:
        return f"{socket.inet_ntop(socket.AF_INET6, address)}/{bits - _SET_BITS}"
    return f"{socket.inet_ntoa(address[12:])}/{bits - _SET_BITS - _MAPPED_BITS}"
