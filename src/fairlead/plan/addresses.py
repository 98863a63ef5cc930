"""Which addresses each Service holds.

In: the pools, what Services hold already (their status), what they want. Out: a Grant or a refusal for each.
Rules: what is held stays held, before anything new is given (else a restart would steal addresses); a request by name
comes next; then the lowest free address of the first pool that may be used. An address never changes unless its Service
asks for another one.
Invariant: pure, a function of its arguments only; no address is granted twice; assigning again with the result held
gives the result.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.config import PoolConfig, parse_range
from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import Family, Note, ServiceKey

ADDRESSES_ANNOTATION = "fairlead.io/addresses"
"""Addresses a Service asks for by name, separated by commas; at most one of each family."""
POOL_ANNOTATION = "fairlead.io/address-pool"
"""The pool a Service wants its addresses from."""


class Wanted(msgspec.Struct, frozen=True):
    """What one Service asks of the pools. `families` in order of preference; the first one it must get."""

    families: tuple[Family, ...]
    all_families: bool = False
    """It must get every family (RequireDualStack)."""
    requested: tuple[str, ...] = ()
    pool: str = ""
    since: str = ""
    """Creation time: who came first is served first."""


class Grant(msgspec.Struct, frozen=True):
    """The addresses of one Service, in the order of its families."""

    addresses: tuple[str, ...]
    notes: tuple[Note, ...] = ()


class _Range:
    """One run of addresses, which remembers below where nothing is free."""

    def __init__(self, text: str) -> None:
        self.version, self.first, self.last = parse_range(text)
        self._next = self.first

    def lowest_free(self, taken: Mapping[str, ServiceKey]) -> str | None:
        while self._next <= self.last:
            address = str(_address(self.version, self._next))
            if address not in taken:
                return address
            self._next += 1
        return None

    def __contains__(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return address.version == self.version and self.first <= int(address) <= self.last


class _Pool:
    def __init__(self, config: PoolConfig) -> None:
        self.name = config.name
        self.auto_assign = config.auto_assign
        self.ranges = [_Range(text) for text in config.addresses]


def _address(version: int, value: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.IPv4Address(value) if version == 4 else ipaddress.IPv6Address(value)


def family_of(address: str) -> Family:
    """The family of a valid address text."""
    return "IPv6" if ":" in address else "IPv4"


def wanted_by(service: Service) -> Wanted:
    """Read the wishes of a Service from its spec and annotations. Raises Refused for a request that is no address."""
    spec, notes = service.spec, service.metadata.annotations
    families: tuple[Family, ...] = spec.ip_families or tuple(dict.fromkeys(family_of(a) for a in spec.cluster_ips)) or ("IPv4",)
    text = notes.get(ADDRESSES_ANNOTATION) or spec.load_balancer_ip
    requested = tuple(_canonical(part) for part in text.split(",") if part.strip())
    if len({family_of(address) for address in requested}) < len(requested):
        raise Refused(f"{text!r} asks for two addresses of one family", fix="ask for one IPv4 and one IPv6 address at most")
    return Wanted(
        families,
        all_families=spec.ip_family_policy == "RequireDualStack",
        requested=requested,
        pool=notes.get(POOL_ANNOTATION, ""),
        since=service.metadata.creation_timestamp or "",
    )


def held_by(service: Service) -> tuple[str, ...]:
    """The addresses that a Service's status shows."""
    return tuple(entry.ip for entry in service.status.load_balancer.ingress if entry.ip)


def _canonical(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip()))
    except ValueError:
        raise Refused(
            f"the requested address {text.strip()!r} is not an IP address", fix=f"mend {ADDRESSES_ANNOTATION}"
        ) from None


