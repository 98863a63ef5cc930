"""The service proxy of a node, which replaces kube-proxy and uses flat nftables maps. A frontend is
an address, protocol and port at which the node accepts traffic for a Service.

- `skeleton`: the fixed part of the table: chains and empty maps (pure).
- `elements`: the map elements of each Service, and the Services in a listing of the maps (pure).
- `wire`: elements as the bytes of netlink messages (pure).
- `transactions`: which changes go into one transaction, and which Service has a contested frontend
  (pure).
- `cleanup`: the flows and remembered clients to delete after a transaction (pure).
- `affinity`: the map of remembered clients that each Service uses.
- `table`: the nftables table in the kernel.
- `driver`: the driver: `render`, `diff`, `read`, `apply`.
- `requirements`: what the service proxy requires of the host."""

from fairlead.drivers.nodeproxy.driver import NodeProxyDriver
from fairlead.drivers.nodeproxy.elements import Change, Element, Spec
from fairlead.drivers.nodeproxy.table import remove_table

__all__ = ["Change", "Element", "NodeProxyDriver", "Spec", "remove_table"]
