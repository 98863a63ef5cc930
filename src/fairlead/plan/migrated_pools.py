"""The AddressPools that a migration needs.

In: the objects before the migration, and the configuration. Out: AddressPools to apply first: the
pools of MetalLB (`plan.metallb`), and one pool for the addresses that Services show and no pool
contains; and why a pool is left out. Pure. Invariant: the pools are usable together with those that
exist."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fairlead.config import Config, parse_range
from fairlead.errors import Refused
from fairlead.kube.crds import GROUP_VERSION, AddressPool
from fairlead.kube.manifests import Manifests
from fairlead.kube.objects import Service
from fairlead.plan import annotations
from fairlead.plan.addresses import held_by
from fairlead.plan.classes import CLASSES, OCTAVIA, service_class_of
from fairlead.plan.exclusions import Exclusions, span_of
from fairlead.plan.metallb import TranslatedPool, translations
from fairlead.plan.pools import DELETED, Pools, read_pools

SUGGESTED = next(each for each in CLASSES.values() if each.addresses == "pool")
"""The class to suggest for Services of another system: a class whose addresses come from pools."""

TAKEN_OVER = "taken-over"
"""The name of the pool for addresses that are in no other pool."""
LAST = "9999-12-31T23:59:59Z"
"""The creation time of an AddressPool that does not exist yet: every existing one is older."""


class Inventory(msgspec.Struct, frozen=True):
    """The objects before a migration: those that the plan reads, and MetalLB's objects as decoded
    JSON."""

    manifests: Manifests
    of_metallb: tuple[Mapping[str, Any], ...]


class PoolsToApply(msgspec.Struct, frozen=True):
    """The AddressPools to apply before the migration, why others are left out, and remarks."""

    bodies: tuple[dict[str, Any], ...]
    refused: tuple[Refused, ...] = ()
    remarks: tuple[str, ...] = ()

    def applied_to(self, existing: Iterable[AddressPool]) -> tuple[AddressPool, ...]:
        """Return all AddressPools after these were applied. New ones are newer than the others."""
        made = {pool.metadata.name: pool for pool in map(_as_object, self.bodies)}
        left = (pool for pool in existing if pool.metadata.name not in made)
        return (*left, *made.values())


def pools_to_apply(found: Inventory, config: Config, exclusions: Exclusions) -> PoolsToApply:
    """Return MetalLB's pools as AddressPools, and an AddressPool of the addresses that are in no
    pool. The latter is left out if a pool is not usable, because that may contain the addresses."""
    made, refused, remarks = translations(found.of_metallb)
    existing = found.manifests.address_pools
    names = {pool.metadata.name: pool.spec.addresses for pool in existing}
    names |= {pool.name: pool.addresses for pool in config.pools}
    new = [each for each in made if each.name not in names]
    for each in made:
        if each.name in names and not _covers(names[each.name], each.body["spec"]["addresses"]):
            refused.append(
                Refused(
                    f"{each.source}: there is a pool {each.name} already, with other addresses",
                    fix="add the addresses to it, or write an AddressPool of another name",
                )
            )
    pools = read_pools(
        config.pools, [*existing, *(_as_object(each.body) for each in new)], exclusions
    )
    usable: list[TranslatedPool] = []
    for each in new:
        if (problem := pools.problems.get(each.name)) is not None:
            refused.append(Refused(f"{each.source}: {problem}", fix="correct the pool in MetalLB"))
        else:
            remarks += each.remarks
            usable.append(each)
    refused += [
        Refused(f"AddressPool {pool.metadata.name} is not used: {problem}")
        for pool in existing
        if (problem := pools.problems.get(pool.metadata.name)) and problem.code != DELETED
    ]
    bodies = [each.body for each in usable]
    left, why_not = _unpooled(found, config, pools)
    remarks += why_not
    if left and refused:
        remarks.append(
            f"pool {TAKEN_OVER} is not printed: its addresses may be in the pools that are not "
            "printed; correct these pools and run the command again"
        )
    elif left and TAKEN_OVER in {*names, *(each.name for each in usable)} - _names_of(existing):
        refused.append(
            Refused(
                f"pool {TAKEN_OVER} is not made for {', '.join(left)}: another pool has its name",
                fix="add these addresses to a pool",
            )
        )
    elif left:
        bodies.append(_taken_over(left, existing))
    return PoolsToApply(tuple(bodies), tuple(refused), tuple(remarks))


def assumed_class(config: Config) -> str:
    """Return the default class after the migration: the configured one, or else a class that keeps
    the addresses."""
    if config.default_class is not None:
        return config.default_class
    adopts = config.octavia is not None and config.octavia.adopt_from
    return (OCTAVIA if adopts else SUGGESTED).name


def shown_addresses(service: Service) -> tuple[str, ...]:
    """Return the addresses that the status of the Service shows, each once."""
    return tuple(dict.fromkeys(held_by(service)))


def is_balanced(service: Service) -> bool:
    return service.spec.type == "LoadBalancer" and service.metadata.deletion_timestamp is None


def _as_object(body: Mapping[str, Any]) -> AddressPool:
    metadata = body["metadata"] | {"creationTimestamp": LAST}
    return msgspec.convert({**body, "metadata": metadata}, AddressPool)


def _names_of(pools: Iterable[AddressPool]) -> set[str]:
    return {pool.metadata.name for pool in pools}


def _covers(addresses: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether each of the other ranges is within one of these ranges."""
    try:
        own, rest = ([parse_range(text) for text in each] for each in (addresses, others))
    except ValueError:
        return False
    return all(any(a[0] == b[0] and a[1] <= b[1] and b[2] <= a[2] for a in own) for b in rest)


