"""Find other stations on the links of this host that have given addresses.

In: addresses. Out: the MAC address of the station that answers for each of them, by ARP or neighbor
discovery of the kernel, which needs no further rights (frames of our own would need CAP_NET_RAW).
An address that is local to this host is asked for too: another station may have it as well. The
kernel keeps a limited number of neighbours, by default 1,024 in all network namespaces together,
and each question is one of them: so few are asked at once, and are forgotten before the next ones.
Follows RFC 826, RFC 4861, rtnetlink(7), NTF_USE, and Linux net/core/neighbour.c (gc_thresh3)."""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.errors import Unavailable
from fairlead.net import interfaces
from fairlead.net.routing import Routing

WAIT_S = 1.0
"""How long answers are waited for. The kernel asks again after a second."""
AT_ONCE = 64
"""So many addresses are asked for at once. Each is a broadcast frame, and a neighbour of the
kernel."""
POINT_TO_POINT = 1
"""Networks whose prefix leaves so many bits or fewer have two hosts (RFC 3021, RFC 6164)."""


class Station(NamedTuple):
    """Another station: the interface of this host behind which it is, and its MAC address."""

    interface: str
    mac: str


async def stations_at(addresses: Collection[str]) -> Mapping[str, Station]:
    """Return the stations that answer for these addresses. Addresses that are on no link of this
    host, or for which the kernel does not ask, are left out. Raise Unavailable if it asks for
    none."""
    links = interfaces.links()
    asked = sorted(set(_on_links(addresses, links)))
    own = {each.mac for each in links.values()}
    found: dict[str, Station] = {}
    refused: list[Unavailable] = []
    with closing(Routing()) as routing:
        for at in range(0, len(asked), AT_ONCE):
            names = {(links[name].index, each): name for each, name in asked[at : at + AT_ONCE]}
            answers = await _ask(routing, names, refused)
            for question, mac in answers.items():
                if mac not in own:
                    found[question[1]] = Station(names[question], mac)
    if asked and len(refused) == len(asked):
        raise refused[0]
    return found


async def _ask(
    routing: Routing, questions: Collection[tuple[int, str]], refused: list[Unavailable]
) -> Mapping[tuple[int, str], str]:
    """Return the MAC addresses that answer. `questions`: the index of an interface, and an address.
    `refused`: gets a failure for each question that the kernel does not ask, because it has as many
    neighbours as it may, or because the interface is gone."""
    before = routing.neighbours()
    asked = []
    try:
        for each in questions:
            if (entry := before.get(each)) and entry.mac and not entry.unconfirmed:
                continue  # a question would end an entry that an operator has made permanent
            try:
                routing.resolve(*each)
                asked.append(each)
            except Unavailable as error:
                refused.append(error)
        await asyncio.sleep(WAIT_S if asked else 0)
        known = routing.neighbours()
        answers = ((each, known[each].mac) for each in questions if each in known)
        return {each: mac.hex(":") for each, mac in answers if mac}
    finally:
        for each in asked:
            if each not in before:
                with suppress(Unavailable):
                    routing.forget(*each)


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
