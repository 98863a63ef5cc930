"""Rules about the addresses of Services: requested addresses, and pools. Pure.

In: `Case`s. Out: findings about a Service, or about a pool for which several Services wait."""

from collections.abc import Iterable, Sequence

from fairlead.doctor.facts import Case, Facts, addresses_of
from fairlead.doctor.finding import Evidence, RootCause
from fairlead.errors import Refused
from fairlead.kube.networks import read_address
from fairlead.model import Family
from fairlead.plan.addresses import AddressRequest, address_request_of
from fairlead.plan.classes import CLASSES
from fairlead.plan.members import listed
from fairlead.plan.pools import Pool, Pools, read_pools

WAITS = " has no address"
"""The end of the consequence for a Service that waits for a pool."""
METALLB_FULL = "no available ips"
"""A part of the message of MetalLB's Event AllocationFailed when its pools are full."""


def address_elsewhere(case: Case) -> RootCause | None:
    """Return the finding that a requested address is in no pool, or belongs to another Service."""
    try:
        request = address_request_of(case.service)
    except Refused:
        return None
    missing = [each for each in request.requested if each not in _shown(case)]
    if not missing:
        return None
    address = missing[0]
    evidence = [
        Evidence("requested address", address, f"{case.object} annotations, spec.loadBalancerIP"),
        Evidence("addresses", ", ".join(case.addresses) or "none", f"{case.object} status"),
    ]
    if (holder := _holder(case, address)) is not None:
        holds, origin = holder
        evidence.append(Evidence(f"holder of {address}", holds, origin))
        problem = f"it belongs to {holds}"
    elif _pooled(case) and (pools := _pools(case.facts)) is not None:
        if pools.find(address) is not None:
            return None
        ranges = [
            f"{pool.name}: {', '.join(_ranges(case.facts, pool.name))}" for pool in pools.in_order
        ]
        evidence.append(
            Evidence("pools", "; ".join(ranges) or "none", "configuration, AddressPools")
        )
        problem = "it is in no pool"
    else:
        return None
    return RootCause(
        "address-elsewhere",
        "degraded" if case.addresses else "broken",
        case.object,
        f"{case.object} requests the address {address} and does not get it, because {problem}",
        tuple(evidence),
        f"kubectl edit service -n {case.namespace} {case.name}"
        "  # request a free address of a pool, or none",
        "Service owner",
    )


def pools_exhausted(cases: Sequence[Case]) -> list[RootCause]:
    """Return a finding for each group of pools without a free address, with the Services that wait
    for one."""
    waiting: dict[tuple[tuple[str, ...], Family], list[Case]] = {}
    found = [each for case in cases if (each := _metallb(case)) is not None]
    for case in cases:
        if case.addresses or case.service.metadata.deletion_timestamp or not _pooled(case):
            continue
        pools = _pools(case.facts)
        try:
            request = address_request_of(case.service)
        except Refused:
            continue
        if pools is None or request.requested:
            continue
        family = request.families[0]
        usable = _candidates(pools, request, family)
        if usable and not any(_free(case.facts, each, family) for each in usable):
            names = tuple(each.name for each in usable)
            waiting.setdefault((names, family), []).append(case)
    found += [_exhausted(names, family, group) for (names, family), group in waiting.items()]
    return found


