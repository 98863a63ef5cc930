"""The addresses that this host needs in order to reach others: its own, and those of its next hops.

In: destinations that the host must reach. Out: addresses. An address with a prefix as long as
itself (/32, /128), such as a load balancer's address that keepalived adds, is one of the host's own
only if the host sends from it. Link-local and loopback addresses are left out, because no other
host can use them. Follows rtnetlink(7), Linux include/uapi/linux/rtnetlink.h."""

import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address

from fairlead.net.netlink import DUMP, attribute, attributes
from fairlead.net.rtnetlink import RtnetlinkSocket, open_rtnetlink

_GET_ADDRESS, _GET_ROUTE = 22, 26
_ADDRESS, _ROUTE, _HOP = struct.Struct("=4BI"), struct.Struct("=8BI"), struct.Struct("=HBBi")
"""struct ifaddrmsg, rtmsg and rtnexthop."""
_ADDRESS_OTHER_END, _ADDRESS_OWN = 1, 2
_DESTINATION, _GATEWAY, _SOURCE, _HOPS, _VIA = 1, 5, 7, 9, 18
_MATCHED_ROUTE = 0x2000
"""RTM_F_FIB_MATCH: the kernel returns the matching route instead of the result of the lookup."""
_BEYOND = ("240.0.0.1", "4000::1")
"""Addresses that nobody has and that match only a default route. The whole routing table need not
be read for it: on a router it has a million entries."""
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)


def needed_addresses(destinations: Iterable[str]) -> Sequence[str]:
    """Return the next hops of this host to these destinations and to those of its default routes,
    and the addresses from which it sends; after these its other own addresses, each part sorted.
    Raise Unavailable."""
    with open_rtnetlink("reading the addresses that this host needs") as kernel:
        own = set(_own(kernel))
        on_the_way: set[bytes] = set()
        for destination in (*_BEYOND, *destinations):
            on_the_way |= set(_on_the_way(kernel, destination))
    return [
        str(each)
        for each in map(ip_address, (*sorted(on_the_way), *sorted(own - on_the_way)))
        if not (each.is_loopback or each.is_link_local or each.is_unspecified)
    ]


def _own(kernel: RtnetlinkSocket) -> Iterator[bytes]:
    """Yield the addresses by which the host is part of a network."""
    for body in kernel.exchange(_GET_ADDRESS, DUMP, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        fields = dict(attributes(body, _ADDRESS.size))
        # On a point-to-point link the first attribute is the address of the other end.
        own = fields.get(_ADDRESS_OWN) or fields.get(_ADDRESS_OTHER_END, b"")
        # Interfaces may have addresses of other families too, such as MCTP.
        if len(own) in (4, 16) and body[1] < 8 * len(own):
            yield own


def _on_the_way(kernel: RtnetlinkSocket, destination: str) -> Iterator[bytes]:
    """Yield the source address and the next hops of the route to the destination."""
    packed = ip_address(destination).packed
    family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
    for flags in (0, _MATCHED_ROUTE):
        head = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, flags)
        try:
            answers = kernel.exchange(_GET_ROUTE, 0, head + attribute(_DESTINATION, packed))
        except OSError as error:
            if error.errno not in _UNREACHABLE:
                raise
            return
        for body in answers:
            fields = dict(attributes(body, _ROUTE.size))
            if not flags and _SOURCE in fields:
                yield fields[_SOURCE]
            yield from _gateways(fields)
            yield from _gateways_of_hops(fields.get(_HOPS, b""))


def _gateways(fields: dict[int, bytes]) -> Iterator[bytes]:
    if _GATEWAY in fields:
        yield fields[_GATEWAY]
    if _VIA in fields:
        yield fields[_VIA][2:]  # after the address family


def _gateways_of_hops(data: bytes) -> Iterator[bytes]:
    """Yield the next hops of a multipath route."""
    at = 0
    while at + _HOP.size <= len(data):
        length = _HOP.unpack_from(data, at)[0]
        if length < _HOP.size:
            return
        yield from _gateways(dict(attributes(data[at : at + length], _HOP.size)))
        at += (length + 3) & ~3
