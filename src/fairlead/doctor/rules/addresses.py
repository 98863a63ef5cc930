"""Rules about the addresses of Services: requested addresses, and pools. Pure.

In: `Case`s. Out: findings about a Service, or about a pool for which several Services wait."""

from collections.abc import Iterable, Sequence

from fairlead.doctor.facts import Case, Facts, addresses_of
from fairlead.doctor.finding import Fact, RootCause
from fairlead.doctor.owners import Owner
from fairlead.errors import Refused
from fairlead.kube.networks import read_address
from fairlead.kube.objects import Condition
from fairlead.model import Family
from fairlead.plan.addresses import AddressRequest, address_request_of
from fairlead.plan.classes import CLASSES
from fairlead.plan.members import listed
from fairlead.plan.pools import Pool, Pools, family_of_version

WAITS = " has no address"
"""The end of the consequence for a Service that waits for a pool."""
METALLB_FULL = ("no available ips", "no suitable pool")
"""Parts of the message of MetalLB's Event AllocationFailed when no pool has a free address that the
Service may get."""
METALLB_SHARING = ("metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip")
CILIUM_REQUEST = "cilium.io/IPAMRequestSatisfied"
CILIUM_FULL = "out_of_ips"
"""The condition of Cilium's address management, and its reason when the pools are full."""
WITH_OWN_ADDRESSES: Sequence[Owner] = ("Fairlead", "MetalLB")
"""Owners whose addresses must not be those of hosts. klipper, and Cilium's class for nodes, publish
addresses of nodes."""


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
        Fact("requested address", address, f"{case.subject} annotations, spec.loadBalancerIP"),
        Fact("addresses", ", ".join(case.addresses) or "none", f"{case.subject} status"),
    ]
    if (holder := _holder(case, address)) is not None:
        holds, origin = holder
        evidence.append(Fact(f"holder of {address}", holds, origin))
        problem = f"it belongs to {holds}"
    elif _pooled(case) and (pools := case.facts.pools_in_use) is not None:
        if pools.find(address) is not None:
            return None
        ranges = [
            f"{pool.name}: {', '.join(_ranges(case.facts, pool.name))}" for pool in pools.in_order
        ]
        evidence.append(Fact("pools", "; ".join(ranges) or "none", "configuration, AddressPools"))
        use = pools.excluded(address)
        problem = f"it is {use.words}" if use is not None else "it is in no pool"
    elif (said := _cilium(case)) is not None and said.reason != CILIUM_FULL:
        evidence.append(Fact(said.type, f"{said.reason}: {said.message}", f"{case.subject} status"))
        problem = f"Cilium reports {said.reason}"
    else:
        return None
    return RootCause(
        code="AddressElsewhere",
        severity="warning" if case.addresses else "error",
        subject=case.subject,
        message=(
            f"{case.subject} requests the address {address} and does not get it, because {problem}"
        ),
        known_by=tuple(evidence),
        remedy=(
            f"kubectl edit service -n {case.namespace} {case.name}"
            "  # request a free address of a pool, or none"
        ),
        actor="Service owner",
    )


def pools_exhausted(cases: Sequence[Case]) -> list[RootCause]:
    """Return a finding for each group of pools without a free address, with the Services that wait
    for one."""
    waiting: dict[tuple[tuple[str, ...], Family], list[Case]] = {}
    found = [each for case in cases if (each := _full_elsewhere(case)) is not None]
    for case in cases:
        if case.addresses or case.service.metadata.deletion_timestamp or not _pooled(case):
            continue
        pools = case.facts.pools_in_use
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
    pools = facts.pools_in_use
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
    remedy = (
        f"kubectl edit addresspool {first.name}  # add addresses to spec.addresses"
        if is_object
        else f"add addresses to pool {first.name} in the configuration (pools[].addresses)"
    )
    return RootCause(
        code="PoolExhausted",
        severity="error",
        subject=f"{where} {', '.join(names)}",
        message=(
            f"No {family} address of {where} {', '.join(names)} is free: each is assigned, "
            f"reserved, or used by the cluster itself, so "
            f"{listed([case.subject for case in group])} {'get' if len(group) > 1 else 'gets'} none"
        ),
        known_by=(
            Fact(
                "addresses of the pool",
                ", ".join(text for name in names for text in _ranges(facts, name)),
                "configuration, AddressPools",
            ),
            Fact("Services with an address", listed(holders) or "none", "Services status"),
        ),
        remedy=remedy,
        actor="cluster operator",
        consequences=tuple(f"{case.subject}{WAITS}" for case in group),
    )


