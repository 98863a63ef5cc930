"""How a gateway that is a node itself knows frames that another gateway has sent here.

In: the ways to all nodes of the cluster. Out: the map `entrances`, which holds the hardware addresses of the other nodes on
links with this host. A packet from one of them has been through a gateway, which chose this host: it stays here. So two
gateways whose tables differ for a moment do not send a packet to and fro.
Invariant: where this host is no node the map is empty. A router's address is never in it, for clients' packets come from there.
"""

from collections.abc import Mapping

from fairlead.drivers.direct.layout import HERE, INDEX, MAC, Way
from fairlead.drivers.direct.neighbours import Node, Surroundings
from fairlead.errors import FairleadError
from fairlead.net.bpf import Map

_PRESENT = INDEX.pack(1)


def among_nodes(ways: Mapping[Node, Way | FairleadError]) -> bool:
    """Whether this host is one of the nodes."""
    return any(isinstance(way, Way) and way.kind == HERE for way in ways.values())


def keep(entrances: Map, ways: Mapping[Node, Way | FairleadError], surroundings: Surroundings) -> None:
    """Have the map hold the others' addresses, as far as they are known; what is not yet comes by an event."""
    wanted = set()
    if among_nodes(ways):
        direct = (way for (_, address), way in ways.items() if isinstance(way, Way) and way.next_hop == address)
        macs = {surroundings.mac_of(way) for way in direct if way.kind != HERE}
        wanted = {MAC.pack(mac) for mac in macs if mac}
    there = {key for key, _ in entrances.items()}
    entrances.update_all(dict.fromkeys(wanted - there, _PRESENT))
    entrances.delete_all(there - wanted)
