"""Interfaces, routes and neighbours, as the kernel reports them. Pure values; `net.routing` reads
them."""

from typing import NamedTuple


class Interface(NamedTuple):
    """A network device. `number`: its index. `kind`: the type of a virtual device, as in `ip link
    add type`. `parent` and `vlan`: of a VLAN device; otherwise 0. `up`: its administrative state.
    `carrier`: it is up, and its link is too."""

    number: int
    name: str
    mac: bytes
    mtu: int
    kind: str = ""
    parent: int = 0
    vlan: int = 0
    up: bool = True
    carrier: bool = True


class Route(NamedTuple):
    """The kernel's route to an address.

    `here`: the address belongs to this host. `via`: the router; empty if the destination is on the
    link. `source`: the source address that the kernel would use. `mtu`: the MTU of the route, or 0
    if it has none of its own."""

    here: bool
    interface: int
    via: str
    source: str
    mtu: int


class Neighbour(NamedTuple):
    """The neighbour entry of an address on an interface.

    `mac` is empty while it is not known. `unconfirmed`: the entry is stale or failed;
    `Routing.resolve` has the kernel verify it."""

    interface: int
    address: str
    mac: bytes
    unconfirmed: bool
