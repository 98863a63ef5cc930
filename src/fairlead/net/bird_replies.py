"""Replies of BIRD, the routing daemon, as values. Pure.

In: the lines of a reply, each with its code. Out: `Protocol`, `BfdSession` and `Route` values. BIRD
2 and BIRD 3 print different details, in a different order and under different names: what is not
known is skipped. Follows doc/reply_codes of BIRD, and the replies of BIRD 2.0.12 and 3.1.8."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

_PROTOCOL, _DETAIL, _BFD = 1002, 1006, 1020
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_ROUTE = re.compile(r"(\S+/\d+)?\s+(\w+) .*?\[(\S+) [^\]]*\]( \*)?")
"""A route: its prefix, which is missing if it is that of the route before; the kind of its
destination; its protocol; whether it is the best one."""
_VIA = re.compile(r"\tvia (\S+) on (\S+)")
_NAMES = {"as_path": "path"}
"""Names of attributes of BIRD 2 that are called otherwise in BIRD 3."""


class Line(NamedTuple):
    """A line of a reply. A line that continues another one has its code."""

    code: int
    text: str


class Channel(msgspec.Struct, frozen=True):
    """The part of a protocol that carries the routes of one family. `name`: `ipv4` or `ipv6`."""

    name: str
    state: str = ""
    imported: int = 0
    exported: int = 0


class Protocol(msgspec.Struct, frozen=True):
    """A protocol of BIRD, such as one BGP session. `since`: when the state has changed last, as
    BIRD prints it. The fields after `info` are empty for other protocols than BGP."""

    name: str
    kind: str
    state: str
    since: str
    info: str
    bgp_state: str = ""
    neighbor: str = ""
    neighbor_asn: int = 0
    last_error: str = ""
    channels: tuple[Channel, ...] = ()

    @property
    def established(self) -> bool:
        """Whether this is a BGP session that exchanges routes."""
        return self.bgp_state == "Established"


class BfdSession(msgspec.Struct, frozen=True):
    """A BFD session. `state`: Up, Down, Init or AdminDown."""

    address: str
    interface: str
    state: str


class Route(msgspec.Struct, frozen=True):
    """A route in a table. `kind`: `unicast`, `blackhole` and others. `next_hops`: address and
    interface. `attributes`: values as text by their names in BIRD 3, in lower case and without
    `bgp_`."""

    prefix: str
    kind: str
    protocol: str
    best: bool
    next_hops: tuple[tuple[str, str], ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()


def protocols_of(reply: Sequence[Line]) -> tuple[Protocol, ...]:
    """Return the protocols in a reply to `show protocols all`."""
    found: list[Protocol] = []
    for code, text in reply:
        if code == _PROTOCOL and (row := _protocol(text)) is not None:
            found.append(row)
        elif code == _DETAIL and found:
            found[-1] = _with_detail(found[-1], text.strip())
    return tuple(found)


def _protocol(row: str) -> Protocol | None:
    """Return the protocol of a row: name, kind, table, state, since (one or two words), info."""
    words = row.split()
    if len(words) < 5 or words[:2] == ["Name", "Proto"]:
        return None
    name, kind, _, state, *rest = words
    length = 2 if len(rest) > 1 and _DATE.fullmatch(rest[0]) else 1
    return Protocol(name, kind, state, " ".join(rest[:length]), " ".join(rest[length:]))


def _with_detail(protocol: Protocol, text: str) -> Protocol:
    field, _, value = text.partition(":")
    value = value.strip()
    match field:
        case _ if text.startswith("Channel "):
            channel = Channel(text.split()[1])
            return msgspec.structs.replace(protocol, channels=(*protocol.channels, channel))
        case _ if protocol.channels:
            *before, last = protocol.channels
            channel = _with_channel_detail(last, field, value)
            return msgspec.structs.replace(protocol, channels=(*before, channel))
        case "BGP state":
            return msgspec.structs.replace(protocol, bgp_state=value)
        case "Neighbor address":
            return msgspec.structs.replace(protocol, neighbor=value)
        case "Neighbor AS" if value.isdecimal():
            return msgspec.structs.replace(protocol, neighbor_asn=int(value))
        case "Last error":
            return msgspec.structs.replace(protocol, last_error=value)
    return protocol


def _with_channel_detail(channel: Channel, field: str, value: str) -> Channel:
    if field == "State":
        return msgspec.structs.replace(channel, state=value)
    if field == "Routes":
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", value)}
        return msgspec.structs.replace(
            channel, imported=counts.get("imported", 0), exported=counts.get("exported", 0)
        )
    return channel


def bfd_sessions_of(reply: Sequence[Line]) -> tuple[BfdSession, ...]:
    """Return the sessions in a reply to `show bfd sessions`."""
    rows = (text.split() for code, text in reply if code == _BFD)
    return tuple(
        BfdSession(words[0], words[1], words[2])
        for words in rows
        if len(words) >= 5 and words[0] != "IP"
    )


def routes_of(reply: Sequence[Line]) -> tuple[Route, ...]:
    """Return the routes in a reply to `show route all`, in its order."""
    return tuple(_routes(reply))


def _routes(reply: Sequence[Line]) -> Iterator[Route]:
    route: Route | None = None
    for _, text in reply:
        if found := _ROUTE.match(text):
            if route is not None:
                yield route
            prefix = found[1] or (route.prefix if route is not None else "")
            route = Route(prefix, found[2], found[3], found[4] is not None)
        elif route is None:
            continue
        elif via := _VIA.match(text):
            hop = (via[1], via[2])
            route = msgspec.structs.replace(route, next_hops=(*route.next_hops, hop))
        elif text.startswith("\t") and ":" in text:
            name, _, value = text.strip().partition(":")
            name = name.lower().removeprefix("bgp.").removeprefix("bgp_").replace("kernel.", "krt_")
            pair = (_NAMES.get(name, name), value.strip())
            route = msgspec.structs.replace(route, attributes=(*route.attributes, pair))
    if route is not None:
        yield route
