"""Read routes, neighbours and interfaces from the kernel, and follow their changes.

In: addresses. Out: `Route`, `Neighbour` and `Interface` values; `Changes` as they happen. Nothing
is changed, except that the kernel can be requested to resolve or forget a neighbour. An object
belongs to the network namespace in which it was created. Invariant: no change is lost unnoticed: if
the kernel drops events, `others` is set, and the caller has to read everything again. Follows
rtnetlink(7) and Linux include/uapi/linux/{rtnetlink,if_link,neighbour}.h.

Messages are encoded here and not by pyroute2, because a gateway reads the routes to all nodes at
its start and at every audit, and follows every neighbour: a route costs 275 us with pyroute2, 31 us
here. Besides, lost events can be detected."""

import errno
import socket
import struct
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.errors import Unavailable
from fairlead.net.netlink import ACK, CREATE, DUMP, attribute, attributes
from fairlead.net.netlink_events import EventFilter, Subscription
from fairlead.net.routes import Interface, Neighbour, Route
from fairlead.net.rtnetlink import RtnetlinkSocket
from fairlead.net.tc import changed_hook

_NEW_LINK, _GET_LINK, _NEW_ROUTE, _DELETE_ROUTE, _GET_ROUTE = 16, 18, 24, 25, 26
_NEW_NEIGHBOUR, _DELETE_NEIGHBOUR, _GET_NEIGHBOUR = 28, 29, 30
_ROUTE = struct.Struct("=8BI")
_NEIGHBOUR = struct.Struct("=BxHiHBB")
_LINK = struct.Struct("=BxHiII")
_LOCAL = 2
_NTF_USE = 0x01
_UNKNOWN = 0x01 | 0x20 | 0x40
"""NUD_INCOMPLETE, NUD_FAILED, NUD_NOARP: states without a hardware address to send frames to."""
_STALE, _FAILED = 0x04, 0x20
_UP, _RUNNING = 0x01, 0x40
_GROUPS = (1, 3, 4, 5, 7, 8, 9, 11, 19, 32)
"""RTNLGRP_LINK, NEIGH, TC, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE,
NEXTHOP."""


class Changes(NamedTuple):
    """Changes since the last call. `others`: interfaces, addresses or routes changed, or events
    were lost. `hooks`: the indexes of interfaces on which a qdisc or a filter changed."""

    neighbours: tuple[Neighbour, ...]
    others: bool
    hooks: frozenset[int]


