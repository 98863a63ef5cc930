"""Floating IPs of load balancers: one is had, led to the load balancer, kept or given back.

In: a BalancerSpec, the BalancerState that is to be it, floating IPs with the mark of the Service. Out: steps
(pure), and how an `AttachFloatingIp` is carried out. The mark is in the description, which is there from the
first moment, as tags are not. Invariant: what does not carry the mark of the Service is never
deleted, and taken only if the Service names or shows it and nobody else has it; a floating IP that
leads elsewhere is left alone, be it that it was moved a moment ago: each is written to only in the
state in which it was seen. None is given up before it is clear that the one that is to come instead
can be had."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

import msgspec

from fairlead.drivers.octavia import bodies, neutron
from fairlead.drivers.octavia.balancers import (
    BalancerSpec,
    BalancerState,
    FloatingIp,
    family_of,
    provider_of,
)
from fairlead.drivers.octavia.changes import MONITORS, AttachFloatingIp, Call, Change
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.failures import Full
from fairlead.drivers.octavia.marks import COVERS, COVERS_ALL, Owner
from fairlead.drivers.octavia.neutron import FLOATING_IPS, Subnet
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.model import FloatingWish, ServiceKey


def steps(
    wanted: BalancerSpec, balancer: BalancerState, unattached: Sequence[FloatingIp]
) -> list[Change]:
    """For a load balancer that is otherwise as wanted."""
    key, wish = wanted.service, wanted.floating
    if wish is None:
        return [*(_part(key, each) for each in balancer.floating), *given_back(key, unattached)]
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
            Call(key, "PUT", _path(current), body, words, balancer.id, revision=current.revision)
        )
    return [*mine, *given_back(key, unattached)]


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


def shown(balancer: BalancerState, wish: FloatingWish | None) -> str:
    """The address that the Service shows; empty: it has none yet. On a load balancer of others:
    what that has."""
    if balancer.ownership == "guest":
        return balancer.floating[0].address if balancer.floating else balancer.address
    if wish is None:
        return balancer.address
    one = leading(balancer, wish)
    return one.address if one is not None else ""


def given_back(key: ServiceKey, unattached: Iterable[FloatingIp]) -> list[Change]:
    """Those with our mark that nobody needs, but for those that are kept: it may have been another
    Service of this name that wished so, and an address that is gone is not had again."""
    return [_delete(key, each) for each in unattached if each.service == key and not each.kept]


def parted(key: ServiceKey, balancer: BalancerState) -> list[Change]:
    """For a load balancer that goes: what is kept, and what is not ours, must not lead to its port,
    which may be somebody's."""
    return [_part(key, each) for each in balancer.floating]


def _part(key: ServiceKey, one: FloatingIp) -> Call:
    if one.service == key and not one.kept:
        return _delete(key, one)
    words = f"floating IP {one.address} from now on leads nowhere"
    return Call(
        key, "PUT", _path(one), {"floatingip": {"port_id": None}}, words, revision=one.revision
    )


def _delete(key: ServiceKey, one: FloatingIp) -> Call:
    return Call(
        key, "DELETE", _path(one), None, f"floating IP {one.address}", revision=one.revision
    )


def _path(one: FloatingIp) -> str:
    return f"{FLOATING_IPS}/{one.id}"


async def attach(cloud: Cloud, owner: Owner, step: AttachFloatingIp) -> None:
    """After it the load balancer has a floating IP as wished. Raises Conflict, Refused or
    Unavailable."""
    wish, mark = step.wish, owner.network_mark(step.service, kept=step.wish.keep)
    one = await _had(cloud, owner, step)
    if step.instead is None:
        if one is not None:
            await _lead(cloud, one, step, mark)
        else:
            await _make(cloud, wish, {"port_id": step.port_id, "description": mark})
        return
    if one is None:
        # The one that is there is given up only when there is another.
        one = neutron.made(await _make(cloud, wish, {"description": mark}), owner)
    await cloud.write(
        "PUT", _path(step.instead), {"floatingip": {"port_id": None}}, step.instead.revision
    )
    await _lead(cloud, one, step, mark)


