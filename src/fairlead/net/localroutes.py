"""Local routes: addresses that this host accepts although no interface has them.

In: addresses. Out: the kernel's routes `local ADDRESS dev lo table local`, with a protocol number
that distinguishes them from the routes of interface addresses. Nothing announces such an address;
the host accepts the packets for it that are routed to this host. Invariant: only routes with the
given protocol number are changed. An address that the host already has is left unchanged. Follows
rtnetlink(7), ip-route(8)."""

import errno
import socket
import struct
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

from fairlead.net import interfaces
from fairlead.net.netlink import ACK, CREATE, DUMP, EXCLUSIVE, attribute, attributes
from fairlead.net.netlink_events import EventFilter, Subscription
from fairlead.net.rtnetlink import open_rtnetlink

PROTOCOL = 172
"""The routing protocol number of routes for addresses of Services (`ip route show table local proto
172`)."""
API_PROTOCOL = 173
"""The routing protocol number of the route for the address of the API server's load balancer, which
is managed separately."""
_NEW_ROUTE, _DELETE_ROUTE, _GET_ROUTE = 24, 25, 26
_ROUTE = struct.Struct("=8BI")
"""struct rtmsg: family, prefix lengths, TOS, table, protocol, scope, type, flags."""
_ROUTE_DESTINATION, _ROUTE_DEVICE = 1, 4
_GROUPS = (7, 11)
"""RTNLGRP_IPV4_ROUTE and RTNLGRP_IPV6_ROUTE."""
_PROTOCOL_AT = 5
"""The offset of the protocol number in struct rtmsg."""
_LOCAL_TABLE, _HOST_SCOPE, _LOCAL, _LOOPBACK = 255, 254, 2, struct.pack("=I", 1)


async def present(protocol: int = PROTOCOL) -> set[str]:
    """Return the addresses that have a route with this protocol number. Raise Unavailable."""
    found = set()
    with open_rtnetlink("listing local routes", strict=True) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                routes = kernel.exchange(
                    _GET_ROUTE,
                    DUMP,
                    _ROUTE.pack(family, 0, 0, 0, _LOCAL_TABLE, protocol, 0, _LOCAL, 0),
                )
            except OSError as error:
                if error.errno != errno.ENOENT:  # the namespace has no such table yet
                    raise
                continue
            for body in routes:
                fields = dict(attributes(body, _ROUTE.size))
                if (body[4], body[_PROTOCOL_AT]) == (
                    _LOCAL_TABLE,
                    protocol,
                ) and _ROUTE_DESTINATION in fields:
                    found.add(str(ip_address(fields[_ROUTE_DESTINATION])))
    return found


def removals(protocol: int = PROTOCOL) -> Subscription:
    """Return a subscription to removals of routes with this protocol number, also by this process.
    Close it after use."""
    return Subscription(
        _GROUPS, EventFilter((_DELETE_ROUTE,), at=_PROTOCOL_AT, value=protocol, only=True)
    )


async def add(addresses: Collection[str], protocol: int = PROTOCOL) -> None:
    """Add local routes for these addresses. Raise Refused without permission, otherwise
    Unavailable."""
    _change(_NEW_ROUTE, CREATE | EXCLUSIVE, addresses, errno.EEXIST, protocol)


async def delete(addresses: Collection[str], protocol: int = PROTOCOL) -> None:
    """Delete the local routes for these addresses. An address that an interface has stays local."""
    _change(_DELETE_ROUTE, 0, addresses, errno.ESRCH, protocol)


async def is_assigned(address: str) -> bool:
    """Return whether an interface of this host has the address. Raise Unavailable."""
    return ip_address(address) in assigned_addresses()


def assigned_addresses() -> set[IPv4Address | IPv6Address]:
    """Return the addresses of all interfaces of this host. Raise Unavailable."""
    with open_rtnetlink("listing addresses") as kernel:
        return {own for _, own in interfaces.interface_addresses(kernel)}


def _change(kind: int, flags: int, addresses: Collection[str], ignored: int, protocol: int) -> None:
    if not addresses:
        return
    with open_rtnetlink(f"{'adding' if kind == _NEW_ROUTE else 'deleting'} local routes") as kernel:
        for address in sorted(addresses):
            try:
                kernel.exchange(kind, flags | ACK, _route(address, protocol))
            except OSError as error:
                if error.errno != ignored:
                    raise


def _route(address: str, protocol: int) -> bytes:
    packed = ip_address(address).packed
    ipv6 = len(packed) == 16
    family, scope = (socket.AF_INET6, 0) if ipv6 else (socket.AF_INET, _HOST_SCOPE)
    head = _ROUTE.pack(family, len(packed) * 8, 0, 0, _LOCAL_TABLE, protocol, scope, _LOCAL, 0)
    return head + attribute(_ROUTE_DESTINATION, packed) + attribute(_ROUTE_DEVICE, _LOOPBACK)
