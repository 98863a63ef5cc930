"""The values of the driver of OVN: its configuration, what a Service should have, and the rows that
exist. Pure.

A load balancer of OVN is a row of table Load_Balancer of the northbound database (ovn-nb(5)). Its
column `vips` maps `address:port` to a list of backends. Fairlead writes one row for each address,
port and protocol of a Service, and attaches it to one router and to switches. Besides the address
of the Service, a row may have a second key in `vips`: an address to which nothing is routed, with
the backends whose open connections continue. On a distributed router OVN translates a packet of an
open connection back only if its backend is in the row.

With topology `gateways`, each node has a gateway router, and a row of its own with its pods. Such a
row has no second key, because a gateway router tracks connections. A pod of another node must not
be in the row: its replies would leave by the gateway router of its own node. The row at switches
still has the pods of all nodes."""

import zlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from fairlead.model import Outcome, Protocol, ServiceKey, Value
from fairlead.sections import NODE_PLACEHOLDER

Topology = Literal["router", "gateways"]
NeighborResponder = Literal["reachable", "none"]


class Attachment(NamedTuple):
    """A router or switch to which rows are attached."""

    table: Literal["Logical_Router", "Logical_Switch"]
    name: str

    def __str__(self) -> str:
        return f"{'router' if self.table == 'Logical_Router' else 'switch'} {self.name}"


class Site(Value, frozen=True):
    """The configuration of the driver. `cluster`: marks the rows of this cluster. `router`: the
    name of the router; with topology `gateways`, the name of the router of a node, with `{node}`
    for the name of the node. `slots`: the usual length of a slot table. `drain_address` and
    `drain_address_v6`: addresses to which nothing is routed. `hairpin_address`: the source address
    of a connection from a pod to itself; empty: OVN uses the address of the Service."""

    cluster: str
    router: str
    switches: tuple[str, ...] = ()
    topology: Topology = "router"
    slots: int = 64
    drain_address: str = "192.0.2.1"
    drain_address_v6: str = "100::1"
    neighbor_responder: NeighborResponder = "reachable"
    hairpin_address: str = ""
    gateway_router: bool = False
    """Whether the router of topology `router` is on one chassis only (a gateway router), as the
    database shows it."""
    routers: frozenset[str] = frozenset()
    """The routers of topology `gateways` that the database shows."""

    def router_of(self, node: str) -> str:
        """Return the name of the router for the row of this node; empty: the row has no node."""
        return self.router.replace(NODE_PLACEHOLDER, node) if node else self.router

    def has_router(self, name: str) -> bool:
        """Return whether rows may be attached to the router of this name."""
        if self.topology == "router":
            return name == self.router
        before, _, after = self.router.partition(NODE_PLACEHOLDER)
        return len(name) > len(before + after) and name.startswith(before) and name.endswith(after)

    def is_place(self, attachment: Attachment, node: str) -> bool:
        """Return whether the row of this node, or that of all nodes (empty), may be there."""
        if attachment.table == "Logical_Switch":
            return not node
        per_node = self.topology == "gateways"
        return bool(node) == per_node and attachment.name == self.router_of(node)

    def attachments(self, node: str = "") -> frozenset[Attachment]:
        """Return the routers and switches to which a row is attached. `node`: the node of the row;
        empty: the row has the backends of all nodes."""
        if node:
            name = self.router_of(node)
            return frozenset([Attachment("Logical_Router", name)] if name in self.routers else ())
        found = {Attachment("Logical_Switch", name) for name in self.switches}
        if self.topology == "router":
            found.add(Attachment("Logical_Router", self.router))
        return frozenset(found)


class Frontend(NamedTuple):
    """What one row serves. No two rows on a router have the same frontend. `node`: the node on
    whose gateway router the row is; empty: the row has the backends of all nodes."""

    address: str
    port: int
    protocol: Protocol
    node: str = ""

    @property
    def is_readable(self) -> bool:
        """Whether the mark of the row names a frontend."""
        return self.port != 0

    @property
    def vip(self) -> str:
        """The key in column `vips`."""
        return endpoint_text(self.address, self.port)

    def drain_vip(self, site: Site) -> str:
        """Return the key in column `vips` of the backends that drain. Rows should have different
        keys, so the port is a hash of the frontend; equal keys do no harm, because no packet is
        sent to them."""
        port = zlib.crc32(f"{self.vip}/{self.protocol}".encode()) % 65535 + 1
        address = site.drain_address_v6 if ":" in self.address else site.drain_address
        return endpoint_text(address, port)


NAME_PREFIX = "fairlead:"
"""With this begin the names of all rows of Fairlead."""
UNREADABLE = ("", 0)
"""Address and port of a row from whose marks another program has removed the frontend."""


class RowSpec(Value, frozen=True):
    """What one frontend of a Service should have. `weights`: the backends that get new connections,
    sorted, with positive weights. `draining`: other backends of the Service that still exist, and
    keep the connections that they have."""

    frontend: Frontend
    weights: tuple[tuple[str, int], ...] = ()
    draining: tuple[str, ...] = ()
    affinity_timeout_s: int = 0


class ServiceSpec(Value, frozen=True):
    """What one Service should have. `drain_timeout_s`: for how long a backend that no longer exists
    for the API keeps its connections."""

    rows: tuple[RowSpec, ...]
    drain_timeout_s: float = 0.0


class Columns(msgspec.Struct, frozen=True):
    """The columns of a row that Fairlead writes. `external_ids`: only keys of Fairlead."""

    name: str
    protocol: str
    vips: Mapping[str, str]
    options: Mapping[str, str]
    external_ids: Mapping[str, str]


class Row(msgspec.Struct, frozen=True):
    """A row of this cluster. `attached`: the configured routers and switches to which it is
    attached. `installed`: every chassis has installed the row since it was created or attached."""

    uuid: str
    frontend: Frontend
    columns: Columns
    attached: frozenset[Attachment] = frozenset()
    installed: bool = True


class ServiceRows(msgspec.Struct, frozen=True):
    """The rows of one Service. `blocked`: why no row can be created or attached, or None; if it is
    unavailable, existing rows cannot be changed either. `known`: the Service has rows, or may have
    rows that are not known yet. `unreported`: there are Findings about the rows that were not
    reported yet."""

    rows: tuple[Row, ...] = ()
    blocked: Outcome | None = None
    known: bool = True
    unreported: bool = False


def row_name(cluster: str, service: ServiceKey, frontend: Frontend) -> str:
    """Return the name of a row. A row is recognized by its marks, but no second one is created with
    its name."""
    name = f"{NAME_PREFIX}{cluster}:{service}:{frontend.vip}:{frontend.protocol.lower()}"
    return f"{name}:{frontend.node}" if frontend.node else name


def endpoint_text(address: str, port: int) -> str:
    """Format an address and a port as OVN does: an IPv6 address is in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def backends_of(text: str) -> tuple[str, ...]:
    """Return the entries of a list of backends."""
    return tuple(text.split(",")) if text else ()
