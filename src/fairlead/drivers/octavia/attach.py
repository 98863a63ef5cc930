"""Attaches floating IPs to load balancers.

In: an AttachFloatingIp step of `floating`. Out: the load balancer has the requested floating IP.
Invariants: a floating IP that is attached elsewhere is not moved, even if it was attached a moment
ago: each write is conditional on the revision that was read. A floating IP is detached only when
its replacement is available."""

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
from fairlead.model import FloatingIpRequest


async def attach(cloud: Cloud, owner: Owner, step: AttachFloatingIp) -> None:
    """Attach the requested floating IP to the load balancer. Raise Conflict, Refused or
    Unavailable."""
    request, mark = step.request, owner.network_mark(step.service, kept=step.request.keep)
    one = await _find_existing(cloud, owner, step)
    if step.instead is None:
        if one is not None:
            await _associate(cloud, one, step, mark)
        else:
            await _make(cloud, request, {"port_id": step.port_id, "description": mark})
        return
    if one is None:
        # The present floating IP is detached only when its replacement exists.
        one = neutron.made(await _make(cloud, request, {"description": mark}), owner)
    await cloud.write(
        "PUT", path_of(step.instead), {"floatingip": {"port_id": None}}, step.instead.revision
    )
    await _associate(cloud, one, step, mark)


async def _find_existing(cloud: Cloud, owner: Owner, step: AttachFloatingIp) -> FloatingIp | None:
    """Return the existing floating IP to attach, if there is one. Raise Unavailable if the
    requested address is in use."""
    request = step.request
    if request.address:
        one = await neutron.floating_at(cloud, owner, request.address)
        if one is not None and (reason := _taken(one, step)):
            raise Unavailable(
                f"floating IP {request.address} {reason}",
                fix="detach it there, or request another address",
            )
        return one
    for address in filter(None, (request.reuse_address, *step.shown)):
        one = await neutron.floating_at(cloud, owner, address)
        if one is not None and not _taken(one, step):
            return one
    return min(
        (each for each in step.unattached_ips if each.network_id == request.network_id),
        key=lambda each: each.id,
        default=None,
    )


def _taken(one: FloatingIp, step: AttachFloatingIp) -> str:
    """Return why the floating IP cannot be used; "" if it is free for this step."""
    if one.port_id not in ("", step.port_id):
        return f"is attached to {one.fixed_address or 'another address'} (port {one.port_id})"
    if one.service not in (None, step.service):
        return f"is kept for Service {one.service}"
    return ""


async def _associate(cloud: Cloud, one: FloatingIp, step: AttachFloatingIp, mark: str) -> None:
    """Attach the floating IP to the load balancer, on condition that it has not changed since it
    was read. Without this condition Neutron would detach it from its present port."""
    body: dict[str, object] = {"port_id": step.port_id}
    if one.service == step.service:
        body["description"] = mark
    await cloud.write("PUT", path_of(one), {"floatingip": body}, one.revision)


async def _make(cloud: Cloud, request: FloatingIpRequest, fields: dict[str, object]) -> bytes:
    body = {"floating_network_id": request.network_id, **fields}
    if request.address:
        try:
            return await cloud.write(
                "POST",
                FLOATING_IPS,
                {"floatingip": body | {"floating_ip_address": request.address}},
            )
        except Refused as error:
            where = f"region {cloud.region}" if cloud.region else "its region"
            message = (
                f"there is no floating IP {request.address} in this project and {where}, and "
                f"it cannot be created: {error}"
            )
            raise Refused(
                message, fix="request a floating IP that exists, or do not request an address"
            ) from error
    chosen = await _subnets(cloud, request)
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
    raise full or Conflict("all subnets have been deleted")


async def _subnets(cloud: Cloud, request: FloatingIpRequest) -> list[str]:
    """Return the ids of the subnets to try in order. An empty id leaves the choice to Neutron."""
    if request.subnet_id or not (request.subnet or request.subnet_tags):
        return [request.subnet_id]
    known = await neutron.subnets(cloud, request.network_id)
    chosen = [each.id for each in known if subnet_matches(each, request)]
    if not chosen:
        criteria = " and ".join(
            f"{what} {text!r}"
            for what, text in (("name", request.subnet), ("tags", request.subnet_tags))
            if text
        )
        names = (
            ", ".join(sorted(each.name or each.id for each in known))
            or "no subnet that is visible to this project"
        )
        raise Refused(
            f"network {request.network_id} has no subnet with {criteria}; it has {names}",
            fix="name a subnet by its id in floating-subnet-id",
        )
    return sorted(chosen)


def subnet_matches(subnet: Subnet, request: FloatingIpRequest) -> bool:
    """Return whether the subnet matches the request, by the syntax of cloud-provider-openstack. A
    name is a shell pattern, or after `~` a regular expression. Tags are a comma-separated list of
    which one must match, or an `&`-separated list of which all must match. A leading `!` negates.
    Raise Refused if the regular expression is invalid."""
    return _is_named(subnet.name, request.subnet) and _is_tagged(
        frozenset(subnet.tags), request.subnet_tags
    )


def _is_named(name: str, pattern: str) -> bool:
    wanted = not pattern.startswith("!")
    pattern = pattern.removeprefix("!")
    if not pattern.startswith("~"):
        return not pattern or fnmatch.fnmatchcase(name, pattern) == wanted
    try:
        return bool(re.search(pattern.removeprefix("~"), name)) == wanted
    except re.error as error:
        raise Refused(
            f"floating-subnet {pattern!r} is not a valid regular expression: {error}"
        ) from None


def _is_tagged(tags: frozenset[str], wanted: str) -> bool:
    is_wanted, listed = not wanted.startswith("!"), wanted.removeprefix("!")
    if not listed:
        return True
    every = "&" in listed
    requested_tags = {each.strip() for each in re.split("[,&]", listed) if each.strip()}
    return (requested_tags <= tags if every else bool(requested_tags & tags)) == is_wanted
