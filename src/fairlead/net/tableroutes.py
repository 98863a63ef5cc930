"""Kernel routes that mark addresses for a routing daemon, which announces them.

In: prefixes, with a metric each, and a routing table. Out: the kernel's routes, through the
loopback interface: a route of this kind has no effect on packets that another rule or program
handles first, and a routing daemon can redistribute it. Invariant: only routes with the given
protocol number are read or changed, whatever their table. Every operation may be repeated. An
object belongs to the network namespace in which it was created. Follows rtnetlink(7)."""

import errno
import socket
import struct
from collections.abc import Collection
from ipaddress import ip_address, ip_network
from types import TracebackType
from typing import NamedTuple, Self

from fairlead.errors import Refused, Unavailable
from fairlead.net.netlink import ACK, CREATE, DUMP, attribute, attributes
from fairlead.net.rtnetlink import RtnetlinkSocket

_NEW_ROUTE, _DELETE_ROUTE, _GET_ROUTE = 24, 25, 26
_REPLACE = 0x100
_BODY = struct.Struct("=8BI")
"""struct rtmsg: family, prefix lengths, TOS, table, protocol, scope, type, flags."""
_DESTINATION, _DEVICE, _METRIC, _TABLE = 1, 4, 6, 15
_UNICAST, _LINK_SCOPE, _LOOPBACK_INDEX = 1, 253, 1
_NUMBER = struct.Struct("=I")
DEFAULT_METRIC_V6 = 1024
"""The metric that the kernel gives to an IPv6 route without one (IP6_RT_PRIO_USER)."""


class TableRoute(NamedTuple):
    """A route to a prefix in a table. `metric`: 0 means none."""

    prefix: str
    table: int
    metric: int = 0


class TableRoutes:
    """The routes with this protocol number. Close it, or use it as a context manager."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._kernel = RtnetlinkSocket(strict=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._kernel.close()

    def routes(self) -> set[TableRoute]:
        """Return the routes of all tables. Raise Unavailable."""
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _BODY.pack(family, 0, 0, 0, 0, self._protocol, 0, 0, 0)
            try:
                answers = self._kernel.exchange(_GET_ROUTE, DUMP, request)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
                    continue  # this kernel has no IPv6
                raise Unavailable(f"listing announced routes: {error.strerror}") from error
            for body in answers:
                fields = dict(attributes(body, _BODY.size))
                if body[5] == self._protocol and _DESTINATION in fields:
                    found.add(_route_of(body[1], fields))
        return found

    def add(self, routes: Collection[TableRoute]) -> None:
        """Add the routes. Raise Refused without permission, otherwise Unavailable."""
        self._change(_NEW_ROUTE, CREATE | _REPLACE, routes, ())

    def delete(self, routes: Collection[TableRoute]) -> None:
        """Delete the routes."""
        self._change(_DELETE_ROUTE, 0, routes, (errno.ESRCH, errno.ENODEV))

    def _change(
        self, kind: int, flags: int, routes: Collection[TableRoute], ignored: tuple[int, ...]
    ) -> None:
        verb = "adding" if kind == _NEW_ROUTE else "deleting"
        for route in sorted(routes):
            try:
                self._kernel.exchange(kind, flags | ACK, self._body(route))
            except OSError as error:
                if error.errno in ignored:
                    continue
                message = (
                    f"{verb} the route to {route.prefix} in table {route.table}: {error.strerror}"
                )
                if error.errno in (errno.EPERM, errno.EACCES):
                    raise Refused(message, fix="run as root, or with CAP_NET_ADMIN") from error
                raise Unavailable(message) from error

    def _body(self, route: TableRoute) -> bytes:
        network = ip_network(route.prefix)
        family, scope = (
            (socket.AF_INET6, 0) if network.version == 6 else (socket.AF_INET, _LINK_SCOPE)
        )
        head = _BODY.pack(family, network.prefixlen, 0, 0, 0, self._protocol, scope, _UNICAST, 0)
        body = (
            head
            + attribute(_DESTINATION, network.network_address.packed)
            + attribute(_DEVICE, _NUMBER.pack(_LOOPBACK_INDEX))
            + attribute(_TABLE, _NUMBER.pack(route.table))
        )
        return body + attribute(_METRIC, _NUMBER.pack(route.metric)) if route.metric else body


def _route_of(length: int, fields: dict[int, bytes]) -> TableRoute:
    address = ip_address(fields[_DESTINATION])
    (table,) = _NUMBER.unpack(fields[_TABLE])
    (metric,) = _NUMBER.unpack(fields.get(_METRIC, bytes(4)))
    if address.version == 6 and metric == DEFAULT_METRIC_V6:
        metric = 0
    return TableRoute(f"{address}/{length}", table, metric)
