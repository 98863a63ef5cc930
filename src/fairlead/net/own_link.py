"""TCP connections that pass no router.

In: a socket. Out: the same socket, which sends packets with the highest hop limit and accepts only
such packets. Every router decrements the hop limit, also the host of a pod for the packets of the
pod, so a packet that arrives with the highest hop limit was sent by a host on the same link.
Follows RFC 5082 (GTSM) and ip(7), ipv6(7)."""

import socket

_MOST = 255
_IP_MINTTL, _IPV6_MINHOPCOUNT = 21, 73
"""Options of Linux (include/uapi/linux/{in,in6}.h) that Python does not name."""


def only_own_link(each: socket.socket) -> None:
    """Restrict the socket before it listens or connects. A packet with a lower hop limit is dropped
    without an answer. A socket for IPv6 may serve IPv4 as well."""
    if each.family == socket.AF_INET6:
        each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, _MOST)
        each.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, _MOST)
    each.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, _MOST)
    each.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, _MOST)