def _full_elsewhere(case: Case) -> RootCause | None:
    """Return the finding that MetalLB or Cilium reports that its pools are full."""
    if case.addresses or case.our_class:
        return None
    failed = [
        each
        for each in case.warnings
        if each.reason == "AllocationFailed"
        and any(part in each.message.lower() for part in METALLB_FULL)
    ]
    cause, advice = "", "add addresses to a pool"
    said = _cilium(case)
    if failed:
        fact = Fact("AllocationFailed", failed[0].message, f"Event of {case.subject}")
        system, kind = "MetalLB", "ipaddresspools.metallb.io -A -o yaml"
        advice = (
            "add addresses to a pool, unless autoAssign, serviceAllocation or the family of the "
            "pools with free ones keep the Service out"
        )
        shares = any(each in case.service.metadata.annotations for each in METALLB_SHARING)
        if shares and case.local:
            cause = (
                "; with externalTrafficPolicy Local, MetalLB lets Services share an address only "
                "if they have the same selector"
            )
    elif said is not None and said.reason == CILIUM_FULL:
        fact = Fact(said.type, f"{said.reason}: {said.message}", f"{case.subject} status")
        system, kind = "Cilium", "ciliumloadbalancerippools"
    else:
        return None
    return RootCause(
        code="PoolExhausted",
        severity="error",
        subject=case.subject,
        message=(
            f"{case.subject} has no address, because no pool of {system} has a free one that it "
            f"may get{cause}"
        ),
        known_by=(fact,),
        remedy=f"kubectl get {kind}  # {advice}",
        actor="cluster operator",
    )


def address_excluded(case: Case) -> RootCause | None:
    """Return the finding that the Service has an address of a Node, which keeps its packets."""
    if case.owner not in WITH_OWN_ADDRESSES:
        return None
    of_nodes = {
        read_address(one.address): each.metadata.name
        for each in case.facts.nodes or ()
        for one in each.status.addresses
        if one.type in ("InternalIP", "ExternalIP")
    }
    for address in case.addresses:
        if (node := of_nodes.get(read_address(address))) is None:
            continue
        return RootCause(
            code="AddressExcluded",
            severity="error",
            subject=case.subject,
            message=(
                f"{case.subject} has the address {address}, which is an address of Node {node}: "
                "packets to it end at that node, and not at the Service"
            ),
            known_by=(
                Fact("address", address, f"{case.subject} status.loadBalancer"),
                Fact("address of the Node", address, f"Node {node} status.addresses"),
            ),
            remedy=(
                f"kubectl edit service -n {case.namespace} {case.name}"
                "  # request another address, and take the addresses of Nodes out of the pools"
            ),
            actor="cluster operator",
        )
    return None


def _cilium(case: Case) -> Condition | None:
    """Return the condition by which Cilium reports that the Service gets no address."""
    return next(
        (
            each
            for each in case.service.status.conditions
            if each.type == CILIUM_REQUEST and each.status == "False"
        ),
        None,
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


def _candidates(pools: Pools, request: AddressRequest, family: Family) -> list[Pool]:
    """Return the pools that may give the Service an address. A pool that selects namespaces by
    their labels, which are not read, makes the answer unknown: none."""
    if any(each.allocation and each.allocation.namespace_selectors for each in pools.in_order):
        return []
    if request.pool:
        chosen = [each for each in pools.in_order if each.name == request.pool]
    else:
        chosen = [each for each in pools.in_order if each.auto_assign]
    return [
        each
        for each in chosen
        if any(family_of_version(one.version) == family for one in each.ranges)
        and each.allows(request.service_labels)
    ]


def _free(facts: Facts, pool: Pool, family: Family) -> bool:
    return pool.lowest_free(family, facts.taken.__contains__) is not None


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
