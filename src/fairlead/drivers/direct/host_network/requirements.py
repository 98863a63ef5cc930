"""What a gateway needs of its host: room in the kernel's tables of neighbours for all nodes on
links with it.

In: the next hops of its hops. Out: `Need`s. Pure. Where a table is full the kernel takes in a new
neighbour only if it can throw another out that has not been used for 5 s; to one that is not taken
in nothing can be sent ("neighbor table overflow" in the kernel's log). The limit is one for all
network namespaces of the machine, and shown in the first of them alone. Follows Linux
Documentation/networking/ip-sysctl.rst, gc_thresh3."""

from collections.abc import Collection

from fairlead.drivers.need import Need
from fairlead.net.address import is_ipv6

_WHY = (
    "the kernel keeps no more neighbours of this family, and the gateway sends to more: to "
    "some of them nothing can be sent"
)


def needs_of(next_hops: Collection[str]) -> tuple[Need, ...]:
    """The needs of a gateway that sends to these addresses."""
    ipv6 = sum(is_ipv6(each) for each in next_hops)
    return (*_room("ipv4", len(next_hops) - ipv6), *_room("ipv6", ipv6))


def _room(family: str, count: int) -> tuple[Need, ...]:
    """There are other neighbours too: routers, clients, those of pods. So room for just these is
    too little, and what should be is twice as much, as a power of two: it is not another figure
    with every node that comes."""
    should = 1 << (2 * count - 1).bit_length() if count else 0
    need = Need(
        f"net/{family}/neigh/default/gc_thresh3",
        lambda value: int(value) <= count,
        str(should),
        _WHY,
    )
    return (need,) if count else ()
