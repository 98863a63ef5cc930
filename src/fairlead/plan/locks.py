"""Changes of an AddressGrant, the lock on an address, when a Service gets or releases ports.

In: the current lock, the desired grant of a Service, the last known version of the Service and the
ports that this version shows. Out: the new lock, or Conflict if the given data is outdated.
`drivers.grants` explains the protocol that these functions implement. Invariant: pure; no two
holders ever have the same port; the version in the entry of a Service never decreases."""

from collections.abc import Mapping

import msgspec

from fairlead.errors import Conflict
from fairlead.kube.crds import AddressGrantSpec, Holder
from fairlead.kube.objects import version_number
from fairlead.model import Grant, ServiceKey
from fairlead.plan.addresses import Ports


class PublishedVersion(msgspec.Struct, frozen=True):
    """One version of a Service, and the ports that its status shows, by address."""

    uid: str
    version: int
    shown: Mapping[str, Ports]


def is_kept(spec: AddressGrantSpec, key: ServiceKey) -> bool:
    """Return whether the address is kept for a Service of this name."""
    return any(each.key == key and not each.uid for each in spec.holders)


def settled(
    spec: AddressGrantSpec,
    key: ServiceKey,
    uid: str,
    grant: Grant,
    published: PublishedVersion | None,
) -> bool:
    """Return whether the lock contains the grant, so that each of its ports may be published, or is
    published already. `published`: None if there is no Service of this name."""
    if published is None or published.uid != uid:
        return False
    try:
        return with_holder(spec, key, grant, published) == spec
    except Conflict:
        return False


def surplus(spec: AddressGrantSpec, key: ServiceKey, grant: Grant) -> bool:
    """Return whether the lock gives ports to the Service that are not in the grant: surplus
    ports."""
    return any(each.key == key and not set(each.ports) <= set(grant.ports) for each in spec.holders)


def shows_surplus(
    spec: AddressGrantSpec, key: ServiceKey, grant: Grant, published: PublishedVersion | None
) -> bool:
    """Return whether the status of the Service still shows a surplus port. Such a port must
    disappear from the status before it is released."""
    shown = (
        published.shown.get(grant.address, frozenset()) if published is not None else frozenset()
    )
    return any(
        each.key == key and shown & (set(each.ports) - set(grant.ports)) for each in spec.holders
    )


def publishable_ports(
    spec: AddressGrantSpec | None, key: ServiceKey, uid: str, version: str
) -> Ports:
    """Return the ports that a write conditional on this version of the Service may publish although
    the version does not show them yet."""
    for each in spec.holders if spec is not None else ():
        if each.key == key and each.uid == uid and each.service_version == version:
            return frozenset(each.ports)
    return frozenset()


def with_holder(
    spec: AddressGrantSpec, key: ServiceKey, grant: Grant, published: PublishedVersion
) -> AddressGrantSpec:
    """Return the lock with this grant added for the Service. The Service keeps the ports that it
    already had.

    Raise Conflict if another Service has one of the ports, or does not share the address, or if the
    lock was written for a later version of the Service than `published`."""
    others = [each for each in spec.holders if each.key != key]
    mine = next(
        (each for each in spec.holders if each.key == key and each.uid == published.uid), None
    )
    _check_others(
        spec, key, grant, others, joining=mine is None and grant.address not in published.shown
    )
    version = version_number(mine.service_version) if mine is not None else 0
    if version > published.version:
        raise Conflict(
            f"the grant of {grant.address} was written for a later version of Service {key}"
        )
    # The entry needs the current version only if the status does not show all ports yet.
    if mine is None or not set(grant.ports) <= published.shown.get(grant.address, frozenset()):
        version = published.version
    ports = tuple(sorted({*grant.ports, *(mine.ports if mine is not None else ())}))
    entry = Holder(key.namespace, key.name, published.uid, ports, str(version) if version else "")
    alone = not any(each.uid for each in others)
    if alone and grant.sharing_key:
        # All other holders are reservations. The reservations of this namespace end, because a
        # Service with the same sharing key has taken the address.
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
    """Return the lock after the Service has released all ports except the ports of `leave`; with
    None, all of them. `keep`: a Service that releases all ports keeps the address reserved for the
    next Service of its name, from the time `since` on."""
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


def with_kept_since(spec: AddressGrantSpec, key: ServiceKey, since: str) -> AddressGrantSpec:
    """Return the lock with `since` recorded as the time from which the address is kept for this
    Service."""
    kept = (
        msgspec.structs.replace(each, kept_since=since)
        if each.key == key and not each.uid
        else each
        for each in spec.holders
    )
    return msgspec.structs.replace(spec, holders=tuple(kept))


def may_be_published(published: PublishedVersion, holder: Holder) -> bool:
    """Return whether a write that is conditional on the version in this entry could still succeed:
    the Service has no later version."""
    return version_number(holder.service_version) >= published.version


def releasable(
    published: PublishedVersion, holder: Holder, address: str, leave: Grant | None
) -> bool:
    """Return whether all ports except the ports of `leave` may be taken from the Service: its
    status shows none of them, and no process can still publish one with the entry `holder`."""
    shown = published.shown.get(address)
    gone = (
        not shown
        if leave is None
        else not (shown or frozenset()) & (set(holder.ports) - set(leave.ports))
    )
    return gone and not may_be_published(published, holder)
