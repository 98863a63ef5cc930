"""The service proxy of a node: what kube-proxy does, in flat nftables maps.

`skeleton` is the fixed part of the table (chains, empty maps), `elements` decides what a Service puts into the maps and reads
it back, `driver` carries it out. A frontend is an address, protocol and port on which this node answers for a Service.
"""

from fairlead.drivers.nodeproxy.driver import NodeProxyDriver
from fairlead.drivers.nodeproxy.elements import Change, Element, Spec

__all__ = ["Change", "Element", "NodeProxyDriver", "Spec"]
