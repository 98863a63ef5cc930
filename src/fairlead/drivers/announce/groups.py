"""Join the multicast groups in which neighbors ask for owned IPv6 addresses.

In: owned addresses, each with the index of its interface. Out: memberships that the kernel holds
without the process. Those of addresses that are not owned any more end. Follows RFC 4861, 7.2.1."""

from collections.abc import Collection, Mapping

import structlog

from fairlead.errors import plain
from fairlead.net.address import is_ipv6
from fairlead.net.memberships import join, joined, leave
from fairlead.net.ndp import solicited_node
from fairlead.net.rtnetlink import open_rtnetlink

log = structlog.get_logger()

Group = tuple[int, str]
"""The index of an interface, and a multicast group. Several addresses may have the same."""


def groups_of(owned: Mapping[str, int]) -> frozenset[Group]:
    """Return the groups of these addresses. Those whose interface is 0 are not owned."""
    return frozenset(
        (index, solicited_node(address))
        for address, index in owned.items()
        if index and is_ipv6(address)
    )


def join_all(wanted: Collection[Group], names: Mapping[int, str]) -> None:
    """Join these groups. `names`: the interfaces by index. A group that cannot be joined is logged:
    neighbors may still reach the address, because not every network filters multicast. Raise
    Unavailable."""
    if not wanted:
        return
    with open_rtnetlink("joining the multicast groups of addresses") as kernel:
        for index, group in set(wanted).difference(joined(kernel)):
            name = names.get(index, "")
            try:
                join(kernel, index, name, group)
            except OSError as error:
                log.warning(
                    "a multicast group is not joined: neighbor solicitations may not arrive",
                    group=group,
                    interface=name,
                    error=plain(error),
                )


def leave_all(groups: Collection[Group], names: Mapping[int, str]) -> None:
    """Leave these groups. Raise Unavailable."""
    if not groups:
        return
    with open_rtnetlink("leaving the multicast groups of addresses") as kernel:
        for index, group in groups:
            leave(kernel, index, names.get(index, ""), group)