async def _had(cloud: Cloud, owner: Owner, step: AttachFloatingIp) -> FloatingIp | None:
    """The one to take, if it is there already."""
    wish = step.wish
    if wish.address:
        one = await neutron.floating_at(cloud, owner, wish.address)
        if one is not None and (reason := _taken(one, step)):
            raise Unavailable(
                f"floating IP {wish.address} {reason}",
                fix="free it there, or ask for another address",
            )
        return one
    for address in filter(None, (wish.again, *step.shown)):
        one = await neutron.floating_at(cloud, owner, address)
        if one is not None and not _taken(one, step):
            return one
    return min(
        (each for each in step.unattached_ips if each.network_id == wish.network_id),
        key=lambda each: each.id,
        default=None,
    )


def _taken(one: FloatingIp, step: AttachFloatingIp) -> str:
    """By whom, if it cannot be had."""
    if one.port_id not in ("", step.port_id):
        return f"leads to {one.fixed_address or 'another address'} (port {one.port_id})"
    if one.service not in (None, step.service):
        return f"is kept for Service {one.service}"
    return ""


async def _lead(cloud: Cloud, one: FloatingIp, step: AttachFloatingIp, mark: str) -> None:
    """To the load balancer; unless it has changed since it was looked at, for Neutron would take it
    from anybody."""
    body: dict[str, object] = {"port_id": step.port_id}
    if one.service == step.service:
        body["description"] = mark
    await cloud.write("PUT", _path(one), {"floatingip": body}, one.revision)


async def _make(cloud: Cloud, wish: FloatingWish, fields: dict[str, object]) -> bytes:
    body = {"floating_network_id": wish.network_id, **fields}
    if wish.address:
        try:
            return await cloud.write(
                "POST", FLOATING_IPS, {"floatingip": body | {"floating_ip_address": wish.address}}
            )
        except Refused as error:
            where = f"region {cloud.region}" if cloud.region else "its region"
            message = (
                f"there is no floating IP {wish.address} in this project and {where}, and "
                f"it cannot be made: {error}"
            )
            raise Refused(message, fix="ask for one that is there, or for none by name") from error
    chosen = await _subnets(cloud, wish)
    full: FairleadError | None = None
    for subnet_id in chosen:
        try:
            return await cloud.write(
                "POST",
                FLOATING_IPS,
                {"floatingip": body | ({"subnet_id": subnet_id} if subnet_id else {})},
            )
        except Full as error:
            full = error
    raise full or Conflict("no subnet is left")


async def _subnets(cloud: Cloud, wish: FloatingWish) -> list[str]:
    """Those to try one after the other; an empty id: as Neutron sees fit."""
    if wish.subnet_id or not (wish.subnet or wish.subnet_tags):
        return [wish.subnet_id]
    known = await neutron.subnets(cloud, wish.network_id)
    chosen = [each.id for each in known if is_described(each, wish)]
    if not chosen:
        said = " and ".join(
            f"{what} {text!r}"
            for what, text in (("name", wish.subnet), ("tags", wish.subnet_tags))
            if text
        )
        names = (
            ", ".join(sorted(each.name or each.id for each in known))
            or "none that this project may see"
        )
        raise Refused(
            f"network {wish.network_id} has no subnet of {said}; it has {names}",
            fix="name one by floating-subnet-id",
        )
    return sorted(chosen)


def is_described(subnet: Subnet, wish: FloatingWish) -> bool:
    """As OCCM reads it. A name: a pattern as of files, or after `~` a regular expression. Tags: a
    list of which one is enough, after `&` all are needed. After `!` it must not be so. Raises
    Refused for what is no regular expression."""
    return _is_named(subnet.name, wish.subnet) and _is_tagged(
        frozenset(subnet.tags), wish.subnet_tags
    )


def _is_named(name: str, pattern: str) -> bool:
    wanted = not pattern.startswith("!")
    pattern = pattern.removeprefix("!")
    if not pattern.startswith("~"):
        return not pattern or fnmatch.fnmatchcase(name, pattern) == wanted
    try:
        return bool(re.search(pattern.removeprefix("~"), name)) == wanted
    except re.error as error:
        raise Refused(f"floating-subnet {pattern!r} is no regular expression: {error}") from None


def _is_tagged(tags: frozenset[str], wanted: str) -> bool:
    is_wanted, listed = not wanted.startswith("!"), wanted.removeprefix("!")
    if not listed:
        return True
    every = "&" in listed
    asked = {each.strip() for each in re.split("[,&]", listed) if each.strip()}
    return (asked <= tags if every else bool(asked & tags)) == is_wanted
