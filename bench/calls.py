"""New connections through a service proxy: how many a second, and how long the first packet takes.

In: network namespaces, addresses there. Out: `Calls` of each. One caller, each connection after the
other; whoever is called sits behind one cable, so what differs is what the proxy's rules take. The
proxies take turns, in both orders."""

import socket
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from fairlead.lab import namespace
from fairlead.probe.burst import LINGER_NONE

CONNECTIONS = 400
"""So short a turn that a pause of the machine spoils one of them and not the median."""


class Calls(msgspec.Struct, frozen=True):
    """`first_us`: until a connection is there, which is the first packet's way and that of its
    answer."""

    per_s: float
    first_us: float


class Place(NamedTuple):
    """Where to call."""

    address: str
    port: int


def calls(
    places: Mapping[str, Mapping[str, Place]], turns: int
) -> Mapping[str, Mapping[str, Calls]]:
    """Call all places, by namespace and what they are; the median over the turns."""
    found: dict[tuple[str, str], list[Calls]] = {}
    for turn in range(turns):
        names = list(places)[:: 1 if turn % 2 == 0 else -1]
        for what in places[names[0]]:
            for name in names:
                found.setdefault((name, what), []).append(_turn(name, places[name][what]))
    return {name: {what: _median(found[name, what]) for what in places[name]} for name in places}


def _turn(name: str, place: Place) -> Calls:
    took_s = []
    with namespace.inside(name):
        begun_s = time.perf_counter()
        for _ in range(CONNECTIONS):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                called_s = time.perf_counter()
                sock.connect(place)
                took_s.append(time.perf_counter() - called_s)
        return Calls(CONNECTIONS / (time.perf_counter() - begun_s), median(took_s) * 1e6)


def _median(turns: Sequence[Calls]) -> Calls:
    return Calls(median(each.per_s for each in turns), median(each.first_us for each in turns))
