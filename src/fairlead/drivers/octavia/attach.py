"""Attaches floating IPs to load balancers.

In: an AttachFloatingIp step of `floating`. Out: the load balancer has the requested floating IP.
Invariants: a floating IP that is attached elsewhere is not moved, even if it was attached a moment
ago: each write is conditional on the revision that was read. A floating IP is detached only when
its replacement is available."""

import asyncio
import fnmatch
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection, Iterable, Sequence

import msgspec

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
from fairlead.plan.annotations import quoted

SEARCH_S = 1
SEARCH_BYTES = 256 << 20
"""The CPU time and the memory that a regular expression of a Service may take."""


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
    chosen = [each.id for each in await matching_subnets(known, request)]
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


async def matching_subnets(known: Iterable[Subnet], request: FloatingIpRequest) -> Sequence[Subnet]:
    """Return the subnets that match the request, by the syntax of cloud-provider-openstack. A name
    is a shell pattern, or after `~` a regular expression. Tags are a comma-separated list of which
    one must match, or an `&`-separated list of which all must match. A leading `!` negates. Raise
    Refused if the regular expression is invalid, or takes too long."""
    tagged = [each for each in known if _is_tagged(frozenset(each.tags), request.subnet_tags)]
    wanted, pattern = not request.subnet.startswith("!"), request.subnet.removeprefix("!")
    if not pattern:
        return tagged
    names = sorted({each.name for each in tagged})
    if pattern.startswith("~"):
        found = await _search(pattern.removeprefix("~"), names)
    else:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    return [each for each in tagged if (each.name in found) == wanted]


_SEARCH = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SEARCH_S}, {SEARCH_S}))
resource.setrlimit(resource.RLIMIT_AS, ({SEARCH_BYTES}, {SEARCH_BYTES}))
pattern, names = json.load(sys.stdin)
try:
    print(json.dumps([name for name in names if re.search(pattern, name)]))
except re.error as error:
    print(json.dumps(str(error)))
"""


async def _search(pattern: str, names: Sequence[str]) -> Collection[str]:
    """Return the names in which the regular expression matches. Any user may write it into an
    annotation, and it may take years for a short name. A match cannot be interrupted, so it is made
    in a process of its own, with limits."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _SEARCH, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    answer, _ = await process.communicate(msgspec.json.encode((pattern, names)))
    if process.returncode:
        raise Refused(
            f"the regular expression of floating-subnet {quoted(pattern)} takes too long or too "
            "much memory to match",
            fix="write a simpler expression, or name a subnet by its id in floating-subnet-id",
        )
    found: list[str] | str = msgspec.json.decode(answer, type=list[str] | str)
    if isinstance(found, str):
        raise Refused(
            f"floating-subnet {quoted(pattern)} is not a valid regular expression: {found}",
            fix="correct it, or name a subnet by its id in floating-subnet-id",
        )
    return found


def _is_tagged(tags: frozenset[str], wanted: str) -> bool:
    is_wanted, listed = not wanted.startswith("!"), wanted.removeprefix("!")
    if not listed:
        return True
    every = "&" in listed
    requested_tags = {each.strip() for each in re.split("[,&]", listed) if each.strip()}
    return (requested_tags <= tags if every else bool(requested_tags & tags)) == is_wanted