class Routing:
    """Requests, which several threads may send at the same time, and events. Close it after use.

    `ignored_protocol`: a protocol number whose route changes are not reported, such as the number
    of the caller's own routes."""

    def __init__(self, *, ignored_protocol: int = 0) -> None:
        self._rtnetlink = RtnetlinkSocket()
        # The protocol is at offset 5 of struct rtmsg (rtm_protocol).
        ignored = (
            EventFilter((_NEW_ROUTE, _DELETE_ROUTE), at=5, value=ignored_protocol)
            if ignored_protocol
            else None
        )
        self._subscription = Subscription(_GROUPS, ignored)

    def close(self) -> None:
        """Close the sockets. May be called repeatedly."""
        self._rtnetlink.close()
        self._subscription.close()

    def route(self, address: str) -> Route | None:
        """Return the kernel's route to the address; None if there is none."""
        packed = ip_address(address).packed
        family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
        request = _ROUTE.pack(family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0) + attribute(1, packed)
        try:
            (answer,) = self._rtnetlink.exchange(_GET_ROUTE, 0, request)
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL):
                return None
            raise Unavailable(f"reading the route to {address}: {error.strerror}") from error
        fields = dict(attributes(answer, _ROUTE.size))
        # RTA_GATEWAY, or RTA_VIA, which holds a family and an address.
        via = fields.get(5) or fields.get(18, b"")[2:]
        metrics = dict(attributes(fields.get(8, b""), 0))
        return Route(
            answer[7] == _LOCAL,
            _number(fields.get(4)),
            _text(via),
            _text(fields.get(7, b"")),
            _number(metrics.get(2)),
        )

    def interfaces(self) -> dict[int, Interface]:
        """Return all devices, by index."""
        found = (
            _interface(each)
            for each in self._dump(_GET_LINK, _LINK.pack(0, 0, 0, 0, 0), "interfaces")
        )
        return {each.number: each for each in found}

    def neighbours(self) -> dict[tuple[int, str], Neighbour]:
        """Return all neighbours, of both families, by interface and address."""
        answers = self._dump(_GET_NEIGHBOUR, _NEIGHBOUR.pack(0, 0, 0, 0, 0, 0), "neighbours")
        found = (_neighbour(each) for each in answers)
        return {(each.interface, each.address): each for each in found if each}

    def resolve(self, interface: int, address: str) -> None:
        """Have the kernel resolve the address on the interface, or verify the entry that it has.
        The result arrives as an event."""
        packed = ip_address(address).packed
        family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
        request = _NEIGHBOUR.pack(family, 0, interface, 0, _NTF_USE, 0) + attribute(1, packed)
        try:
            self._rtnetlink.exchange(_NEW_NEIGHBOUR, CREATE | ACK, request)
        except OSError as error:
            raise Unavailable(
                f"looking for neighbour {address} on interface {interface}: {error.strerror}"
            ) from error

    def forget(self, interface: int, address: str) -> None:
        """Have the kernel forget what it knows of the address on the interface. Raise Unavailable
        if it knows nothing of it."""
        packed = ip_address(address).packed
        family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
        request = _NEIGHBOUR.pack(family, 0, interface, 0, 0, 0) + attribute(1, packed)
        try:
            self._rtnetlink.exchange(_DELETE_NEIGHBOUR, ACK, request)
        except OSError as error:
            raise Unavailable(
                f"forgetting neighbour {address} on interface {interface}: {error.strerror}"
            ) from error

    async def changes(self) -> Changes:
        """Wait for changes. Return all that have arrived."""
        received = await self._subscription.next()
        neighbours: list[Neighbour] = []
        hooks: set[int] = set()
        others = received.lost
        for kind, body in received.events:
            if (index := changed_hook(kind, body)) is not None:
                hooks.add(index)
            elif kind not in (_NEW_NEIGHBOUR, _DELETE_NEIGHBOUR):
                others = True
            elif neighbour := _neighbour(body):
                gone = kind == _DELETE_NEIGHBOUR
                neighbours.append(
                    neighbour._replace(mac=b"", unconfirmed=True) if gone else neighbour
                )
        return Changes(tuple(neighbours), others, frozenset(hooks))

    def _dump(self, kind: int, request: bytes, what: str) -> list[bytes]:
        try:
            return self._rtnetlink.exchange(kind, DUMP, request)
        except OSError as error:
            raise Unavailable(f"listing {what}: {error.strerror}") from error


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", "little")


def _text(packed: bytes) -> str:
    return str(ip_address(packed)) if packed else ""


def _name(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def _interface(body: bytes) -> Interface:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    fields = dict(attributes(body, _LINK.size))
    about = dict(attributes(fields.get(18, b""), 0))  # IFLA_LINKINFO
    kind = _name(about.get(1, b""))
    vlan = _number(dict(attributes(about.get(2, b""), 0)).get(1)) if kind == "vlan" else 0
    parent = _number(fields.get(5)) if vlan else 0
    return Interface(
        index,
        _name(fields.get(3, b"")),
        fields.get(1, b""),
        _number(fields.get(4)),
        kind,
        parent,
        vlan,
        bool(flags & _UP),
        bool(flags & _RUNNING),
    )


def _neighbour(body: bytes) -> Neighbour | None:
    family, _, interface, state, _, _ = _NEIGHBOUR.unpack_from(body)
    fields = dict(attributes(body, _NEIGHBOUR.size))
    if family not in (socket.AF_INET, socket.AF_INET6) or 1 not in fields:
        return None  # an entry of the forwarding table of a bridge or a tunnel
    mac = fields.get(2, b"") if not state & _UNKNOWN else b""
    return Neighbour(
        interface, _text(fields[1]), mac if len(mac) == 6 else b"", bool(state & (_STALE | _FAILED))
    )