def assign(
    pools: Sequence[PoolConfig], held: Mapping[ServiceKey, Sequence[str]], wanted: Mapping[ServiceKey, Wanted]
) -> dict[ServiceKey, Grant | Refused]:
    """Give each Service of `wanted` its addresses. What is held is taken until it is held no more, even by a Service that
    wants nothing now or something that cannot be had: packets for it may still be forwarded."""
    assignment = _Assignment([_Pool(pool) for pool in pools])
    in_order = sorted(wanted, key=lambda key: (wanted[key].since, key))
    for key in (*in_order, *sorted(held.keys() - wanted.keys())):
        assignment.reserve(key, held.get(key, ()))
    for key in in_order:
        assignment.keep(key, wanted[key], held.get(key, ()))
    for key in in_order:
        assignment.take_requested(key, wanted[key])
    return {key: assignment.grant(key, wanted[key]) for key in in_order}


class _Assignment:
    """The table being filled in: address -> Service, Service -> family -> address."""

    def __init__(self, pools: list[_Pool]) -> None:
        self.pools = pools
        self.taken: dict[str, ServiceKey] = {}
        self.given: dict[ServiceKey, dict[Family, str]] = {}
        self.refused: dict[ServiceKey, Refused] = {}

    def reserve(self, key: ServiceKey, held: Iterable[str]) -> None:
        for address in held:
            self.taken.setdefault(address, key)

    def keep(self, key: ServiceKey, wanted: Wanted, held: Iterable[str]) -> None:
        """What is held stays, unless the Service now asks for another address of that family or no longer for the family."""
        asked = {family_of(address): address for address in wanted.requested}
        for address in held:
            family = family_of(address)
            if family in wanted.families and asked.get(family, address) == address and self.taken[address] == key:
                self._give(key, family, address)

    def take_requested(self, key: ServiceKey, wanted: Wanted) -> None:
        for address in wanted.requested:
            family = family_of(address)
            owner = self.taken.get(address)
            if family not in wanted.families:
                self.refused[key] = Refused(
                    f"the requested address {address} is {family}, which is not among the Service's ipFamilies",
                    fix="ask for an address of its families or change spec.ipFamilies",
                )
            elif owner == key:
                self._give(key, family, address)
            elif owner is not None:
                self.refused[key] = Refused(
                    f"the requested address {address} is held by Service {owner}", fix="ask for another one"
                )
            elif not any(ipaddress.ip_address(address) in range_ for pool in self.pools for range_ in pool.ranges):
                names = ", ".join(pool.name for pool in self.pools) or "none is configured"
                self.refused[key] = Refused(
                    f"the requested address {address} is in no pool ({names})", fix="ask for another one or add it to a pool"
                )
            else:
                self._give(key, family, address)

    def grant(self, key: ServiceKey, wanted: Wanted) -> Grant | Refused:
        if key in self.refused:
            return self.refused[key]
        notes: list[Note] = []
        for family in wanted.families:
            if family in self.given.get(key, {}):
                continue
            address = self._free(family, wanted.pool)
            if address is not None:
                self._give(key, family, address)
            elif family == wanted.families[0] or wanted.all_families:
                return self._none_free(family, wanted.pool)
            else:
                notes.append(
                    Note("AddressFamilySkipped", f"no pool has a free {family} address; serving the other family only")
                )
        given = self.given.get(key, {})
        return Grant(tuple(given[family] for family in wanted.families if family in given), tuple(notes))

    def _give(self, key: ServiceKey, family: Family, address: str) -> None:
        self.taken[address] = key
        self.given.setdefault(key, {})[family] = address

    def _free(self, family: Family, pool_name: str) -> str | None:
        version = 6 if family == "IPv6" else 4
        for pool in self.pools:
            if pool.name != pool_name if pool_name else not pool.auto_assign:
                continue
            for range_ in pool.ranges:
                if range_.version == version and (address := range_.lowest_free(self.taken)):
                    return address
        return None

    def _none_free(self, family: Family, pool_name: str) -> Refused:
        if pool_name and pool_name not in {pool.name for pool in self.pools}:
            names = ", ".join(pool.name for pool in self.pools) or "none"
            return Refused(f"there is no pool {pool_name!r}; configured: {names}", fix=f"mend {POOL_ANNOTATION}")
        where = f"pool {pool_name}" if pool_name else "the pools"
        if not self.pools:
            return Refused("no pool of addresses is configured", fix="add one under `pools` in the configuration")
        return Refused(f"no {family} address is free in {where}", fix="add a range to the configuration or delete a Service")
