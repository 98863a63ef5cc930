"""Reads of floating IPs and external subnets at Neutron.

In: a Cloud. Out: floating IPs with this cluster's mark and other ones. Each call returns at most
1000 objects."""

from collections.abc import Iterable

import msgspec

from fairlead.drivers.octavia.answers import decode_one, get_list
from fairlead.drivers.octavia.balancers import FloatingIp
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import Owner, is_kept
from fairlead.drivers.octavia.paths import FLOATING_IPS, SUBNETS, url_of
from fairlead.kube.networks import read_address
from fairlead.model import ServiceKey


class _FloatingIp(msgspec.Struct):
    id: str
    floating_ip_address: str
    floating_network_id: str = ""
    port_id: str | None = None
    fixed_ip_address: str | None = None
    description: str | None = None
    revision_number: int = 0


class Subnet(msgspec.Struct):
    """A subnet of an external network."""

    id: str
    name: str = ""
    tags: tuple[str, ...] = ()
    ip_version: int = 4


async def all_floating(cloud: Cloud, owner: Owner) -> list[FloatingIp]:
    """Return all floating IPs of the project."""
    return _values(await get_list(cloud, FLOATING_IPS, _FloatingIp), owner)


async def floating_of(
    cloud: Cloud, owner: Owner, key: ServiceKey, ports: Iterable[str]
) -> list[FloatingIp]:
    """Return the floating IPs with the mark of the Service, and those that are attached to one of
    the ports."""
    marks = [owner.network_mark(key, kept=kept) for kept in (False, True)]
    found = await get_list(cloud, FLOATING_IPS, _FloatingIp, {"description": marks})
    if leading := sorted(ports):
        found += await get_list(cloud, FLOATING_IPS, _FloatingIp, {"port_id": leading})
    return _values({each.id: each for each in found}.values(), owner)


async def floating_at(cloud: Cloud, owner: Owner, address: str) -> FloatingIp | None:
    """Return the floating IP with this address, if the project has it."""
    found = await get_list(cloud, FLOATING_IPS, _FloatingIp, {"floating_ip_address": address})
    return next(iter(_values(found, owner)), None)


async def subnets(cloud: Cloud, network_id: str) -> list[Subnet]:
    """Return the IPv4 subnets of the network that are visible to the project."""
    return await get_list(cloud, SUBNETS, Subnet, {"network_id": network_id, "ip_version": "4"})


def made(answer: bytes, owner: Owner) -> FloatingIp:
    """Return the floating IP in the answer to its creation. Raise Unavailable if there is none: the
    floating IP may exist then, and the next read finds it by its mark."""
    return _value(decode_one(f"POST {url_of(FLOATING_IPS)}", answer, _FloatingIp), owner)


def _values(found: Iterable[_FloatingIp], owner: Owner) -> list[FloatingIp]:
    return sorted(_value(each, owner) for each in found)


def _value(one: _FloatingIp, owner: Owner) -> FloatingIp:
    description = one.description or ""
    service = owner.marked(description)
    return FloatingIp(
        id=one.id,
        address=read_address(one.floating_ip_address) or one.floating_ip_address,
        network_id=one.floating_network_id,
        port_id=one.port_id or "",
        fixed_address=one.fixed_ip_address or "",
        service=service,
        kept=service is not None and is_kept(description),
        description=description,
        revision=one.revision_number,
    )
