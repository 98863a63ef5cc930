"""Connections through a service proxy: the rate of new connections, and the time of the first
packet.

In: network namespaces and addresses to connect to from each. Out: `Calls` for each. A single client
opens one connection after the other, and the server is behind a single cable, so the results differ
only by the proxy's rules. The proxies are measured in turn, in both orders.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from fairlead.lab import namespace
from fairlead.probe.burst import LINGER_NONE

CONNECTIONS = 400
"""Connections of one turn. A turn is short, so that a pause of the machine spoils one turn and not
the median."""


class Calls(msgspec.Struct, frozen=True):
    """The rate of connections. `first_us` is the time until a connection is established: the round
    trip of the first packet and of its answer."""

    per_s: float
    first_us: float


class Destination(NamedTuple):
    """The address and port of a server."""

    address: str
    port: int


def calls(
    destinations: Mapping[str, Mapping[str, Destination]], turns: int
) -> Mapping[str, Mapping[str, Calls]]:
    """Measure all destinations, given by namespace and name; return the median over the turns."""
    found: dict[tuple[str, str], list[Calls]] = {}
    for turn in range(turns):
        names = list(destinations)[:: 1 if turn % 2 == 0 else -1]
        for what in destinations[names[0]]:
            for name in names:
                found.setdefault((name, what), []).append(_turn(name, destinations[name][what]))
    return {
        name: {what: _median(found[name, what]) for what in destinations[name]}
        for name in destinations
    }


def _turn(name: str, destination: Destination) -> Calls:
    took_s = []
    with namespace.inside(name):
        begun_s = time.perf_counter()
        for _ in range(CONNECTIONS):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                called_s = time.perf_counter()
                sock.connect(destination)
                took_s.append(time.perf_counter() - called_s)
        return Calls(CONNECTIONS / (time.perf_counter() - begun_s), median(took_s) * 1e6)


def _median(turns: Sequence[Calls]) -> Calls:
    return Calls(median(each.per_s for each in turns), median(each.first_us for each in turns))
