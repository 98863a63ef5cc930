"""Choose the interfaces on which an address is announced. Pure.

In: an address, the selectors of its pool, and the interfaces of the host. Out: the names of
interfaces, or a finding that says why there is none. Without selectors of the pool, an address is
announced on those default interfaces of the host that have an address in the same network, because
other hosts ask for it only there. A pool that names interfaces knows better: its addresses may be
on a link on which the host has no address of that network. The number of interfaces is limited, for
one address and for all together: a pattern may match the interfaces of all pods, and the kernel's
tables have room for `MAX_PLACES` places and `MAX_HOSTS` interfaces (bpf/neighbors.bpf.c)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_address
from typing import NamedTuple

from fairlead.model import Finding
from fairlead.net.selection import Present, Selection, select

NOT_ON_INTERFACE = "NotOnInterface"
MAX_INTERFACES = 32
"""The highest number of interfaces of one address, and of the default interfaces."""
MAX_PLACES, MAX_HOSTS = 65_536, 256
"""The room in the kernel: pairs of an address and an interface, and interfaces."""
_SHOWN = 10


class HostLinks(NamedTuple):
    """The interfaces of a host. `networks`: the addresses of each, with prefix lengths. `indexes`:
    of the interfaces that have a MAC address. `rewriting`: bonds that change the MAC addresses in
    ARP frames (mode balance-alb), on which nothing can be announced. `former`: what selectors chose
    before, which they keep when they choose nothing for a moment."""

    present: Sequence[Present]
    networks: Mapping[str, Sequence[IPv4Interface | IPv6Interface]]
    indexes: Mapping[str, int]
    rewriting: Collection[str] = ()
    former: Selection | None = None


class Placement(NamedTuple):
    """The interfaces on which an address is announced, and what is wrong if there is none."""

    interfaces: tuple[str, ...]
    problem: Finding | None = None


def place(
    address: str, selectors: Sequence[str], default: Collection[str], links: HostLinks
) -> Placement:
    """Return the interfaces for an address. `selectors`: of the pool. `default`: the interfaces
    where this host announces."""
    names: Collection[str] = (
        select(selectors, links.present, links.former).names if selectors else default
    )
    usable = [each for each in names if each in links.indexes and each not in links.rewriting]
    if rewriting := [each for each in names if each in links.rewriting]:
        return Placement(
            tuple(usable),
            Finding(
                NOT_ON_INTERFACE,
                f"{address} cannot be announced on {', '.join(rewriting)}: a bond in mode "
                "balance-alb changes the MAC addresses in ARP frames",
                remedy="use another mode of the bond, or other interfaces",
            ),
        )
    wanted = ip_address(address)
    fitting = [
        name
        for name in usable
        if any(_covers(each, wanted) for each in links.networks.get(name, ()))
    ]
    if selectors and len(usable) > MAX_INTERFACES:
        return Placement(
            tuple(fitting[:MAX_INTERFACES]),
            Finding(
                NOT_ON_INTERFACE,
                f"{address} is announced only on interfaces with an address in its network: the "
                f"pool selects {len(usable)} interfaces by {', '.join(selectors)}, and one address "
                f"is announced on at most {MAX_INTERFACES}",
                remedy="select fewer interfaces in the pool",
            ),
        )
    if selectors:
        if usable:
            return Placement(tuple(usable))
        return Placement(
            (),
            Finding(
                NOT_ON_INTERFACE,
                f"{address} is announced nowhere on this host: the pool selects the interfaces "
                f"{', '.join(selectors)}, and the host has none of them with a MAC address",
                evidence=f"interfaces: {_shown(links, links.networks)}",
                remedy="correct the interfaces of the pool, or limit the pool to hosts that have "
                "them",
            ),
        )
    if fitting:
        return Placement(tuple(fitting))
    return Placement(
        (),
        Finding(
            NOT_ON_INTERFACE,
            f"{address} is in no network of the interfaces where this host announces addresses, so "
            "no other host of these networks asks for it",
            evidence=f"interfaces: {_shown(links, usable)}",
            remedy="give the Service an address of one of these networks, select other interfaces "
            "in announce.l2.interfaces, or name the interfaces in the pool if the network is on "
            "their link",
        ),
    )


class Room:
    """The room that is left in the kernel's tables. `placed`: the placements that have a place.
    `default`: the interfaces where this host announces."""

    def __init__(self, placed: Iterable[Placement], default: Collection[str]) -> None:
        self._names = set(default)
        self._places = 0
        for each in placed:
            self._names.update(each.interfaces)
            self._places += len(each.interfaces)

    def take(self, address: str, placement: Placement) -> Placement:
        """Return the placement, or one that says that there is no room for the address."""
        names = self._names.union(placement.interfaces)
        places = self._places + len(placement.interfaces)
        if places <= MAX_PLACES and len(names) <= MAX_HOSTS:
            self._names, self._places = names, places
            return placement
        what = f"{MAX_HOSTS} interfaces" if len(names) > MAX_HOSTS else f"{MAX_PLACES} places"
        return Placement(
            (),
            Finding(
                NOT_ON_INTERFACE,
                f"{address} is announced nowhere on this host: the kernel's tables have room for "
                f"{what}, and other addresses use them",
                remedy="select fewer interfaces in the pools",
            ),
        )


def has_network(name: str, links: HostLinks) -> bool:
    """Return whether the interface has an address in a network on which others may ask for
    announced addresses."""
    return any(
        not each.is_link_local and each.network.prefixlen < each.max_prefixlen
        for each in links.networks.get(name, ())
    )


def _covers(own: IPv4Interface | IPv6Interface, wanted: object) -> bool:
    """Return whether the address of an interface shows that a network is on its link. A single
    address (/32, /128) does not: it may be the announced address itself."""
    return own.network.prefixlen < own.max_prefixlen and wanted in own.network


def _shown(links: HostLinks, names: Collection[str]) -> str:
    known = [
        f"{name} ({', '.join(str(each.network) for each in links.networks.get(name, ()))})"
        for name in sorted(names)
        if name in links.indexes
    ]
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more or "none"
