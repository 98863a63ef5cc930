"""How the probes of routes reach the router of a BGP session.

In: a peer, the address of its neighbor. Out: a `Path`, or the reason why routes of this peer cannot
be checked. Only reads the kernel's tables, in the network namespace of the calling thread."""

from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import NamedTuple

from fairlead.drivers.bgp.peers import Peer
from fairlead.net import interfaces
from fairlead.net.route_probe import Heard
from fairlead.net.routing import Routing

_MAC_BYTES = 6


class Path(NamedTuple):
    """`mac`: of the interface. `router` and `neighbor`: the MAC address of the router, and its
    address in the session. `sources`: the addresses of the host on the interface, at most one of
    each family."""

    interface: str
    mac: bytes
    router: bytes
    neighbor: str
    sources: tuple[str, ...]

    def is_from_router(self, heard: Heard) -> bool:
        """Whether the router itself sent the message. It may use another one of its addresses."""
        return heard.by == self.neighbor or (heard.mac == self.router and not heard.forwarded)

    def source_for(self, address: str) -> str:
        """Return the source address of probes of the address; empty if there is none."""
        return next((each for each in self.sources if (":" in each) == (":" in address)), "")


def path_of(peer: Peer, neighbor: str, announced: Collection[str]) -> Path | str:
    """Return the path to the peer. `neighbor`: the address of the neighbor in the session, with the
    interface if it is link-local. `announced`: addresses that are not used as source. Raise
    Unavailable."""
    if peer.spec.multihop:
        return "the neighbor is not directly connected (multihop)"
    text, _, zone = neighbor.partition("%")
    if not text:
        return "the address of the neighbor is not known yet"
    routing = Routing()
    try:
        devices = routing.interfaces()
        number = next((each.number for each in devices.values() if each.name == zone), 0)
        source = peer.spec.source_address
        if not zone:
            route = routing.route(text)
            if route is None or route.via or route.here or route.interface not in devices:
                return "the neighbor is not directly connected"
            number, source = route.interface, source or route.source
        device = devices.get(number)
        if device is None or len(device.mac) != _MAC_BYTES:
            return "the interface to the neighbor has no MAC address"
        neighbour = routing.neighbours().get((number, text))
        if neighbour is None or not neighbour.mac:
            routing.resolve(number, text)
            return "the MAC address of the neighbor is not known yet"
    finally:
        routing.close()
    present = interfaces.present(routes=False)
    own = [address for each in present if each.name == device.name for address in each.addresses]
    candidates = [source, *own]
    return Path(device.name, device.mac, neighbour.mac, text, _sources(candidates, announced))


def _sources(candidates: Iterable[str], announced: Collection[str]) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for each in filter(None, candidates):
        address = ip_address(each)
        if not (address.is_link_local or address.is_loopback or each in announced):
            found.setdefault(address.version, each)
    return tuple(found.values())
