"""What the kernel knows of the ways to other hosts: routes, neighbours, interfaces; asked for, and
told as they change.

In: addresses. Out: `Route`, `Neighbour` and `Interface` values; `Changes` as they happen. Nothing
is changed, but that the kernel can be asked to look for a neighbour. An object belongs to the
network namespace in which it was made. Invariant: no change is missed without being noticed: one
that the kernel could not tell counts as `others`, after which everything is to be read anew.
Follows rtnetlink(7) and Linux include/uapi/linux/{rtnetlink,if_link,neighbour}.h.

Messages are packed here and not by pyroute2 because a gateway asks for the routes to all nodes at
its start and at every audit, and hears of every neighbour: 275 us for a route there, 31 us here,
and the kernel's overruns can be seen."""

import errno
import socket
import struct
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.errors import Unavailable
from fairlead.net.hearing import Hearing, Passed
from fairlead.net.netlink import ACK, CREATE, DUMP, attribute, attributes
from fairlead.net.routes import Interface, Neighbour, Route
from fairlead.net.rtnetlink import Asking

_NEW_LINK, _GET_LINK, _NEW_ROUTE, _DELETE_ROUTE, _GET_ROUTE = 16, 18, 24, 25, 26
_NEW_NEIGHBOUR, _DELETE_NEIGHBOUR, _GET_NEIGHBOUR = 28, 29, 30
_ROUTE = struct.Struct("=8BI")
_NEIGHBOUR = struct.Struct("=BxHiHBB")
_LINK = struct.Struct("=BxHiII")
_LOCAL = 2
_NTF_USE = 0x01
_UNKNOWN = (
    0x01 | 0x20 | 0x40
)  # NUD_INCOMPLETE, NUD_FAILED, NUD_NOARP: no address that frames can be sent to
_STALE, _FAILED = 0x04, 0x20
_GROUPS = (1, 3, 5, 7, 8, 9, 11, 19, 32)
"""RTNLGRP_LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE,
NEXTHOP."""


class Changes(NamedTuple):
    """What has happened. `others`: interfaces, addresses or routes changed, or something was not
    told."""

    neighbours: tuple[Neighbour, ...]
    others: bool


class Routing:
    """Questions, which threads may put at the same time, and events. Close it.

    passing_over: changes of routes with this protocol number are none; one's own, say.
    """

    def __init__(self, *, passing_over: int = 0) -> None:
        self._asking = Asking()
        passed = (
            Passed((_NEW_ROUTE, _DELETE_ROUTE), at=5, value=passing_over) if passing_over else None
        )  # rtm_protocol
        self._hearing = Hearing(_GROUPS, passed)

    def close(self) -> None:
        """Give the sockets back. May be repeated."""
        self._asking.close()
        self._hearing.close()

    def route(self, address: str) -> Route | None:
        """How the kernel would send to the address; None: not at all."""
        packed = ip_address(address).packed
        family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
        question = _ROUTE.pack(family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0) + attribute(1, packed)
        try:
            (answer,) = self._asking.ask(_GET_ROUTE, 0, question)
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL):
                return None
            raise Unavailable(f"asking for the route to {address}: {error.strerror}") from error
        said = dict(attributes(answer, _ROUTE.size))
        via = (
            said.get(5) or said.get(18, b"")[2:]
        )  # RTA_GATEWAY, or RTA_VIA: a family and an address
        metrics = dict(attributes(said.get(8, b""), 0))
        return Route(
            answer[7] == _LOCAL,
            _number(said.get(4)),
            _text(via),
            _text(said.get(7, b"")),
            _number(metrics.get(2)),
        )

    def interfaces(self) -> dict[int, Interface]:
        """All devices, by index."""
        found = (
            _interface(each)
            for each in self._dump(_GET_LINK, _LINK.pack(0, 0, 0, 0, 0), "interfaces")
        )
        return {each.number: each for each in found}

    def neighbours(self) -> dict[tuple[int, str], Neighbour]:
        """All neighbours, of both families, by interface and address."""
        answers = self._dump(_GET_NEIGHBOUR, _NEIGHBOUR.pack(0, 0, 0, 0, 0, 0), "neighbours")
        found = (_neighbour(each) for each in answers)
        return {(each.interface, each.address): each for each in found if each}

    def look_for(self, interface: int, address: str) -> None:
        """Have the kernel find out who answers for the address, or whether the one that it knows
        still does. What it finds comes as an event."""
        packed = ip_address(address).packed
        family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
        question = _NEIGHBOUR.pack(family, 0, interface, 0, _NTF_USE, 0) + attribute(1, packed)
        try:
            self._asking.ask(_NEW_NEIGHBOUR, CREATE | ACK, question)
        except OSError as error:
            raise Unavailable(
                f"looking for neighbour {address} on interface {interface}: {error.strerror}"
            ) from error

    async def changes(self) -> Changes:
        """Wait for the next ones; all that have been told by then."""
        heard = await self._hearing.next()
        neighbours: list[Neighbour] = []
        others = heard.lost
        for kind, body in heard.events:
            if kind not in (_NEW_NEIGHBOUR, _DELETE_NEIGHBOUR):
                others = True
            elif neighbour := _neighbour(body):
                gone = kind == _DELETE_NEIGHBOUR
                neighbours.append(neighbour._replace(mac=b"", unsure=True) if gone else neighbour)
        return Changes(tuple(neighbours), others)

    def _dump(self, kind: int, question: bytes, what: str) -> list[bytes]:
        try:
            return self._asking.ask(kind, DUMP, question)
        except OSError as error:
            raise Unavailable(f"listing {what}: {error.strerror}") from error


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", "little")


def _text(packed: bytes) -> str:
    return str(ip_address(packed)) if packed else ""


def _name(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def _interface(body: bytes) -> Interface:
    _, _, index, _, _ = _LINK.unpack_from(body)
    said = dict(attributes(body, _LINK.size))
    about = dict(attributes(said.get(18, b""), 0))  # IFLA_LINKINFO
    kind = _name(about.get(1, b""))
    vlan = _number(dict(attributes(about.get(2, b""), 0)).get(1)) if kind == "vlan" else 0
    parent = _number(said.get(5)) if vlan else 0
    return Interface(
        index, _name(said.get(3, b"")), said.get(1, b""), _number(said.get(4)), kind, parent, vlan
    )


def _neighbour(body: bytes) -> Neighbour | None:
    family, _, interface, state, _, _ = _NEIGHBOUR.unpack_from(body)
    said = dict(attributes(body, _NEIGHBOUR.size))
    if family not in (socket.AF_INET, socket.AF_INET6) or 1 not in said:
        return None  # an entry of a bridge's or a tunnel's table
    mac = said.get(2, b"") if not state & _UNKNOWN else b""
    return Neighbour(
        interface, _text(said[1]), mac if len(mac) == 6 else b"", bool(state & (_STALE | _FAILED))
    )
