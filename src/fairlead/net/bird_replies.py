"""Replies of BIRD, the routing daemon, as values. Pure.

In: the lines of a reply, each with its four-digit code. Out: `Protocol`, `BfdSession` and
`TableRoute` values. Unknown lines are ignored, because BIRD 2 and BIRD 3 print different details.
Follows BIRD's doc/reply_codes."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

_ROW, _DETAILS, _BFD_ROW = 1002, 1006, 1020


class Line(NamedTuple):
    """A line of a reply. A continued line has the code of the line before it."""

    code: int
    text: str


class Channel(msgspec.Struct, frozen=True):
    """The part of a protocol that carries one family of routes. `name`: `ipv4` or `ipv6`.
    `next_hop`: the next hop of exported BGP routes, which may be link-local; `::` if BIRD found
    none, in which case it announces no route of the family."""

    name: str
    state: str = ""
    exported: int = 0
    next_hop: str = ""


class Protocol(msgspec.Struct, frozen=True):
    """A protocol of BIRD, such as one BGP session. `since`: the time of the last change of state,
    as BIRD prints it. The fields from `bgp_state` on are empty for other protocols than BGP."""

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


class TableRoute(msgspec.Struct, frozen=True):
    """A route of a table. `attributes`: values as text by name, in lower case and without the
    prefix `BGP.` of BIRD 2 or `bgp_` of BIRD 3."""

    prefix: str
    protocol: str
    attributes: tuple[tuple[str, str], ...] = ()


def protocols_of(reply: Sequence[Line]) -> tuple[Protocol, ...]:
    """Return the protocols in a reply to `show protocols all`."""
    found: list[Protocol] = []
    for code, text in reply:
        if code == _ROW and (row := _protocol(text)) is not None:
            found.append(row)
        elif code == _DETAILS and found:
            found[-1] = _with_detail(found[-1], text.strip())
    return tuple(found)


def _protocol(row: str) -> Protocol | None:
    """Return the protocol of a row: name, kind, table, state, since (one or two words), info."""
    words = row.split()
    if len(words) < 5 or words[:2] == ["Name", "Proto"]:
        return None
    name, kind, _, state, *rest = words
    dated = len(rest) > 1 and re.fullmatch(r"\d{4}-\d\d-\d\d", rest[0]) is not None
    since = " ".join(rest[:2]) if dated else rest[0]
    return Protocol(name, kind, state, since, " ".join(rest[2 if dated else 1 :]))


def _with_detail(protocol: Protocol, text: str) -> Protocol:
    if text.startswith("Channel "):
        channel = Channel(text.split()[1])
        return msgspec.structs.replace(protocol, channels=(*protocol.channels, channel))
    field, _, value = text.partition(":")
    value = value.strip()
    if protocol.channels:
        *before, last = protocol.channels
        channel = _with_channel_detail(last, field, value)
        return msgspec.structs.replace(protocol, channels=(*before, channel))
    match field:
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
    match field:
        case "State":
            return msgspec.structs.replace(channel, state=value)
        case "Routes" if found := re.search(r"(\d+) exported", value):
            return msgspec.structs.replace(channel, exported=int(found[1]))
        case "BGP Next hop" if value:
            usable = [each for each in value.split() if each != "::"]
            return msgspec.structs.replace(channel, next_hop=(usable or ["::"])[0])
    return channel


def bfd_sessions_of(reply: Sequence[Line]) -> tuple[BfdSession, ...]:
    """Return the sessions in a reply to `show bfd sessions`."""
    rows = (text.split() for code, text in reply if code == _BFD_ROW)
    return tuple(
        BfdSession(words[0], words[1], words[2])
        for words in rows
        if len(words) >= 5 and words[0] != "IP"
    )


def routes_of(reply: Sequence[Line]) -> tuple[TableRoute, ...]:
    """Return the routes in a reply to `show route all`."""
    return tuple(_routes(reply))


def _routes(reply: Sequence[Line]) -> Iterator[TableRoute]:
    prefix = protocol = ""
    attributes: list[tuple[str, str]] = []
    for _, text in reply:
        if found := re.match(r"(\S*/\d+)?\s+\S.*\[(\S+) ", text) if "[" in text else None:
            if prefix:
                yield TableRoute(prefix, protocol, tuple(attributes))
            prefix, protocol, attributes = found[1] or prefix, found[2], []
        elif text.startswith("\t") and ":" in text:
            name, _, value = text.strip().partition(":")
            name = name.lower().removeprefix("bgp.").removeprefix("bgp_")
            attributes.append((name, value.strip()))
    if prefix:
        yield TableRoute(prefix, protocol, tuple(attributes))
