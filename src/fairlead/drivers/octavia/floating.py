"""Floating IPs of load balancers: allocated, attached, kept or deleted.

In: a BalancerSpec, the BalancerState that is to match it, floating IPs with the mark of the
Service. Out: steps; `attach` carries out the steps that need more than one request. Pure. The mark
is in the description, because Neutron sets the description when it creates a floating IP, and tags
only later. Invariant: a floating IP without the mark of the Service is never deleted. It is
attached only if the Service requests or shows its address, and no other Service has it."""

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
from fairlead.model import FloatingIpRequest, ServiceKey


def steps(
    wanted: BalancerSpec, balancer: BalancerState, unattached: Sequence[FloatingIp]
) -> list[Change]:
    """Return the steps for a load balancer that is otherwise as desired."""
    key, request = wanted.service, wanted.floating
    if request is None:
        return [
            *(_part(key, each) for each in balancer.floating),
            *delete_unattached(key, unattached),
        ]
    current = leading(balancer, request)
    if current is None:
        instead = balancer.floating[0] if balancer.floating else None
        # A floating IP without a mark that was attached to the previous load balancer is recognized
        # only by the address that the Service shows.
        shown = tuple(
            each
            for each in wanted.addresses
            if family_of(each) == "IPv4" and each not in balancer.own
        )
        return [
            AttachFloatingIp(
                key, balancer.id, balancer.port_id, request, unattached, instead, shown
            )
        ]
    mine: list[Change] = []
    if _is_of_occm(current, key) or (current.service == key and current.kept != request.keep):
        subject = f"mark floating IP {current.address} as {'kept' if request.keep else 'not kept'}"
        body = {"floatingip": {"description": wanted.network_mark(request.keep)}}
        mine.append(
            Call(
                key, "PUT", path_of(current), body, subject, balancer.id, revision=current.revision
            )
        )
    return [*mine, *delete_unattached(key, unattached)]


def covering(wanted: BalancerSpec, balancer: BalancerState | None, covers: bool) -> BalancerSpec:
    """Return the spec with the tags for monitors that are created now. Provider ovn before its
    release of 2023 checked members only for floating IPs that were attached before the monitor was
    created (Launchpad 1956035, 1997418): clients of other floating IPs were sent to failed members.
    `covers`: the provider has that release or a later one."""
    if wanted.provider != "ovn":
        return wanted
    one = leading(balancer, wanted.floating) if balancer is not None else None
    tags = [COVERS_ALL] if covers else [COVERS + one.address] if one is not None else []
    return msgspec.structs.replace(wanted, covering=tuple(tags))


def uncovered(wanted: BalancerSpec, balancer: BalancerState) -> list[Change]:
    """Return the steps that recreate, once, the monitors whose tags do not show that they cover the
    floating IP. The release that created a monitor cannot be read."""
    one = leading(balancer, wanted.floating)
    if one is None or provider_of(balancer.provider) != "ovn":
        return []
    key = wanted.service
    steps: list[Change] = []
    for pool in balancer.pools:
        monitor = pool.monitor
        if monitor is None or not {COVERS_ALL, COVERS + one.address}.isdisjoint(monitor.tags):
            continue
        subject = f"monitor of pool {pool.name}, for floating IP {one.address}"
        tags = [*(tag for tag in monitor.tags if not tag.startswith(COVERS)), *wanted.covering]
        body = {"healthmonitor": bodies.monitor(monitor.monitor, tags) | {"pool_id": pool.id}}
        steps.append(Call(key, "DELETE", f"{MONITORS}/{monitor.id}", None, subject, balancer.id))
        steps.append(Call(key, "POST", MONITORS, body, subject, balancer.id))
    return steps


def _is_of_occm(one: FloatingIp, key: ServiceKey) -> bool:
    """Return whether cloud-provider-openstack created the floating IP for this Service."""
    return one.description.startswith(
        f"Floating IP for Kubernetes external service {key} from cluster "
    )


def leading(balancer: BalancerState, request: FloatingIpRequest | None) -> FloatingIp | None:
    """Return the attached floating IP that satisfies the request."""
    if request is None:
        return None
    return next((each for each in balancer.floating if request.address in ("", each.address)), None)


def delete_unattached(key: ServiceKey, unattached: Iterable[FloatingIp]) -> list[Change]:
    """Return the deletions of unattached floating IPs with the Service's mark. Kept ones are not
    deleted: the request to keep may have come from another Service of this name, and a deleted
    address cannot be recovered."""
    return [_delete(key, each) for each in unattached if each.service == key and not each.kept]


def detach_all(key: ServiceKey, balancer: BalancerState) -> list[Change]:
    """Return the steps before a load balancer is deleted. Floating IPs that are kept or are not
    Fairlead's are detached, because the port may belong to a user and outlive the load balancer."""
    return [_part(key, each) for each in balancer.floating]


def _part(key: ServiceKey, one: FloatingIp) -> Call:
    if one.service == key and not one.kept:
        return _delete(key, one)
    subject = f"detach floating IP {one.address}"
    return Call(
        key, "PUT", path_of(one), {"floatingip": {"port_id": None}}, subject, revision=one.revision
    )


def _delete(key: ServiceKey, one: FloatingIp) -> Call:
    return Call(
        key, "DELETE", path_of(one), None, f"floating IP {one.address}", revision=one.revision
    )
