"""What an AddressGrant, the lock on an address, becomes when a Service gets or gives back ports of
it.

In: the lock as it is, what a Service is to have, how the Service stands (its version, what that
version shows). Out: the lock as it should be, or Conflict where what we know is out of date.
`drivers.grants` says what these rules add up to. Invariant: pure; no two holders ever have the same
port; the entry of a Service is never taken back to an older version."""

from collections.abc import Mapping

import msgspec

from fairlead.errors import Conflict
from fairlead.kube.crds import AddressGrantSpec, Holder
from fairlead.kube.objects import version_number
from fairlead.model import Grant, ServiceKey
from fairlead.plan.addresses import Ports


class Standing(msgspec.Struct, frozen=True):
    """One version of a Service: what it shows, by address."""

    uid: str
    version: int
    shown: Mapping[str, Ports]


def is_kept(spec: AddressGrantSpec, key: ServiceKey) -> bool:
    """Whether the address waits for a Service of this name."""
    return any(each.key == key and not each.uid for each in spec.holders)


def settled(
    spec: AddressGrantSpec, key: ServiceKey, uid: str, grant: Grant, standing: Standing | None
) -> bool:
    """Whether the lock is as it should be, so that all of the grant may be published, or is."""
    if standing is None or standing.uid != uid:
        return False
    try:
        return with_holder(spec, key, grant, standing) == spec
    except Conflict:
        return False


def surplus(spec: AddressGrantSpec, key: ServiceKey, grant: Grant) -> bool:
    """Whether the Service has ports that it is to have no more."""
    return any(each.key == key and not set(each.ports) <= set(grant.ports) for each in spec.holders)


def shows_surplus(
    spec: AddressGrantSpec, key: ServiceKey, grant: Grant, standing: Standing | None
) -> bool:
    """Whether the Service still shows some of these ports: they have to go from its status
    first."""
    shown = standing.shown.get(grant.address, frozenset()) if standing is not None else frozenset()
    return any(
        each.key == key and shown & (set(each.ports) - set(grant.ports)) for each in spec.holders
    )


def licensed(spec: AddressGrantSpec | None, key: ServiceKey, uid: str, version: str) -> Ports:
    """The ports that may be published over this version of the Service, though it does not show
    them."""
    for each in spec.holders if spec is not None else ():
        if each.key == key and each.uid == uid and each.service_version == version:
            return frozenset(each.ports)
    return frozenset()


def with_holder(
    spec: AddressGrantSpec, key: ServiceKey, grant: Grant, standing: Standing
) -> AddressGrantSpec:
    """The lock with this grant to the Service in it. What the Service had besides it keeps.

    Raises Conflict if another Service has one of the ports, or does not share the address, or if
    the lock was written for a later version of the Service than the one that we know."""
    others = [each for each in spec.holders if each.key != key]
    mine = next(
        (each for each in spec.holders if each.key == key and each.uid == standing.uid), None
    )
    _check_others(
        spec, key, grant, others, joining=mine is None and grant.address not in standing.shown
    )
    version = version_number(mine.service_version) if mine is not None else 0
    if version > standing.version:
        raise Conflict(
            f"the grant of {grant.address} was written for a later version of Service {key}"
        )
    if mine is None or not set(grant.ports) <= standing.shown.get(grant.address, frozenset()):
        version = standing.version
    ports = tuple(sorted({*grant.ports, *(mine.ports if mine is not None else ())}))
    entry = Holder(key.namespace, key.name, standing.uid, ports, str(version) if version else "")
    alone = not any(each.uid for each in others)
    if alone and grant.sharing_key:
        # Somebody of the same key has taken what was kept.
        others = [each for each in others if each.namespace != key.namespace]
    return AddressGrantSpec(
        spec.address,
        grant.pool or spec.pool,
        grant.sharing_key if alone else spec.sharing_key or grant.sharing_key,
        grant.keep or bool(others and spec.keep),
        tuple(sorted([*others, entry], key=lambda each: each.key)),
    )


def _check_others(
    spec: AddressGrantSpec, key: ServiceKey, grant: Grant, others: list[Holder], *, joining: bool
) -> None:
    for each in others:
        if taken := set(each.ports) & set(grant.ports):
            raise Conflict(
                f"{grant.address} {', '.join(sorted(taken))} is granted to Service {each.key}"
            )
        sharing = (
            grant.sharing_key
            and grant.sharing_key == spec.sharing_key
            and each.namespace == key.namespace
        )
        if joining and not sharing:
            raise Conflict(f"{grant.address} is granted to Service {each.key}")


def without_holder(
    spec: AddressGrantSpec, key: ServiceKey, leave: Grant | None, *, keep: bool, since: str = ""
) -> AddressGrantSpec:
    """The lock when the Service has only the ports of `leave` any more, or nothing. `keep`: then
    the address waits for the next Service of its name, from `since` on."""
    holders = []
    for each in spec.holders:
        if each.key != key:
            holders.append(each)
        elif leave is not None:
            ports = tuple(port for port in each.ports if port in leave.ports)
            holders.append(msgspec.structs.replace(each, ports=ports))
        elif keep:
            holders.append(Holder(key.namespace, key.name, kept_since=since))
    waits = any(not each.uid for each in holders)
    return msgspec.structs.replace(
        spec, holders=tuple(holders), keep=waits or bool(spec.keep and holders)
    )


def dated(spec: AddressGrantSpec, key: ServiceKey, since: str) -> AddressGrantSpec:
    """The lock with the time since which the address is kept for this Service."""
    kept = (
        msgspec.structs.replace(each, kept_since=since)
        if each.key == key and not each.uid
        else each
        for each in spec.holders
    )
    return msgspec.structs.replace(spec, holders=tuple(kept))


def may_be_published(standing: Standing, holder: Holder) -> bool:
    """Whether a publication by the licence of this entry could still succeed."""
    return version_number(holder.service_version) >= standing.version


def releasable(standing: Standing, holder: Holder, address: str, leave: Grant | None) -> bool:
    """Whether all but `leave` may be taken from the Service: it shows none of it, and nobody can
    publish it any more."""
    shown = standing.shown.get(address)
    gone = (
        not shown
        if leave is None
        else not (shown or frozenset()) & (set(holder.ports) - set(leave.ports))
    )
    return gone and not may_be_published(standing, holder)
