"""Find other stations on the links of this host that have given addresses.

In: addresses. Out: the MAC address of the station that answers for each of them, by ARP or neighbor
discovery of the kernel, which needs no further rights. An address that is local to this host is
asked for too: another station may have it as well. Follows RFC 826, RFC 4861, and rtnetlink(7),
NTF_USE."""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.net import interfaces
from fairlead.net.routing import Routing

WAIT_S = 1.0
"""How long answers are waited for. The kernel asks again after a second."""
AT_ONCE = 64
PAUSE_S = 0.1
"""So many addresses are asked for at once, with this pause, because each is a broadcast frame."""
POINT_TO_POINT = 1
"""Networks whose prefix leaves so many bits or fewer have two hosts (RFC 3021, RFC 6164)."""


class Station(NamedTuple):
    """Another station: the interface of this host behind which it is, and its MAC address."""

    interface: str
    mac: str


async def stations_at(addresses: Collection[str]) -> Mapping[str, Station]:
    """Return the stations that answer for these addresses. Addresses that are on no link of this
    host are left out. Raise Unavailable."""
    links = interfaces.links()
    asked = sorted(set(_on_links(addresses, links)))
    if not asked:
        return {}
    with closing(Routing()) as routing:
        for at in range(0, len(asked), AT_ONCE):
            for address, name in asked[at : at + AT_ONCE]:
                routing.resolve(links[name].index, address)
            await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(WAIT_S)
        known = routing.neighbours()
    own = {each.mac for each in links.values()}
    found = {}
    for address, name in asked:
        neighbour = known.get((links[name].index, address))
        if neighbour and neighbour.mac and (mac := neighbour.mac.hex(":")) not in own:
            found[address] = Station(name, mac)
    return found


def _on_links(
    addresses: Collection[str], links: Mapping[str, interfaces.Link]
) -> Iterator[tuple[str, str]]:
    """Yield each address with each interface on whose link it is."""
    networks = [
        each
        for each in interfaces.networks()
        if each.network.max_prefixlen - each.network.prefixlen > POINT_TO_POINT
        and (link := links.get(each.interface)) is not None
        and link.mac
        and link.carrier
    ]
    for address in addresses:
        value = ip_address(address)
        for each in networks:
            if value in each.network:
                yield address, each.interface
