"""Errors and Findings about the addresses of Services, each with its remedy.

In: the results of `plan.ledger`. Out: a Refused for a Service that gets no address, and Findings
about an address that a Service has. Pure. Invariant: a message does not change while its cause
lasts, so that it becomes one Event."""

from collections.abc import Iterable, Mapping, Sequence

from fairlead.errors import Refused
from fairlead.kube.crds import grant_name
from fairlead.model import Family, Finding, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.addresses import AddressRequest, HeldAddress, Rival
from fairlead.plan.annotations import ADDRESSES, POOL, quoted
from fairlead.plan.exclusions import Use
from fairlead.plan.members import listed
from fairlead.plan.pools import Pools

SKIPPED = "AddressFamilySkipped"
STRANDED = "AddressStranded"
EXCLUDED = "AddressExcluded"
"""Code of a Finding about an address that a Service holds and that the cluster itself uses."""
CLAIMED = "AddressClaimed"
"""Code of a Finding about an address that a Service holds and that a Node has claimed later."""


def not_of_families(address: str) -> Refused:
    return Refused(
        f"the requested address {address} is {family_of(address)}, which is not among the "
        "Service's ipFamilies",
        fix="request an address of its families, or change spec.ipFamilies",
    )


def held(address: str, holder: ServiceKey) -> Refused:
    return Refused(
        f"the requested address {address} is held by Service {holder}",
        fix="request another address, or give both Services, in one namespace, the same annotation "
        "fairlead.io/sharing-key",
    )


def kept(address: str, owner: ServiceKey) -> Refused:
    return Refused(
        f"the requested address {address} is kept for Service {owner}",
        fix="request another address, or release this one: kubectl delete addressgrant "
        f"{grant_name(address)}",
    )


def in_no_pool(address: str, pools: Pools) -> Refused:
    names = ", ".join(pool.name for pool in pools.in_order) or "none is configured"
    return Refused(
        f"the requested address {address} is in no pool ({names})",
        fix="request another address, or add this one to a pool",
    )


def excluded(address: str, use: Use) -> Refused:
    return Refused(
        f"the requested address {address} is {use.words}: no Service can have it",
        fix="request another address",
    )


def in_another_pool(address: str, pool: str, request: AddressRequest) -> Refused:
    return Refused(
        f"the requested address {address} belongs to pool {pool}, and the Service requests pool "
        f"{request.pool}",
        fix=f"make {ADDRESSES[0]} and {POOL[0]} agree",
    )


def not_for(address: str, pool: str) -> Refused:
    return Refused(
        f"the requested address {address} belongs to pool {pool}, which is not for this Service",
        fix="request another address, or let spec.serviceAllocation of the pool select the Service "
        "and its namespace",
    )


def all_ports_taken(ports: Sequence[Rival]) -> Refused:
    return Refused(
        port_conflict(ports), fix="change the ports, or use another address or sharing key"
    )


def port_conflict(ports: Iterable[Rival]) -> str:
    """Return the message that names ports and the Services that they are served for."""
    conflicts = sorted(
        {f"{each.port} of {each.address} is served for Service {each.holder}" for each in ports}
    )
    return f"another Service of the shared address has the port: {listed(conflicts)}"


def none_free(pools: Pools, request: AddressRequest, family: Family) -> Refused:
    """Return why no pool has an address of this family for the Service: the requested pool is not
    used or does not exist; there is no pool; no pool is for this Service; or all are exhausted."""
    if (named := request.pool) and named not in pools.by_name:
        if (problem := pools.problems.get(named)) is not None:
            return Refused(
                f"pool {named} is not used: {problem}", fix=f"correct the pool or {POOL[0]}"
            )
        names = ", ".join(pool.name for pool in pools.in_order) or "none"
        return Refused(
            f"there is no pool {quoted(named)}; configured: {names}", fix=f"correct {POOL[0]}"
        )
    if not pools.in_order:
        return Refused(
            "no address pool is configured",
            fix="create an AddressPool, or add a pool to `pools` in the configuration",
        )
    allowed = [
        pool
        for pool in pools.in_order
        if (pool.name == named if named else pool.auto_assign)
        and pool.allows(request.service_labels)
    ]
    if not allowed:
        which = f"pool {named} is not" if named else "no pool with autoAssign is"
        return Refused(
            f"{which} for this Service",
            fix="request a pool that is for this Service, or change spec.serviceAllocation of a "
            "pool",
        )
    names = ", ".join(sorted(pool.name for pool in allowed))
    return Refused(
        f"no {family} address is free in {'pool' if len(allowed) == 1 else 'the pools'} {names}",
        fix="add addresses to a pool, or delete a Service; this Service then gets an address at "
        "once",
    )


def skipped(family: Family) -> Finding:
    return Finding(SKIPPED, f"no pool has a free {family} address; serving the other family only")


def stranded(
    pools: Pools, request: AddressRequest, held: Mapping[str, HeldAddress]
) -> list[Finding]:
    """Return a Finding for each address that the Service keeps, but would not get if it were
    created now: the cluster itself uses it, no pool contains it, its pool is not for the Service,
    or the Service requests another pool."""
    notes = []
    for address, mine in held.items():
        if (use := pools.exclusions.find(address, request.since)) is not None:
            notes.append(held_and_excluded(address, use, request.since))
            continue
        found = pools.find(address)
        if found is not None and found[0].allows(request.service_labels):
            if request.pool not in ("", found[0].name):
                notes.append(
                    Finding(STRANDED, _of_another_pool(address, found[0].name, request.pool))
                )
            continue
        if found is not None:
            why = f"pool {found[0].name} is no longer for this Service"
        elif mine.pool:
            why = f"its pool {mine.pool} no longer contains it"
        else:
            why = "no pool contains it"
        notes.append(
            Finding(
                STRANDED,
                f"{address} stays with this Service, but {why}",
                remedy=f"add it to a pool again, or request another address by {ADDRESSES[0]}",
            )
        )
    return notes


def _of_another_pool(address: str, pool: str, request: str) -> str:
    return (
        f"{address} belongs to pool {pool}, and the Service now requests pool {request}; an "
        "address does not change by itself: "
        f"request an address of pool {request} by {ADDRESSES[0]}, or recreate the Service"
    )


def held_and_excluded(address: str, use: Use, created: str) -> Finding:
    """Return the Finding about an address that a Service holds and that the cluster itself uses.
    Gateways leave an address to a host that takes precedence, and serve any other address as
    before. `created`: when the Service was created."""
    remedy = f"request another address by {ADDRESSES[0]}"
    if use.precedes(created):
        message = (
            f"{address} is {use.words}, which keeps it: gateways do not serve this Service there"
        )
        return Finding(EXCLUDED, message, severity="error", remedy=remedy, blocks="Ready")
    if use.host:
        return Finding(
            CLAIMED,
            f"{address} is {use.words} according to the status of the Node, but this Service had "
            "it first: gateways still serve the Service there",
            remedy=f"if the host has the address, {remedy}; if not, find out what wrote it into "
            "the status",
        )
    return Finding(EXCLUDED, f"{address} is {use.words}: both use it", remedy=remedy)
