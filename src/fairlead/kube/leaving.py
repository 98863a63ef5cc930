"""Ask a gateway to give the addresses that it announces to other gateways, and wait until it has.

In: a client, the name of the gateway. Out: the request, an annotation of the gateway's Lease, which
the gateway watches like the Leases of all gateways; and what its record and those of the others say
afterwards. No port of the host is needed, and nobody can ask who may not write the Lease, and could
write the whole record. The request names the process that holds the Lease, so it ends with the
process. Invariant: the addresses have new owners when the call returns, or it says which have
not."""

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec

from fairlead.errors import Refused, Unavailable
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import ANNOUNCE_LABEL, ObjectKey
from fairlead.kube.presence import (
    LEAVE_ANNOTATION,
    SELECTOR,
    Presence,
    lease_name,
    presence_of,
)

FIELD_MANAGER = "fairlead-leave"
LOOK_S = 0.25
ANSWER_S = 15.0
"""How long the gateway may take to notice the request."""
QUIET_S = 8.0
"""When the number of addresses of the gateway has not changed for this time, the others stay."""
SHOWN_S = 3.0
"""How long the others may take to write which addresses they announce."""
AGAIN_S = 1.5
"""The new owners announce the addresses again within this time, for neighbors that asked while both
gateways answered."""


class HandOver(msgspec.Struct, frozen=True):
    """The result. `moved`: the number of addresses that the gateway announced and does not announce
    any more. `owners`: the new owner of the first of them, as far as the records name it. `kept`:
    the number of those that it still announces. `named`: the first of these."""

    moved: int
    owners: Mapping[str, str]
    kept: int
    named: tuple[str, ...]


async def leave(client: Client, namespace: str, name: str) -> HandOver:
    """Ask the gateway to give its addresses away, and wait until it has. Raise Refused if there is
    no such gateway or it announces no addresses, Unavailable if it does not answer."""
    key = ObjectKey(namespace, lease_name("gateway", name))
    lease, before = await _record(client, key, name)
    if not before.announces and not before.announced_count:
        raise Refused(
            f"gateway {name} announces no addresses on layer 2, and only these can be given away",
            fix="stop its BIRD if it announces by BGP; otherwise withdraw the routes that lead to "
            "it from the routers",
        )
    identity = lease.spec.holder_identity or ""
    await _ask(client, key, identity)

    # A new process may show the record of the one before for a moment.
    def leaves(lease: Lease, record: Presence) -> bool:
        return bool(record.leaving) and lease.spec.holder_identity == identity

    if not await _until(leaves, client, key, name, within_s=ANSWER_S):
        await _ask(client, key, "")
        raise Unavailable(
            f"gateway {name} has not noticed within {ANSWER_S:g} s that it is to leave, and keeps "
            "its addresses",
            fix="look for it with `fairlead status --cluster`: it may not run, may not reach the "
            "API server, or be of an older version. Other gateways take the addresses over when "
            "its Lease has expired",
        )
    left = await _left(client, key, name)
    if not left.announced_count:
        owners = await _owners(client, namespace, name, before)
        await asyncio.sleep(AGAIN_S)
        return HandOver(before.announced_count, owners, 0, ())
    return HandOver(
        max(0, before.announced_count - left.announced_count),
        await _owners(client, namespace, name, before),
        left.announced_count,
        tuple(each.address for each in left.announced),
    )


async def stay(client: Client, namespace: str, name: str) -> None:
    """Withdraw the request. Raise Refused if there is no such gateway, or it leaves nevertheless:
    because of the label of its Node."""
    key = ObjectKey(namespace, lease_name("gateway", name))
    await _record(client, key, name)
    await _ask(client, key, "")
    if not await _until(lambda _, record: not record.leaving, client, key, name, within_s=ANSWER_S):
        raise Refused(
            f"gateway {name} still gives its addresses away",
            fix=f"if its Node has the label, remove it: `kubectl label node {name} "
            f"{ANNOUNCE_LABEL}-`; otherwise look for the gateway with `fairlead status --cluster`",
        )


async def _record(client: Client, key: ObjectKey, name: str) -> tuple[Lease, Presence]:
    try:
        lease = await client.get(LEASES, key)
    except NotFound:
        raise Refused(
            f"no gateway {name} is known: Lease {key} does not exist",
            fix="name a gateway that `fairlead status --cluster` shows, with --node-name",
        ) from None
    record = presence_of(lease)
    if record is None:
        raise Refused(
            f"Lease {key} has no record of a gateway that can be read",
            fix="use the `fairlead` of the gateway's version",
        )
    return lease, record


async def _ask(client: Client, key: ObjectKey, identity: str) -> None:
    """Write or remove (empty) the request."""
    annotations = {LEAVE_ANNOTATION: identity} if identity else {}
    await client.apply(
        LEASES,
        key,
        {"metadata": {"annotations": annotations}},
        field_manager=FIELD_MANAGER,
        force=True,
    )


async def _until(
    holds: Callable[[Lease, Presence], bool],
    client: Client,
    key: ObjectKey,
    name: str,
    *,
    within_s: float,
) -> bool:
    until_s = time.monotonic() + within_s
    while not holds(*await _record(client, key, name)):
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True


async def _left(client: Client, key: ObjectKey, name: str) -> Presence:
    """Return the record of the gateway when it announces nothing, or what stays is known."""
    before, changed_s = -1, time.monotonic()
    while True:
        _, record = await _record(client, key, name)
        if record.announced_count != before:
            before, changed_s = record.announced_count, time.monotonic()
        if not record.announced_count or time.monotonic() - changed_s > QUIET_S:
            return record
        await asyncio.sleep(LOOK_S)


async def _owners(client: Client, namespace: str, name: str, before: Presence) -> Mapping[str, str]:
    """Return the new owners of the addresses that the gateway named before, as far as the records
    name them."""
    until_s = time.monotonic() + SHOWN_S
    wanted = {each.address for each in before.announced}
    while True:
        leases = await client.list(LEASES, namespace=namespace, label_selector=SELECTOR)
        records = [record for each in leases if (record := presence_of(each)) is not None]
        owners = {
            each.address: record.name
            for record in records
            if record.role == "gateway" and record.name != name
            for each in record.announced
            if each.address in wanted
        }
        if len(owners) == len(wanted) or time.monotonic() > until_s:
            return dict(sorted(owners.items()))
        await asyncio.sleep(LOOK_S)
