"""How each pool announces its addresses, and which pool contains an address.

In: the pools of the configuration, the AddressPools, the Services. Out: for an address the terms of
its pool, and the length of its route. Pure. Invariants: a route covers no address outside of the
pool, because other pools may have other peers, and other addresses other owners. A mistake in a
pool does not interrupt traffic: a pool that assigns no addresses any more (it is being deleted, or
overlaps another pool) still determines how the addresses are announced that it has assigned, and a
pool whose section becomes invalid announces the addresses that Services have as before."""

import ipaddress
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fairlead.announce_checks import read_pool_section
from fairlead.announce_sections import PoolAnnounce
from fairlead.config import Config, parse_range
from fairlead.kube.crds import AddressPool
from fairlead.kube.objects import Service
from fairlead.model import ServiceKey
from fairlead.plan.addresses import shown_by
from fairlead.plan.pools import read_pools


class PoolTerms(msgspec.Struct, frozen=True):
    """How the addresses of one pool are announced. `problem`: why a part of the section of an
    AddressPool is not used; empty if all of it is used. `kept`: the section cannot be used, so the
    last valid one applies to these addresses, and no other address is announced; None: the section
    is used."""

    name: str
    section: PoolAnnounce
    problem: str = ""
    kept: frozenset[str] | None = None

    def announces(self, address: str) -> bool:
        """Return whether the section applies to the address."""
        return self.kept is None or address in self.kept

    def peers(self, requested: Collection[str] | None) -> tuple[str, ...] | None:
        """Return the peers that get the routes of a Service, sorted: those that it requests, as far
        as the pool permits them; it may permit none. None: every peer. `requested`: None if the
        Service requests none."""
        permitted = set(self.section.peers)
        if requested is None:
            return tuple(sorted(permitted)) or None
        return tuple(sorted(permitted.intersection(requested) if permitted else requested))


WITHOUT_POOL = PoolTerms("", PoolAnnounce())
"""The terms of an address that is in no pool."""


class PoolIndex:
    """The terms of the pool that contains an address. `objects`: the terms of each AddressPool."""

    def __init__(
        self,
        config: Config,
        objects: Mapping[str, AddressPool],
        before: Mapping[str, PoolTerms] | None = None,
        services: Mapping[ServiceKey, Service] | None = None,
    ) -> None:
        """`before`: the terms of each AddressPool until now. `services`: the Services whose
        addresses stay announced if a section has become invalid."""
        used = read_pools(config.pools, objects.values())
        sections = {pool.name: PoolTerms(pool.name, pool.announce) for pool in config.pools}
        self.objects = _terms_of_objects(objects, before or {}, services or {})
        terms_of = {**self.objects, **sections}
        self._sorted = sorted(
            ((range_.version, range_.first, range_.last), name)
            for name, pool in used.by_name.items()
            for range_ in pool.ranges
        )
        self._firsts = [(version, first) for (version, first, _), _ in self._sorted]
        self._blocks = _joined(self._sorted)
        self._block_firsts = [(version, first) for (version, first, _), _ in self._blocks]
        self._terms = terms_of
        self._unused = [
            (_ranges(pool.spec.addresses), self.objects[name])
            for name, pool in sorted(objects.items())
            if name in used.problems
        ]

    def find(self, address: str) -> PoolTerms | None:
        """Return the terms of the pool that contains this address; None if no pool does."""
        parsed = ipaddress.ip_address(address)
        version, value = parsed.version, int(parsed)
        index = bisect_right(self._firsts, (version, value)) - 1
        if index >= 0:
            (found, _, last), name = self._sorted[index]
            if found == version and value <= last:
                return self._terms[name]
        for ranges, terms in self._unused:
            if any(each[0] == version and each[1] <= value <= each[2] for each in ranges):
                return terms
        return None

    def route_length(self, address: str, requested: int) -> int:
        """Return the length of the route for this address: the requested one, or the shortest one
        whose prefix has only addresses of its pool. An address that is in no pool, or whose pool
        assigns no addresses, gets a route of its own."""
        parsed = ipaddress.ip_address(address)
        version, value, bits = parsed.version, int(parsed), parsed.max_prefixlen
        index = bisect_right(self._block_firsts, (version, value)) - 1
        if index < 0:
            return bits
        (found, first, last), _ = self._blocks[index]
        if found != version or value > last:
            return bits
        for length in range(requested, bits):
            hosts = (1 << (bits - length)) - 1
            if first <= value & ~hosts and value | hosts <= last:
                return length
        return bits


def _terms_of_objects(
    objects: Mapping[str, AddressPool],
    before: Mapping[str, PoolTerms],
    services: Mapping[ServiceKey, Service],
) -> dict[str, PoolTerms]:
    """Return the terms of each AddressPool. A section that cannot be used leaves the last valid one
    in force for the addresses that Services have at the time of the mistake, or when the process
    starts."""
    found: dict[str, PoolTerms] = {}
    shown: frozenset[str] | None = None
    for name, pool in objects.items():
        section, problem = read_pool_section(pool.spec.announce)
        if section is not None:
            found[name] = PoolTerms(name, section, problem)
        elif (last := before.get(name) or _of_status(name, pool)) is None:
            found[name] = PoolTerms(name, PoolAnnounce(method="none"), problem, frozenset())
        elif last.kept is not None:
            found[name] = msgspec.structs.replace(last, problem=problem)
        else:
            if shown is None:
                # Large Services are planned in a thread, and the state changes meanwhile.
                present = list(services.values())
                shown = frozenset(address for each in present for address in shown_by(each))
            found[name] = msgspec.structs.replace(last, problem=problem, kept=shown)
    return found


def _of_status(name: str, pool: AddressPool) -> PoolTerms | None:
    """Return the last valid terms of the AddressPool, which the controller has written into its
    status; None: there are none."""
    if pool.status.announce is None:
        return None
    section, problem = read_pool_section(pool.status.announce)
    return PoolTerms(name, section, problem) if section is not None else None


def _joined(
    ranges: Sequence[tuple[tuple[int, int, int], str]],
) -> list[tuple[tuple[int, int, int], str]]:
    """Return the sorted ranges, where ranges of one pool that follow each other are one."""
    joined: list[tuple[tuple[int, int, int], str]] = []
    for (version, first, last), name in ranges:
        if joined:
            (before, start, end), owner = joined[-1]
            if (before, owner) == (version, name) and end + 1 == first:
                joined[-1] = (version, start, last), name
                continue
        joined.append(((version, first, last), name))
    return joined


def _ranges(texts: Iterable[str]) -> Sequence[tuple[int, int, int]]:
    """Return the ranges without invalid ones."""
    found = []
    for text in texts:
        try:
            found.append(parse_range(text))
        except ValueError:
            continue
    return found
