"""The service proxy of a node: what kube-proxy does, in flat nftables maps.

`skeleton` is the fixed part of the table (chains, empty maps), `elements` decides what a Service
puts into the maps and reads it back, `wire` has both as bytes, `transactions` what goes together,
`driver` carries it out in the `table`, `aftermath` says what to clean up after it. A frontend is an
address, protocol and port on which this node answers for a Service."""

from fairlead.drivers.nodeproxy.driver import NodeProxyDriver
from fairlead.drivers.nodeproxy.elements import Change, Element, Spec
from fairlead.drivers.nodeproxy.table import remove_table

__all__ = ["Change", "Element", "NodeProxyDriver", "Spec", "remove_table"]