def _unpooled(found: Inventory, config: Config, pools: Pools) -> tuple[list[str], list[str]]:
    """Return the addresses that need a pool: Services of classes with addresses from pools show
    them, and no pool contains them; and remarks about addresses that cannot be in a pool."""
    left, remarks = set[str](), []
    assumed = assumed_class(config)
    for service in sorted(found.manifests.services, key=lambda each: each.key):
        class_ = service_class_of(service, assumed) or SUGGESTED
        if not is_balanced(service) or class_.addresses != "pool":
            continue
        for address in shown_addresses(service):
            if pools.find(address) is not None or address in left:
                continue
            if (use := pools.exclusions.find(address)) is not None:
                remarks.append(
                    f"{address} of Service {service.key} is {use.words}, and goes into no pool; "
                    f"request another address by {annotations.ADDRESSES[0]}"
                )
            elif (span := span_of(address)) is not None and pools.overlaps(span):
                remarks.append(
                    f"{address} of Service {service.key} is in a pool that does not assign it, "
                    "because of avoidBuggyIPs; set avoidBuggyIPs of the pool to false, or request "
                    f"another address by {annotations.ADDRESSES[0]}"
                )
            elif is_unreachable(address):
                remarks.append(
                    f"{address} of Service {service.key} cannot be in a pool: no client reaches "
                    f"it; request another address by {annotations.ADDRESSES[0]}"
                )
            else:
                left.add(address)
    return sorted(left), remarks


def is_unreachable(text: str) -> bool:
    """Return whether no client on another host reaches an address, so that no pool can have it."""
    try:
        parse_range(text)
    except ValueError:
        return True
    return False


def _taken_over(left: Iterable[str], existing: Iterable[AddressPool]) -> dict[str, Any]:
    """Return the AddressPool of these addresses, with those that a pool of its name has already.
    With `autoAssign: false`, a new Service gets an address of this pool only on request."""
    former = [
        text
        for pool in existing
        if pool.metadata.name == TAKEN_OVER
        for text in pool.spec.addresses
    ]
    ranges: list[tuple[int, int, int]] = []
    for version, first, last in sorted(map(parse_range, {*former, *left})):
        if ranges and ranges[-1][0] == version and first <= ranges[-1][2] + 1:
            ranges[-1] = (version, ranges[-1][1], max(last, ranges[-1][2]))
        else:
            ranges.append((version, first, last))
    spec = {"addresses": [_text(*each) for each in ranges], "autoAssign": False}
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "AddressPool",
        "metadata": {"name": TAKEN_OVER},
        "spec": spec,
    }


def _text(version: int, first: int, last: int) -> str:
    type_ = ipaddress.IPv6Address if version == 6 else ipaddress.IPv4Address
    return str(type_(first)) if first == last else f"{type_(first)}-{type_(last)}"
