"""Find which instances of Fairlead's roles are alive, from the Leases that they renew.

In: a client, the namespace of the Leases. Out: one `Instance` for each Lease. Raises Refused if
reading the Leases is forbidden. Invariant: no time in a Lease is compared with a clock. An instance
is alive if it is observed to renew its Lease, and gone if it does not renew its Lease for the
Lease's duration. The call therefore returns once all instances have renewed, or after one duration
if an instance is gone. A watch without a renewal proves nothing, because it may be denied or
broken: a second list decides."""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from fairlead.errors import Refused
from fairlead.kube.answers import RefusedByServer
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import (
    COMPONENT_LABEL,
    SELECTOR,
    Announced,
    Claimed,
    NotServed,
    OnLink,
    Presence,
    presence_of,
)
from fairlead.kube.reflector import Reflector

SLACK_S = 1.0
RENEW_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
"""The format of `renewTime` (metav1.MicroTime)."""
UNREADABLE = Presence("", "", "", "")

InstanceState = Literal["leads", "stands by", "ready", "not ready", "gone"]


class AnnouncedFor(Announced, frozen=True):
    """An announced address, and the Services whose status shows it (`namespace/name`). `observe`
    does not read Services, so a caller that does fills them in."""

    services: tuple[str, ...] = ()


class Instance(msgspec.Struct, frozen=True):
    """One process.

    `seen_s_ago`: seconds since it was observed to renew its Lease; None: no renewal was observed in
    `watched_s` seconds. `renewed`: the time of its last renewal by its own clock, for people to
    read. `silent_s`: how long it has been silent, if it is gone: at least `watched_s`, and more if
    the clocks say so. They decide nothing."""

    role: str
    name: str
    state: InstanceState
    version: str
    since: str
    seen_s_ago: float | None
    watched_s: float
    silent_s: float | None
    renewed: str
    interfaces: tuple[str, ...]
    macs: tuple[str, ...]
    announces: tuple[OnLink, ...]
    announced_count: int
    announced: tuple[AnnouncedFor, ...]
    claimed: tuple[Claimed, ...]
    served: int
    not_served_count: int
    not_served: tuple[NotServed, ...]
    stale: dict[str, int]

    @property
    def alive(self) -> bool:
        return self.state != "gone"


async def observe(client: Client, namespace: str) -> list[Instance]:
    """Return the instances, sorted by role and name. Raise Refused or Unavailable."""
    leases = await _list(client, namespace)
    begun_s = time.monotonic()
    found = {ObjectKey(each.metadata.namespace, each.metadata.name): each for each in leases}
    seen_s: dict[ObjectKey, float] = {}
    reflector: Reflector[Lease] = Reflector(
        client, LEASES, namespace=namespace, label_selector=SELECTOR
    )
    wait_s = (
        max((float(each.spec.lease_duration_seconds or 1) for each in leases), default=0.0)
        + SLACK_S
    )
    try:
        async with asyncio.timeout(wait_s if leases else 0):
            async for changed in reflector.changes():
                for key, lease in changed.items():
                    if lease is None:
                        found.pop(key, None)
                    elif (
                        key not in found
                        or lease.metadata.resource_version != found[key].metadata.resource_version
                    ):
                        found[key], seen_s[key] = lease, time.monotonic()
                if found.keys() <= seen_s.keys():
                    break
    except TimeoutError:
        for lease in await _list(client, namespace):
            key = ObjectKey(lease.metadata.namespace, lease.metadata.name)
            if (
                key in found
                and lease.metadata.resource_version != found[key].metadata.resource_version
            ):
                found[key], seen_s[key] = lease, time.monotonic()
    now_s = time.monotonic()
    instances = [_instance(lease, seen_s.get(key), begun_s, now_s) for key, lease in found.items()]
    return sorted(instances, key=lambda each: (each.role, each.name))


async def _list(client: Client, namespace: str) -> Sequence[Lease]:
    try:
        return await client.list(LEASES, namespace=namespace, label_selector=SELECTOR)
    except RefusedByServer as problem:
        fix = (
            "use an account that may `list` and `watch` leases.coordination.k8s.io in "
            f"namespace {namespace}"
        )
        raise Refused(
            f"may not read the Leases of the roles: {problem.message}", fix=fix
        ) from problem


def _instance(lease: Lease, seen_s: float | None, begun_s: float, now_s: float) -> Instance:
    record = presence_of(lease) or UNREADABLE
    return Instance(
        role=record.role or lease.metadata.labels.get(COMPONENT_LABEL, "?"),
        name=record.name or lease.metadata.name,
        state=_state(record) if seen_s is not None else "gone",
        version=record.version,
        since=record.since,
        seen_s_ago=round(now_s - seen_s, 1) if seen_s is not None else None,
        watched_s=round(now_s - begun_s, 1),
        silent_s=_silent_s(lease, now_s - begun_s) if seen_s is None else None,
        renewed=lease.spec.renew_time or "",
        interfaces=record.interfaces,
        macs=record.macs,
        announces=record.announces,
        announced_count=record.announced_count,
        announced=tuple(
            AnnouncedFor(each.address, each.interface, each.since) for each in record.announced
        ),
        claimed=record.claimed,
        served=record.served,
        not_served_count=record.not_served_count,
        not_served=record.not_served,
        stale=dict(record.stale),
    )


def _silent_s(lease: Lease, watched_s: float) -> float:
    try:
        renewed = datetime.strptime(lease.spec.renew_time or "", RENEW_TIME).replace(tzinfo=UTC)
    except ValueError:
        return round(watched_s, 1)
    return round(max(watched_s, (datetime.now(UTC) - renewed).total_seconds()), 1)


def _state(record: Presence) -> InstanceState:
    if record.leads:
        return "leads"
    if not record.ready:
        return "not ready"
    return "stands by" if record.role == "controller" else "ready"
