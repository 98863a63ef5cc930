"""Interfaces, routes and neighbours, as the kernel shows them. Pure values; `net.routing` asks for
them."""

from typing import NamedTuple


class Interface(NamedTuple):
    """A network device. `number`: its index. `kind`: of a virtual one, as in `ip link add type`.
    `parent` and `vlan`: of one that stands for a VLAN of another; 0 otherwise."""

    number: int
    name: str
    mac: bytes
    mtu: int
    kind: str = ""
    parent: int = 0
    vlan: int = 0


class Route(NamedTuple):
    """How the kernel would send to an address. `here`: it is this host's own. `via`: the router,
    empty on a link with it. `source`: the address that it would send from. `mtu`: of the route if
    it has one of its own, else 0."""

    here: bool
    interface: int
    via: str
    source: str
    mtu: int


class Neighbour(NamedTuple):
    """Who answers for an address on an interface. `mac` is empty while nobody is known to.
    `unsure`: it has not been heard of for a while, or did not answer: if it matters, ask the kernel
    to look."""

    interface: int
    address: str
    mac: bytes
    unsure: bool
