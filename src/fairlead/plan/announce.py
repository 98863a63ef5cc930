"""Which gateway announces an address on layer 2.

In: the live gateways with the networks on their links, the Nodes, the addresses of Services. Out:
the owner of each address. The owner is chosen by rendezvous hashing (highest random weight) over
the gateways that serve its Services and have an interface in whose network it is; a gateway whose
link has only just returned, or that gives its addresses away, owns it only if there is no other. So
all gateways choose the same owner without a vote, addresses are shared equally, and when a gateway
is lost only its addresses move. The heir of an address, the next gateway in this order, observes
the owner itself (`plan.heirs`): a gateway that does not answer it owns an address only if there is
no other. Two gateways whose knowledge differs may both announce an address for a while: connections
of class fairlead.io/direct go on, because every gateway forwards every packet. Pure."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from ipaddress import ip_network
from typing import NamedTuple

from fairlead.kube.objects import EXCLUDE_LABEL, Node
from fairlead.kube.presence import Claimed, OnLink
from fairlead.model import Announcement, Finding, LoadBalancer, ServiceKey
from fairlead.net.address import family_of, is_ipv6, pack_address
from fairlead.plan.gateways import CLAIMED, Gateways
from fairlead.plan.members import excluded

NOT_ANNOUNCED = "AddressNotAnnounced"
NOT_ON_SEGMENT = "AddressNotOnSegment"
_MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")
MAX_NAMED = 5
"""Maximum number of networks that a message names."""


class Link(NamedTuple):
    """A network that is on the link of an interface: the number of an address in it (see
    `_number`), under this mask, is `first`. `mac`, `settles`: see `OnLink`. `silent`: the gateway
    that plans has observed that the interface does not answer. `leaving`: since when its gateway
    gives its addresses away; empty: it does not."""

    mask: int
    first: int
    interface: str
    settles: bool = False
    mac: str = ""
    silent: bool = False
    leaving: str = ""


SilentLinks = frozenset[tuple[str, str]]
"""Gateways that do not answer, each with the name of its interface."""
Announcers = Mapping[str, Sequence[Link]]
"""Gateways by name, with the networks on the links of their interfaces, the smallest first."""


def announcers_of(
    gateways: Gateways, nodes: Mapping[str, Node], silent: SilentLinks = frozenset()
) -> Announcers:
    """Return the gateways that may own addresses: the live ones that forward, except those on a
    Node that must get no traffic from outside. If no gateway forwards for the Services of all
    classes, those that fail the Services of one class only own them; if there are none either, all
    keep their addresses. `silent`: what does not answer the gateway that plans."""
    admitted = {
        name: _links_of(
            links,
            frozenset(link for gateway, link in silent if gateway == name),
            gateways.leaving.get(name, ""),
        )
        for name, links in gateways.announcers.items()
        if name not in nodes or not excluded(nodes[name])
    }
    forwarding = gateways.forwarding
    partly = gateways.alive.intersection(gateways.problem_classes)
    for chosen in (forwarding, partly):
        if found := {name: links for name, links in admitted.items() if name in chosen}:
            return found
    return admitted


def owner_of(address: str, announcers: Announcers) -> Announcement | None:
    """Return the gateway that announces this address, its interface and its heir; None: no gateway
    can do so."""
    number, encoded = _number(address), address.encode()
    able = {
        name: link
        for name, links in announcers.items()
        if (link := _link_at(number, links)) is not None
    }
    if not able:
        return None
    ranks = sorted(
        able,
        key=lambda name: (*_rank(able[name]), _weight(encoded, name), name),
        reverse=True,
    )
    answering = [name for name in ranks if not able[name].silent] or ranks
    owner, heir = answering[0], answering[1] if len(answering) > 1 else ""
    lost = ranks[0] if ranks[0] != owner else ""
    return Announcement(address, owner, able[owner].interface, heir, lost)


def moved(addresses: Iterable[str], before: Announcers | None, after: Announcers) -> frozenset[str]:
    """Return the addresses whose owner, its interface or its heir has changed. `before`:
    None if the gateways were not known: then all addresses."""
    if before is None:
        return frozenset(addresses)
    if before == after:
        return frozenset()
    return frozenset(each for each in addresses if owner_of(each, before) != owner_of(each, after))


def announcements_of(
    balancer: LoadBalancer,
    announcers: Announcers,
    refusing: Callable[[str], Collection[str]] = lambda _: (),
) -> tuple[Announcement, ...]:
    """Return who announces the addresses at which the load balancer takes traffic. `refusing`: see
    `announcements_at`."""
    families = {each.family for each in balancer.listeners}
    addresses = [each for each in balancer.addresses if family_of(each) in families]
    return announcements_at(addresses, announcers, refusing)


def announcements_at(
    addresses: Iterable[str],
    announcers: Announcers,
    refusing: Callable[[str], Collection[str]] = lambda _: (),
) -> tuple[Announcement, ...]:
    """Return who announces these addresses. `refusing`: see `refusing_at`; these gateways own the
    address only if there are no others."""
    owners = []
    for address in addresses:
        found = None
        if refused := refusing(address):
            serving = {name: each for name, each in announcers.items() if name not in refused}
            found = owner_of(address, serving)
        owners.append(found or owner_of(address, announcers))
    return tuple(sorted(each for each in owners if each is not None))


def refusing_at(gateways: Gateways, services: Iterable[ServiceKey]) -> frozenset[str]:
    """Return the gateways that cannot serve one of these Services. `services`: all Services that
    show an address, because only one gateway can announce it."""
    return frozenset(name for key in services for name in gateways.refusals.get(key, ()))


def announce_notes(
    addresses: Iterable[str], gateways: Gateways, nodes: Mapping[str, Node]
) -> Sequence[Finding]:
    """Return why addresses of a Service are announced by no gateway, and which of them another
    station uses. Without a live gateway there is nothing to add to the Finding about that."""
    if not gateways.alive:
        return ()
    announcers = announcers_of(gateways, nodes)
    addresses = list(addresses)
    claimed = [gateways.claimed[each] for each in addresses if each in gateways.claimed]
    return [
        *(claim_note(each, gateway, gateways) for gateway, each in claimed),
        *(
            _not_announced(each, gateways, announcers)
            for each in addresses
            if owner_of(each, announcers) is None
        ),
    ]


def macs_of(gateways: Gateways) -> Mapping[str, str]:
    """Return the live gateway that has each MAC address."""
    return {each.mac: name for name, links in gateways.announcers.items() for each in links}


def claim_note(claim: Claimed, gateway: str, gateways: Gateways | None) -> Finding:
    """Return the Finding that another station uses an address that this gateway announces."""
    other = macs_of(gateways).get(claim.mac) if gateways is not None else None
    who = f"gateway {other}" if other else "a station that is no gateway"
    return Finding(
        CLAIMED,
        f"{claim.address} is announced by gateway {gateway} on {claim.interface}, and {who} also "
        f"uses it ({claim.mac})",
        "error",
        remedy="give that station another address, or exclude the address from the pool",
    )


def _not_announced(address: str, gateways: Gateways, announcers: Announcers) -> Finding:
    if announcers:
        links = sorted(
            {
                f"{each.interface} {each.network}"
                for name in announcers
                for each in gateways.announcers[name]
            }
        )
        more = f" and {len(links) - MAX_NAMED} more" if len(links) > MAX_NAMED else ""
        return Finding(
            NOT_ON_SEGMENT,
            f"no gateway announces {address}: it is in no network of their interfaces "
            f"({', '.join(links[:MAX_NAMED])}{more})",
            remedy="use an address of such a network, or route it to the gateways; if routers and "
            "clients reach it without a router, add its network to announce.l2.networks",
        )
    if gateways.announcers:
        return Finding(
            NOT_ANNOUNCED,
            f"no gateway announces {address}: all gateways are on Nodes that are leaving or have "
            f"the label {EXCLUDE_LABEL}",
            severity="error",
            remedy=f"kubectl label nodes --all {EXCLUDE_LABEL}-, or set "
            "announce.ignoreExcludeLabel to true",
            blocks="Ready",
        )
    return Finding(
        NOT_ANNOUNCED,
        f"no gateway announces {address}: no live gateway has an interface with a network on "
        "which it announces addresses",
        severity="error",
        remedy="see `fairlead status --cluster`, and check announce.l2 in the configuration of the "
        "gateways",
        blocks="Ready",
    )


def _rank(link: Link) -> tuple[bool, str, bool]:
    """Return how willing the gateway of the link is. Of gateways that all leave, the last one to do
    so keeps an address: the others may already be down."""
    return not link.leaving, link.leaving, not link.settles


def _weight(address: bytes, name: str) -> bytes:
    """Return the weight of a gateway for an address. It must be the same in every version of the
    program, because gateways of different versions choose from the same set."""
    return blake2b(b"%b|%b" % (address, name.encode()), digest_size=8).digest()


def link_at(address: str, links: tuple[OnLink, ...]) -> Link | None:
    """Return the link on which a gateway with these links announces the address."""
    return _link_at(_number(address), _links_of(links))


def _number(address: str) -> int:
    """Return the address as a number that no address of the other family has."""
    return int.from_bytes(pack_address(address)) | is_ipv6(address) << 128


def _link_at(address: int, links: Sequence[Link]) -> Link | None:
    """Return the smallest network that contains the address; of several, that of the first
    interface by name."""
    return next((each for each in links if address & each.mask == each.first), None)


@lru_cache(256)
def _links_of(
    links: tuple[OnLink, ...], silent: frozenset[str] = frozenset(), leaving: str = ""
) -> Sequence[Link]:
    """Return the networks, the smallest first. `silent`: the interfaces that do not answer.
    `leaving`: see `Link`. A text that is not a network or a MAC address is left out: any client
    with the token of a gateway can write it into a Lease."""
    found = []
    for each in links:
        try:
            network = ip_network(each.network)
        except ValueError:
            continue
        mask = (1 << 129) - (1 << network.max_prefixlen - network.prefixlen)
        first, lost = _number(str(network.network_address)), each.interface in silent
        mac = each.mac if _MAC.fullmatch(each.mac) else ""
        found.append(Link(mask, first, each.interface, each.settles, mac, lost, leaving))
    return sorted(found, key=lambda each: (-each.mask, each.interface))
