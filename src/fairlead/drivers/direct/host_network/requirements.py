"""What a gateway requires of its host: neighbour tables that are large enough for all nodes on
links with it. Pure.

In: the addresses to which the gateway sends frames. Out: `SysctlRequirement`s. If the kernel's
neighbour table is full, the kernel adds a neighbour only if it can remove another that has not been
used for 5 s. Packets to a neighbour that cannot be added are lost ("neighbor table overflow" in the
kernel's log). The limit applies to all network namespaces of the machine together, and can be read
in the initial one only. Follows Linux Documentation/networking/ip-sysctl.rst, gc_thresh3.
"""

from collections.abc import Collection

from fairlead.drivers.sysctl_requirement import SysctlRequirement
from fairlead.net.address import is_ipv6

_WHY = (
    "the kernel keeps no more neighbours of this family, and the gateway sends to more: packets "
    "to some of them are lost"
)


def requirements_of(next_hops: Collection[str]) -> tuple[SysctlRequirement, ...]:
    """Return the requirements of a gateway that sends frames to these addresses."""
    ipv6 = sum(is_ipv6(each) for each in next_hops)
    ipv4 = len(next_hops) - ipv6
    return (*_neighbour_requirement("ipv4", ipv4), *_neighbour_requirement("ipv6", ipv6))


def _neighbour_requirement(family: str, count: int) -> tuple[SysctlRequirement, ...]:
    """Return the requirement for `count` neighbours of one family.

    The table also contains other neighbours: routers, clients, pods. So `count` alone is too
    little, and the recommended value is twice `count`, rounded up to a power of two. The rounding
    keeps the value from changing with every new node.
    """
    recommended = 1 << (2 * count - 1).bit_length() if count else 0
    requirement = SysctlRequirement(
        f"net/{family}/neigh/default/gc_thresh3",
        lambda value: int(value) <= count,
        str(recommended),
        _WHY,
    )
    return (requirement,) if count else ()
