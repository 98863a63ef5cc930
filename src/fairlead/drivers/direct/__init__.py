"""Class fairlead.io/direct: eBPF on the gateways passes packets to the nodes unmodified (direct server return).

spec          the desired and the installed state as values; `render` and `diff`
driver        the driver: open, read, apply, counters
change_run         applying changes, each Service on its own
counters      what was forwarded and dropped, and for which Service
maps          the pinned maps
host_network  next hops, interfaces and routes of the host
peers         other gateways
"""

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.driver import DirectDriver, remove_pins
from fairlead.drivers.direct.host_network.next_hops import Rules
from fairlead.drivers.direct.host_network.probe_paths import ProbePaths
from fairlead.drivers.direct.maps.pins import Sizes
from fairlead.drivers.direct.peers.peers import NoPeers, Peers
from fairlead.drivers.direct.peers.tls import PeerTLS
from fairlead.drivers.direct.spec import DirectActual, DirectSpec, ListenerSpec

__all__ = [
    "Counters",
    "DirectActual",
    "DirectDriver",
    "DirectSpec",
    "ListenerSpec",
    "NoPeers",
    "PeerTLS",
    "Peers",
    "ProbePaths",
    "Rules",
    "Sizes",
    "remove_pins",
]
