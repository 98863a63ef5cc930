"""What users are told about their addresses: why there is none, and what is the matter with one
that they have.

In: what `plan.ledger` found. Out: Refused and Findings, each with its remedy. Pure.
Invariant: a sentence is the same as long as the matter is, so that it becomes one Event.
"""

from collections.abc import Iterable, Mapping, Sequence

from fairlead.errors import Refused
from fairlead.kube.crds import grant_name
from fairlead.model import Family, Finding, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.addresses import Rival, Taken, Wanted
from fairlead.plan.annotations import ADDRESSES, POOL
from fairlead.plan.pools import Pools

SKIPPED = "AddressFamilySkipped"
STRANDED = "AddressStranded"


def not_of_families(address: str) -> Refused:
    return Refused(
        f"the requested address {address} is {family_of(address)}, which is not among the "
        "Service's ipFamilies",
        fix="ask for an address of its families or change spec.ipFamilies",
    )


def held(address: str, holder: ServiceKey) -> Refused:
    return Refused(
        f"the requested address {address} is held by Service {holder}",
        fix="ask for another one, or give both Services, in one namespace, the same annotation "
        "fairlead.io/sharing-key",
    )


def kept(address: str, owner: ServiceKey) -> Refused:
    return Refused(
        f"the requested address {address} is kept for Service {owner}",
        fix="ask for another one, or release it: kubectl delete addressgrant "
        f"{grant_name(address)}",
    )


def in_no_pool(address: str, pools: Pools) -> Refused:
    names = ", ".join(pool.name for pool in pools.in_order) or "none is configured"
    return Refused(
        f"the requested address {address} is in no pool ({names})",
        fix="ask for another one or add it to a pool",
    )


def in_another_pool(address: str, pool: str, wanted: Wanted) -> Refused:
    return Refused(
        f"the requested address {address} is of pool {pool}, and the Service asks for pool "
        f"{wanted.pool}",
        fix=f"make {ADDRESSES[0]} and {POOL[0]} agree",
    )


def not_for(address: str, pool: str) -> Refused:
    return Refused(
        f"the requested address {address} is of pool {pool}, which is not for this Service",
        fix="ask for another one, or let spec.serviceAllocation of the pool select the Service "
        "and its namespace",
    )


def all_ports_taken(ports: Sequence[Rival]) -> Refused:
    return Refused(
        port_conflict(ports), fix="change the ports, or take another address or sharing key"
    )


def port_conflict(ports: Iterable[Rival]) -> str:
    """Which ports are not served and who has them."""
    told = sorted(
        {f"{each.port} of {each.address} is served for Service {each.holder}" for each in ports}
    )
    return f"another Service of the shared address has the port: {', '.join(told)}"


def none_free(pools: Pools, wanted: Wanted, family: Family) -> Refused:
    """Why no pool could give an address."""
    if (named := wanted.pool) and named not in pools.by_name:
        if (problem := pools.problems.get(named)) is not None:
            return Refused(
                f"pool {named} is not used: {problem}", fix=f"mend the pool or {POOL[0]}"
            )
        names = ", ".join(pool.name for pool in pools.in_order) or "none"
        return Refused(f"there is no pool {named!r}; configured: {names}", fix=f"mend {POOL[0]}")
    if not pools.in_order:
        return Refused(
            "no pool of addresses is configured",
            fix="make an AddressPool, or add one to `pools` in the configuration",
        )
    allowed = [
        pool
        for pool in pools.in_order
        if (pool.name == named if named else pool.auto_assign) and pool.allows(wanted.applicant)
    ]
    if not allowed:
        which = f"pool {named} is not" if named else "no pool with autoAssign is"
        return Refused(
            f"{which} for this Service",
            fix="name a pool that is, or change spec.serviceAllocation of one",
        )
    names = ", ".join(sorted(pool.name for pool in allowed))
    return Refused(
        f"no {family} address is free in {'pool' if len(allowed) == 1 else 'the pools'} {names}",
        fix="add addresses to a pool or delete a Service; the address is then given at once",
    )


def skipped(family: Family) -> Finding:
    return Finding(SKIPPED, f"no pool has a free {family} address; serving the other family only")


def stranded(pools: Pools, wanted: Wanted, taken: Mapping[str, Taken]) -> list[Finding]:
    """Which addresses of a Service its pools would not give it any more, or not be asked for."""
    notes = []
    for address, mine in taken.items():
        found = pools.find(address)
        if found is not None and found[0].allows(wanted.applicant):
            if wanted.pool not in ("", found[0].name):
                notes.append(
                    Finding(STRANDED, _of_another_pool(address, found[0].name, wanted.pool))
                )
            continue
        if found is not None:
            why = f"pool {found[0].name} is not for this Service any more"
        elif mine.pool:
            why = f"pool {mine.pool}, which it was given from, has it no more"
        else:
            why = "no pool has it"
        notes.append(
            Finding(
                STRANDED,
                f"{address} stays with this Service, but {why}",
                remedy=f"put it back into a pool, or move the Service by {ADDRESSES[0]}",
            )
        )
    return notes


def _of_another_pool(address: str, pool: str, wanted: str) -> str:
    return (
        f"{address} is of pool {pool} and the Service now asks for pool {wanted}; an address "
        "does not change by itself: "
        f"name one of pool {wanted} by {ADDRESSES[0]}, or make the Service anew"
    )
