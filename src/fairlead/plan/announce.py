"""Which gateway announces an address on layer 2.

In: the live gateways with the networks on their links, the Nodes, the addresses of Services. Out:
the owner of each address. The owner is chosen by rendezvous hashing (highest random weight) over
the gateways that have an interface in whose network the address is. So all gateways choose the same
owner without a vote, addresses are shared equally, and when a gateway is lost only its addresses
move. Two gateways whose knowledge differs may both announce an address for a while: connections of
class fairlead.io/direct go on, because every gateway forwards every packet. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, IPv4Network, ip_network
from typing import NamedTuple

from fairlead.kube.objects import Node
from fairlead.kube.presence import OnLink
from fairlead.model import Announcement, LoadBalancer
from fairlead.net.address import family_of
from fairlead.plan.gateways import Gateways
from fairlead.plan.members import excluded


class Link(NamedTuple):
    """An IPv4 network that is on the link of an interface."""

    mask: int
    first: int
    interface: str


Announcers = Mapping[str, Sequence[Link]]
"""Gateways by name, with the networks on the links of their interfaces, the smallest first."""


def announcers_of(gateways: Gateways, nodes: Mapping[str, Node]) -> Announcers:
    """Return the gateways that may own addresses: the live ones that forward, except those on a
    Node that must get no traffic from outside. If no gateway forwards, the others keep their
    addresses."""
    admitted = {
        name: _links_of(links)
        for name, links in gateways.announcers.items()
        if name not in nodes or not excluded(nodes[name])
    }
    return {name: admitted[name] for name in admitted if name in gateways.forwarding} or admitted


def owner_of(address: str, announcers: Announcers) -> Announcement | None:
    """Return the gateway that announces this IPv4 address, and its interface; None: no gateway can
    do so."""
    number, encoded = int(IPv4Address(address)), address.encode()
    able = {
        name: interface
        for name, links in announcers.items()
        if (interface := _interface_at(number, links))
    }
    if not able:
        return None
    owner = max(able, key=lambda name: (_weight(encoded, name), name))
    return Announcement(address, owner, able[owner])


def moved(addresses: Iterable[str], before: Announcers | None, after: Announcers) -> frozenset[str]:
    """Return the addresses whose owner, or the interface of their owner, has changed. `before`:
    None if the gateways were not known: then all addresses."""
    if before is None:
        return frozenset(addresses)
    if before == after:
        return frozenset()
    return frozenset(
        each
        for each in addresses
        if family_of(each) == "IPv4" and owner_of(each, before) != owner_of(each, after)
    )


def announcements_of(balancer: LoadBalancer, announcers: Announcers) -> tuple[Announcement, ...]:
    """Return who announces the addresses at which the load balancer takes traffic. Only IPv4
    addresses are announced."""
    if all(each.family != "IPv4" for each in balancer.listeners):
        return ()
    owners = (
        owner_of(each, announcers) for each in balancer.addresses if family_of(each) == "IPv4"
    )
    return tuple(sorted(each for each in owners if each is not None))


def _weight(address: bytes, name: str) -> bytes:
    """Return the weight of a gateway for an address. It must be the same in every version of the
    program, because gateways of different versions choose from the same set."""
    return blake2b(b"%b|%b" % (address, name.encode()), digest_size=8).digest()


def _interface_at(address: int, links: Sequence[Link]) -> str:
    """Return the interface with the smallest network that contains the address; of several, the
    first by name. Empty: none."""
    for mask, first, interface in links:
        if address & mask == first:
            return interface
    return ""


@lru_cache(256)
def _links_of(links: tuple[OnLink, ...]) -> Sequence[Link]:
    """Return the IPv4 networks. A text that is not a network is left out: any client with the token
    of a gateway can write it into a Lease."""
    found = []
    for each in links:
        try:
            network = ip_network(each.network)
        except ValueError:
            continue
        if isinstance(network, IPv4Network):
            found.append(Link(int(network.netmask), int(network.network_address), each.interface))
    return sorted(found, key=lambda each: (-each.mask, each.interface))