def _exhausted(names: tuple[str, ...], family: Family, group: Sequence[Case]) -> RootCause:
    facts = group[0].facts
    pools = _pools(facts)
    assert pools is not None
    first = pools.by_name[names[0]]
    holders = sorted(
        f"{each.key} ({address})"
        for each in facts.services
        for address in addresses_of(each)
        if _in(pools, names, address)
    )
    is_object = any(each.metadata.name == first.name for each in facts.pools or ())
    where = "AddressPool" if is_object else "pool"
    size = sum(pools.by_name[name].size(family) for name in names)
    remedy = (
        f"kubectl edit addresspool {first.name}  # add addresses to spec.addresses"
        if is_object
        else f"add addresses to pool {first.name} in the configuration (pools[].addresses)"
    )
    return RootCause(
        "pool-exhausted",
        "broken",
        f"{where} {', '.join(names)}",
        f"All {size} {family} addresses of {where} {', '.join(names)} are assigned or reserved, so "
        f"{listed([case.object for case in group])} {'get' if len(group) > 1 else 'gets'} none",
        (
            Evidence(
                "addresses of the pool",
                ", ".join(text for name in names for text in _ranges(facts, name)),
                "configuration, AddressPools",
            ),
            Evidence("Services with an address", listed(holders) or "none", "Services status"),
        ),
        remedy,
        "cluster operator",
        tuple(f"{case.object}{WAITS}" for case in group),
    )


def _metallb(case: Case) -> RootCause | None:
    """Return the finding that MetalLB reports."""
    failed = [
        each
        for each in case.warnings
        if each.reason == "AllocationFailed" and METALLB_FULL in each.message.lower()
    ]
    if case.addresses or not failed or case.our_class:
        return None
    return RootCause(
        "pool-exhausted",
        "broken",
        case.object,
        f"{case.object} has no address, because the pools of MetalLB have no free one",
        (Evidence("AllocationFailed", failed[0].message, f"Event of {case.object}"),),
        "kubectl get ipaddresspools.metallb.io -A  # add addresses to spec.addresses",
        "cluster operator",
    )


def _shown(case: Case) -> set[str | None]:
    return {read_address(each) for each in case.addresses}


def _pooled(case: Case) -> bool:
    """Return whether the addresses of the Service come from pools of Fairlead."""
    class_ = CLASSES.get(case.our_class)
    return class_ is not None and class_.addresses == "pool"


def _holder(case: Case, address: str) -> tuple[str, str] | None:
    """Return who has an address, and where that is shown."""
    for each in case.facts.services:
        if each.key != case.service.key and address in map(read_address, addresses_of(each)):
            return f"Service {each.key}", f"Service {each.key} status.loadBalancer"
    for grant in case.facts.grants or ():
        if grant.spec.address == address and grant.holder(case.service.key) is None:
            names = listed([f"Service {each.key}" for each in grant.spec.holders])
            if names:
                return names, f"AddressGrant {grant.metadata.name} spec.holders"
    return None


def _pools(facts: Facts) -> Pools | None:
    """Return the pools of Fairlead; None if they are not known."""
    if facts.config is None or facts.pools is None:
        return None
    return read_pools(facts.config.pools, facts.pools)


def _candidates(pools: Pools, request: AddressRequest, family: Family) -> list[Pool]:
    """Return the pools that may give the Service an address. A pool that selects namespaces by
    their labels, which are not read, makes the answer unknown: none."""
    if any(each.allocation and each.allocation.namespace_selectors for each in pools.in_order):
        return []
    if request.pool:
        chosen = [each for each in pools.in_order if each.name == request.pool]
    else:
        chosen = [each for each in pools.in_order if each.auto_assign]
    return [each for each in chosen if each.size(family) and each.allows(request.service_labels)]


def _free(facts: Facts, pool: Pool, family: Family) -> bool:
    taken = {read_address(address) for each in facts.services for address in addresses_of(each)}
    taken |= {grant.spec.address for grant in facts.grants or ()}
    return pool.lowest_free(family, taken.__contains__) is not None


def _in(pools: Pools, names: Iterable[str], text: str) -> bool:
    address = read_address(text)
    found = pools.find(address) if address is not None else None
    return found is not None and found[0].name in names


def _ranges(facts: Facts, name: str) -> tuple[str, ...]:
    """Return the addresses of a pool as they are written."""
    if facts.config is not None:
        for pool in facts.config.pools:
            if pool.name == name:
                return pool.addresses
    return next(
        (each.spec.addresses for each in facts.pools or () if each.metadata.name == name), ()
    )
