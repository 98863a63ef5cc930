"""Floating IPs of load balancers: one is had, led to the load balancer, kept or given back.

In: a BalancerSpec, the BalancerState that is to be it, floating IPs with the mark of the Service.
Out: steps; `attach` carries out those that are not one request. Pure. The mark is in the
description, which is there from the first moment, as tags are not. Invariant: what does not carry
the mark of the Service is never deleted, and taken only if the Service names or shows it and no
other Service has it."""

from collections.abc import Iterable, Sequence

import msgspec

from fairlead.drivers.octavia import bodies
from fairlead.drivers.octavia.balancers import (
    BalancerSpec,
    BalancerState,
    FloatingIp,
    family_of,
    provider_of,
)
from fairlead.drivers.octavia.changes import AttachFloatingIp, Call, Change
from fairlead.drivers.octavia.marks import COVERS, COVERS_ALL
from fairlead.drivers.octavia.paths import MONITORS, path_of
from fairlead.model import FloatingWish, ServiceKey


def steps(
    wanted: BalancerSpec, balancer: BalancerState, unattached: Sequence[FloatingIp]
) -> list[Change]:
    """For a load balancer that is otherwise as wanted."""
    key, wish = wanted.service, wanted.floating
    if wish is None:
        return [
            *(_part(key, each) for each in balancer.floating),
            *delete_unattached(key, unattached),
        ]
    current = leading(balancer, wish)
    if current is None:
        instead = balancer.floating[0] if balancer.floating else None
        # One without our mark, which led to the load balancer that was there before this one, is
        # known by that alone.
        shown = tuple(
            each
            for each in wanted.addresses
            if family_of(each) == "IPv4" and each not in balancer.own
        )
        return [
            AttachFloatingIp(key, balancer.id, balancer.port_id, wish, unattached, instead, shown)
        ]
    mine: list[Change] = []
    if _is_of_occm(current, key) or (current.service == key and current.kept != wish.keep):
        words = f"floating IP {current.address}, {'kept' if wish.keep else 'not kept'} from now on"
        body = {"floatingip": {"description": wanted.network_mark(wish.keep)}}
        mine.append(
            Call(key, "PUT", path_of(current), body, words, balancer.id, revision=current.revision)
        )
    return [*mine, *delete_unattached(key, unattached)]


def covering(wanted: BalancerSpec, balancer: BalancerState | None, covers: bool) -> BalancerSpec:
    """With the tags of monitors that are made now. Before its release of 2023 provider ovn asked
    members on behalf of those floating IPs alone that were there before the monitor (Launchpad
    1956035, 1997418): clients of others were sent to members that are dead. `covers`: it is of that
    release, or later."""
    if wanted.provider != "ovn":
        return wanted
    one = leading(balancer, wanted.floating) if balancer is not None else None
    tags = [COVERS_ALL] if covers else [COVERS + one.address] if one is not None else []
    return msgspec.structs.replace(wanted, covering=tuple(tags))


def uncovered(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    """Monitors that do not say that they cover the floating IP are made anew, once: nobody knows by
    which release they were made."""
    one = leading(balancer, wanted.floating)
    if one is None or provider_of(balancer.provider) != "ovn":
        return []
    key = wanted.service
    steps: list[Change] = []
    for pool in balancer.pools:
        monitor = pool.monitor
        if monitor is None or not {COVERS_ALL, COVERS + one.address}.isdisjoint(monitor.tags):
            continue
        words = f"monitor of pool {pool.name}, for floating IP {one.address}"
        tags = [*(tag for tag in monitor.tags if not tag.startswith(COVERS)), *wanted.covering]
        body = {"healthmonitor": bodies.monitor(monitor.monitor, tags) | {"pool_id": pool.id}}
        steps.append(Call(key, "DELETE", f"{MONITORS}/{monitor.id}", None, words, balancer.id))
        steps.append(Call(key, "POST", MONITORS, body, words, balancer.id))
    return steps


def _is_of_occm(one: FloatingIp, key: ServiceKey) -> bool:
    """It was made for this very Service, by who had its load balancer before."""
    return one.description.startswith(
        f"Floating IP for Kubernetes external service {key} from cluster "
    )


def leading(balancer: BalancerState, wish: FloatingWish | None) -> FloatingIp | None:
    """The floating IP that is as wished."""
    if wish is None:
        return None
    return next((each for each in balancer.floating if wish.address in ("", each.address)), None)


def delete_unattached(key: ServiceKey, unattached: Iterable[FloatingIp]) -> list[Change]:
    """Those with our mark that nobody needs, but for those that are kept: it may have been another
    Service of this name that wished so, and an address that is gone is not had again."""
    return [_delete(key, each) for each in unattached if each.service == key and not each.kept]


def detach_all(key: ServiceKey, balancer: BalancerState) -> list[Change]:
    """For a load balancer that goes: what is kept, and what is not ours, must not lead to its port,
    which may be somebody's."""
    return [_part(key, each) for each in balancer.floating]


def _part(key: ServiceKey, one: FloatingIp) -> Call:
    if one.service == key and not one.kept:
        return _delete(key, one)
    words = f"floating IP {one.address} from now on leads nowhere"
    return Call(
        key, "PUT", path_of(one), {"floatingip": {"port_id": None}}, words, revision=one.revision
    )


def _delete(key: ServiceKey, one: FloatingIp) -> Call:
    return Call(
        key, "DELETE", path_of(one), None, f"floating IP {one.address}", revision=one.revision
    )
