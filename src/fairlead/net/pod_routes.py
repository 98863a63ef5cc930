"""Whether this host has a route to the address of a pod that runs on it.

In: addresses. Out: those to which the host has no route but a default route, or only one that
discards. A network plugin that gives each pod a route, or that creates the pods' bridge with the
first pod, has not made such a pod yet. Where a route to all pods of the node exists always, nothing
can be told, and the address counts as routed. Follows rtnetlink(7), Linux
include/uapi/linux/rtnetlink.h."""

import errno
import socket
import struct
from collections.abc import Iterable
from ipaddress import ip_address

from fairlead.net.netlink import attribute
from fairlead.net.rtnetlink import RtnetlinkSocket, open_rtnetlink

_GET_ROUTE, _DESTINATION = 26, 1
_ROUTE = struct.Struct("=8BI")
"""struct rtmsg: family, prefix lengths, TOS, table, protocol, scope, type, flags."""
_MATCHED_ROUTE = 0x2000
"""RTM_F_FIB_MATCH: the kernel returns the matching route instead of the result of the lookup."""
_DISCARDING = (6, 7, 8)
"""RTN_BLACKHOLE, RTN_UNREACHABLE, RTN_PROHIBIT."""
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
"""The answers to a lookup that finds no route, or one that discards."""


def without_route(addresses: Iterable[str]) -> set[str]:
    """Return the addresses to which the host has no route but a default route. Raise
    Unavailable."""
    with open_rtnetlink("reading the routes to pods") as kernel:
        return {each for each in addresses if not _has_route(kernel, each)}


def _has_route(kernel: RtnetlinkSocket, address: str) -> bool:
    packed = ip_address(address).packed
    family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
    head = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, _MATCHED_ROUTE)
    try:
        answers = kernel.exchange(_GET_ROUTE, 0, head + attribute(_DESTINATION, packed))
    except OSError as error:
        if error.errno not in _UNREACHABLE:
            raise
        return False
    return all(body[1] > 0 and body[7] not in _DISCARDING for body in answers)
