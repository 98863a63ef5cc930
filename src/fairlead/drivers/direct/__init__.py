"""Class fairlead.io/direct: packets handed to the nodes unmodified by eBPF on the gateways (direct
server return).

spec      what should be and what is, as values; render and diff
driver    the driver: open, read, apply, counters
steps     carrying changes out, each Service for itself
tables    listeners, slots and nodes in the pinned maps
nodes     which number stands for which node there, and where what it gets is sent
keepers   which nodes keep the UDP flows that they have, for each listener
survey    reading the maps while they are changed
mirror    what these hold, as last read or written
pins      making the maps, or adopting those that a predecessor left
upgrade   carrying over what the maps of another version hold
ways      which way packets get to a node
neighbours  the ways as the host's networks are now, followed by events
attach    where in the kernel packets are taken: tc, or XDP in front of it
networks  updates all that depends on the host's networks
probe_ways  the gateway's own probes through the tunnels of forwarded packets
ranges    from which addresses clients may come, for each Service
arena     which part of the slot memory is free
quota     how much each namespace may use of the resources whose size is fixed
sizing    which tables a listener gets where memory is short
blackhole routes that end what is for no listener
counters  what was forwarded and dropped, for whom
peers     other gateways, and what is taken over from them
entry     where other gateways connect, and which connections are accepted
peer_tls  mutual TLS between gateways
refusals  log lines about refused connections
followers what others are told
exchange  what of the maps they are told, and what becomes of it there
peer_messages  the same as bytes
layout    the records of bpf/structs.h as bytes
"""

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.driver import DirectDriver, remove_pins
from fairlead.drivers.direct.peer_tls import PeerTLS
from fairlead.drivers.direct.peers import Peers
from fairlead.drivers.direct.pins import Sizes
from fairlead.drivers.direct.probe_ways import ProbeWays
from fairlead.drivers.direct.spec import DirectActual, DirectSpec, ListenerSpec
from fairlead.drivers.direct.ways import Rules

__all__ = [
    "Counters",
    "DirectActual",
    "DirectDriver",
    "DirectSpec",
    "ListenerSpec",
    "PeerTLS",
    "Peers",
    "ProbeWays",
    "Rules",
    "Sizes",
    "remove_pins",
]
