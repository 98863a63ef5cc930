"""Has a floating IP lead to a load balancer.

In: an AttachFloatingIp, as `floating` has found it necessary. Out: it is carried out: the load
balancer has a floating IP as wished. Invariant: a floating IP that leads elsewhere is left alone,
even if it was moved a moment ago: each is written to only in the state in which it was seen. None
is given up before it is clear that the one that is to come instead can be had."""

import fnmatch
import re

from fairlead.drivers.octavia import neutron
from fairlead.drivers.octavia.balancers import FloatingIp
from fairlead.drivers.octavia.changes import AttachFloatingIp
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.failures import NoAddressLeft
from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.neutron import Subnet
from fairlead.drivers.octavia.paths import FLOATING_IPS, path_of
from fairlead.errors import Conflict, FairleadError, Refused, Unavailable
from fairlead.model import FloatingWish


async def attach(cloud: Cloud, owner: Owner, step: AttachFloatingIp) -> None:
    """After it the load balancer has a floating IP as wished. Raises Conflict, Refused or
    Unavailable."""
    wish, mark = step.wish, owner.network_mark(step.service, kept=step.wish.keep)
    one = await _find_existing(cloud, owner, step)
    if step.instead is None:
        if one is not None:
            await _associate(cloud, one, step, mark)
        else:
            await _make(cloud, wish, {"port_id": step.port_id, "description": mark})
        return
    if one is None:
        # The one that is there is given up only when there is another.
        one = neutron.made(await _make(cloud, wish, {"description": mark}), owner)
    await cloud.write(
        "PUT", path_of(step.instead), {"floatingip": {"port_id": None}}, step.instead.revision
    )
    await _associate(cloud, one, step, mark)


async def _find_existing(cloud: Cloud, owner: Owner, step: AttachFloatingIp) -> FloatingIp | None:
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


async def _associate(cloud: Cloud, one: FloatingIp, step: AttachFloatingIp, mark: str) -> None:
    """To the load balancer; unless it has changed since it was looked at, for Neutron would take it
    from anybody."""
    body: dict[str, object] = {"port_id": step.port_id}
    if one.service == step.service:
        body["description"] = mark
    await cloud.write("PUT", path_of(one), {"floatingip": body}, one.revision)


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
        except NoAddressLeft as error:
            full = error
    raise full or Conflict("no subnet is left")


async def _subnets(cloud: Cloud, wish: FloatingWish) -> list[str]:
    """Those to try one after the other; an empty id: as Neutron sees fit."""
    if wish.subnet_id or not (wish.subnet or wish.subnet_tags):
        return [wish.subnet_id]
    known = await neutron.subnets(cloud, wish.network_id)
    chosen = [each.id for each in known if subnet_matches(each, wish)]
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


def subnet_matches(subnet: Subnet, wish: FloatingWish) -> bool:
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
