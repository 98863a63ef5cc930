"""The driver of class fairlead.io/direct: eBPF programs on a gateway send packets to nodes.

The packets keep the client's address and the load balancer's address, and the reply goes from the
node straight to the client (direct server return).

spec          the desired and the installed state as values; `render` and `diff`
driver        the driver: open, read, apply, counters
change_run    applies changes to the maps; an error affects only the Service of the change
counters      the counters of the data plane, for each Service, for each node, and in total
metrics       the counters as Prometheus metrics
maps          the pinned maps
host_network  next hops, interfaces and routes of the host
peers         flow entries and tables of other gateways
"""

from fairlead.drivers.direct.counters import Counters
from fairlead.drivers.direct.driver import DirectDriver, remove_pins
from fairlead.drivers.direct.host_network.next_hops import Rules
from fairlead.drivers.direct.host_network.probe_paths import ProbePaths
from fairlead.drivers.direct.maps.pins import Sizes
from fairlead.drivers.direct.peers.peers import Peers
from fairlead.drivers.direct.peers.tls import PeerTLS
from fairlead.drivers.direct.spec import DirectActual, DirectSpec, ListenerSpec

__all__ = [
    "Counters",
    "DirectActual",
    "DirectDriver",
    "DirectSpec",
    "ListenerSpec",
    "PeerTLS",
    "Peers",
    "ProbePaths",
    "Rules",
    "Sizes",
    "remove_pins",
]
