"""Find other stations on the links of this host that have given addresses.

In: addresses. Out: the MAC addresses of the stations that answer for each of them. An address that
is local to this host is asked for too: another station may have it as well.

For IPv4 every station is found, by ARP probes. This needs CAP_NET_RAW. Without it, and for IPv6,
the kernel asks, and keeps the first answer. That suffices for IPv6: no kernel answers for an
address that only a route makes local, as those of other gateways do for IPv4. The kernel keeps a
limited number of neighbours, by default 1,024 in all network namespaces together, and each question
is one of them: so few are asked at once, and are forgotten before the next ones. Follows RFC 826,
RFC 5227, RFC 4861, rtnetlink(7), NTF_USE, and Linux net/core/neighbour.c (gc_thresh3)."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from ipaddress import ip_address
from itertools import islice
from typing import NamedTuple

from fairlead.errors import Refused, Unavailable
from fairlead.net import arp, interfaces
from fairlead.net.address import is_ipv6
from fairlead.net.packet_socket import PacketSocket
from fairlead.net.routing import Routing

WAIT_S = 1.0
"""How long answers are waited for. The kernel asks again after a second."""
AT_ONCE = 64
"""So many addresses are asked for at once. Each is a broadcast frame, and a neighbour of the
kernel."""
DRAIN_S = 0.05
"""The interval at which answers are read from sockets."""
FRAMES_AT_ONCE = 1000
"""So many frames of a socket are read in one such interval, so that a flood of replies does not
occupy the event loop. The kernel discards those for which the socket has no room."""
ANSWERS = ((20, 0), (21, arp.REPLY))
"""The operation of the frames that are received: requests, which are broadcast, are none."""
POINT_TO_POINT = 1
"""Networks whose prefix leaves so many bits or fewer have two hosts (RFC 3021, RFC 6164)."""


class Station(NamedTuple):
    """Another station: the interface of this host behind which it is, and its MAC address."""

    interface: str
    mac: str


Found = frozenset[tuple[str, Station]]
"""Stations, each with an address that it has."""
Question = tuple[str, str]
"""An address, and an interface on whose link it is."""


async def stations_at(addresses: Collection[str]) -> Found:
    """Return the stations that answer for these addresses. Addresses that are on no link of this
    host, or for which nobody can be asked now, are left out. Raise Unavailable if that holds for
    all that are on a link."""
    links = interfaces.links()
    asked = sorted(set(_on_links(addresses, links)))
    own = {each.mac for each in links.values()}
    refused: list[Unavailable] = []
    found: set[tuple[str, Station]] = set()
    by_kernel = asked
    with suppress(Refused):  # without CAP_NET_RAW
        for some in _batches([each for each in asked if not is_ipv6(each[0])]):
            found |= await _probe(some, refused)
        by_kernel = [each for each in asked if is_ipv6(each[0])]
    with closing(Routing()) as routing:
        for some in _batches(by_kernel):
            names = {(links[name].index, each): name for each, name in some}
            answers = await _ask(routing, names, refused)
            found |= {(each[1], Station(names[each], mac)) for each, mac in answers.items()}
    if asked and len(refused) == len(asked):
        raise refused[0]
    return frozenset(each for each in found if each[1].mac not in own)


def _batches(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    return (questions[at : at + AT_ONCE] for at in range(0, len(questions), AT_ONCE))


async def _probe(questions: Iterable[Question], refused: list[Unavailable]) -> Found:
    """Return all stations that answer an ARP probe. `refused`: gets a failure for each question
    that could not be asked, because the interface is down or gone. Raise Refused without
    CAP_NET_RAW."""
    asked: set[Question] = set()
    found: set[tuple[str, Station]] = set()
    with ExitStack() as opened:
        sockets: dict[str, PacketSocket] = {}
        for address, name in questions:
            try:
                if name not in sockets:
                    opening = PacketSocket(name, arp.ETHERTYPE, ANSWERS)
                    sockets[name] = opened.enter_context(opening)
                sockets[name].send(arp.probe(sockets[name].mac, address))
                asked.add((address, name))
            except Unavailable as error:
                refused.append(error)
        until_s = asyncio.get_running_loop().time() + WAIT_S
        while asked and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(DRAIN_S)
            for name, each in sockets.items():
                with suppress(Unavailable):
                    for frame in islice(iter(each.receive, None), FRAMES_AT_ONCE):
                        said = arp.parse(frame)
                        if said and (said.sender, name) in asked:
                            found.add((said.sender, Station(name, said.sender_mac.hex(":"))))
    return frozenset(found)


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
