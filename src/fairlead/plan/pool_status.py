"""The status of an AddressPool: counts of its addresses, and the conditions Ready, Stranded,
Excluded and Scarce.

In: the pool, the ledger's counts, the addresses that were granted from the pool. Out: a
`PoolState`, which also lists the namespaces that keep addresses of the pool for deleted Services,
with the times since and until which the addresses are kept. Pure. Ready: the addresses of the pool
may be assigned. Stranded: Services hold addresses that were assigned from the pool and that it no
longer contains. They keep these addresses, and no other Service gets them. Excluded: the cluster
itself uses addresses of the pool, and no Service gets them. Scarce: few addresses are free, so that
somebody can add a range before a Service gets none. Invariant: a condition does not change
while its cause lasts. Follows the API conventions, section "Typical status properties"."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from fairlead.kube.crds import AddressPool, KeptAddresses
from fairlead.model import Family, Finding, ServiceKey, Value
from fairlead.net.address import family_of
from fairlead.plan.annotations import ADDRESSES
from fairlead.plan.keeping import KeptAddressLimits
from fairlead.plan.ledger import Ledger
from fairlead.plan.pools import FAMILIES, MAX_COUNT, Pool, Pools

READY = "Ready"
STRANDED = "Stranded"
EXCLUDED = "Excluded"
SCARCE = "Scarce"
MIN_SIZE = 10
"""Pools with fewer addresses are never scarce: they are meant to be used up."""
SCARCE_BELOW, ENOUGH_FROM = 0.1, 0.2
"""A pool becomes scarce when a smaller share of its addresses is free, and ceases to be when this
share is free again: an address that is assigned and released changes nothing each time."""
MAX_NAMES = 5
MAX_NAMESPACES = 100
"""The maximum number of namespaces in `status.kept`, as in `deploy/crds`."""


class PoolCondition(Value, frozen=True):
    """A condition of an AddressPool, without its transition time."""

    type: str
    status: Literal["True", "False"]
    reason: str
    message: str


class PoolState(Value, frozen=True):
    """The status of a pool. Counts are by family, IPv4 first. `assigned` includes addresses that
    Services got from the pool and that it no longer assigns, because it was edited or is being
    deleted; `available` does not. `in_use`: a Service holds an address of the pool, so the object
    must not be deleted yet. `kept`: by namespace."""

    assigned: tuple[int, int]
    available: tuple[int, int]
    conditions: tuple[PoolCondition, ...]
    in_use: bool
    kept_addresses: int = 0
    kept: tuple[KeptAddresses, ...] = ()


def pool_states(
    ledger: Ledger, pools: Mapping[str, AddressPool], limits: KeptAddressLimits
) -> dict[str, PoolState]:
    """Return the states of all pools, by name."""
    kept: dict[str, dict[str, list[str]]] = {}
    for name, key, since in ledger.kept():
        kept.setdefault(name, {}).setdefault(key.namespace, []).append(since)
    granted: dict[str, list[tuple[str, ServiceKey]]] = {name: [] for name in pools}
    for name, address, key in ledger.granted():
        if name in granted:
            granted[name].append((address, key))
    states = {
        name: _state(ledger, name, granted[name], was_scarce=_is_scarce(each))
        for name, each in pools.items()
    }
    return {
        name: _with_kept(state, kept[name], limits) if name in kept else state
        for name, state in states.items()
    }


def _with_kept(
    state: PoolState, kept: Mapping[str, Sequence[str]], limits: KeptAddressLimits
) -> PoolState:
    """Add the kept addresses by namespace, most addresses first. Times that are not known yet are
    omitted."""
    listed = sorted(kept, key=lambda namespace: (-len(kept[namespace]), namespace))[:MAX_NAMESPACES]
    entries = []
    for namespace in listed:
        since = min((each for each in kept[namespace] if each), default="")
        entries.append(KeptAddresses(namespace, len(kept[namespace]), since, limits.until(since)))
    return msgspec.structs.replace(
        state, kept_addresses=sum(map(len, kept.values())), kept=tuple(entries)
    )


def _is_scarce(pool: AddressPool) -> bool:
    return any(each.type == SCARCE and each.status == "True" for each in pool.status.conditions)


def _state(
    ledger: Ledger, name: str, granted: Sequence[tuple[str, ServiceKey]], *, was_scarce: bool
) -> PoolState:
    pool = ledger.pools.by_name.get(name)
    problem = ledger.pools.problems.get(name)
    if pool is not None and problem is not None:
        # The grants belong to the pool of the same name in the configuration, which takes
        # precedence over this object.
        granted = ()
    beyond = [(address, key) for address, key in granted if not _has(ledger, name, address)]
    left = [each for each in beyond if ledger.pools.excluded(each[0]) is None]
    given = [family_of(address) for address in {address for address, _ in beyond}]
    assigned = {family: given.count(family) for family in FAMILIES}
    if pool is None or problem is not None:
        return PoolState(
            _counts(assigned),
            (0, 0),
            (_ready(problem), _stranded(left), NONE_EXCLUDED, NONE_SCARCE),
            bool(granted),
        )
    available = {family: pool.size(family) - pool.assigned[family] for family in FAMILIES}
    assigned = {family: assigned[family] + pool.assigned[family] for family in FAMILIES}
    return PoolState(
        _counts(assigned),
        _counts(available),
        (
            _ready(None),
            _stranded(left),
            excluded_condition(ledger.pools, pool),
            scarce_condition(pool, scarce=was_scarce),
        ),
        bool(granted or any(assigned.values())),
    )


def _counts(counts: Mapping[Family, int]) -> tuple[int, int]:
    first, second = (max(0, min(MAX_COUNT, counts[family])) for family in FAMILIES)
    return first, second


def _has(ledger: Ledger, name: str, address: str) -> bool:
    found = ledger.pools.find(address)
    return found is not None and found[0].name == name


def _ready(problem: Finding | None) -> PoolCondition:
    if problem is None:
        return PoolCondition(READY, "True", "Used", "its addresses are assigned to Services")
    return PoolCondition(READY, "False", problem.code, str(problem))


NONE_EXCLUDED = PoolCondition(
    EXCLUDED, "False", "None", "the cluster itself uses no address of the pool"
)


def excluded_condition(pools: Pools, pool: Pool) -> PoolCondition:
    """Return the condition that names the addresses of the pool that the cluster itself uses."""
    if not (found := list(pools.of_pool(pool))):
        return NONE_EXCLUDED
    parts = [f"{span} ({use.words})" for span, use in found[:MAX_NAMES]]
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return PoolCondition(
        EXCLUDED,
        "True",
        "AddressesExcluded",
        f"no Service gets {', '.join(parts)}{more}: the cluster itself uses them; remove them from "
        "spec.addresses",
    )


NONE_SCARCE = PoolCondition(SCARCE, "False", "None", "enough of its addresses are free")


def scarce_condition(pool: Pool, *, scarce: bool) -> PoolCondition:
    """Return the condition that tells whether few addresses of the pool are free. `scarce`: whether
    it is True now."""
    share = ENOUGH_FROM if scarce else SCARCE_BELOW
    few = [
        family
        for family in FAMILIES
        if (size := pool.size(family)) >= MIN_SIZE and size - pool.assigned[family] < share * size
    ]
    if not few:
        return NONE_SCARCE
    return PoolCondition(
        SCARCE,
        "True",
        "FewAddressesFree",
        f"few {' and '.join(few)} addresses of the pool are free, and a Service that needs one may "
        "get none: add a range",
    )


def _stranded(left: Sequence[tuple[str, ServiceKey]]) -> PoolCondition:
    if not left:
        return PoolCondition(
            STRANDED, "False", "None", "every address that was assigned from it is still in it"
        )
    held = sorted(f"{address} (Service {key})" for address, key in left)
    names = ", ".join(held[:MAX_NAMES]) + (
        f" and {len(held) - MAX_NAMES} more" if len(held) > MAX_NAMES else ""
    )
    message = (
        f"{names}: assigned from this pool and no longer in it; these Services keep them, and no "
        "other Service gets them; "
        "add them to a pool again, or request other addresses for these Services by annotation "
        f"{ADDRESSES[0]}; to release an address that is kept for a deleted Service: "
        "kubectl delete addressgrant"
    )
    return PoolCondition(STRANDED, "True", "AddressesHeld", message)
