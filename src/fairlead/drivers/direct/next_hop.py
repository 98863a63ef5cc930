"""Where to send what a node gets.

In: a node's address. Out: the interface whose link the node is on, or that the node is this host.
Asked of the kernel's routing table, so that it is right for whatever the host's networks are. The MAC address is not looked
for: the kernel's neighbour table gives it for each packet (bpf_redirect_neigh) and keeps it fresh.
"""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from pyroute2 import AsyncIPRoute
from pyroute2.netlink.exceptions import NetlinkError

from fairlead.errors import Refused, Unavailable

_RTN_LOCAL = 2


class NextHop(NamedTuple):
    """The interface's index, and whether the address is one of this host's own."""

    interface: int
    here: bool


class Routes:
    """Questions to the routing table. Made by `routes()`."""

    def __init__(self, netlink: AsyncIPRoute) -> None:
        self._netlink = netlink

    async def next_hop(self, node: str, address: str) -> NextHop:
        """How to reach the node. Raises Unavailable without a route, Refused where the route leads through a router."""
        try:
            (route,) = await self._netlink.route("get", dst=address)
        except NetlinkError as error:
            if error.code in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL):
                raise Unavailable(f"there is no route to node {node} at {address}", fix="check the gateway's routes") from error
            raise Unavailable(f"asking for the route to node {node} at {address}: {error}") from error
        gateway = route.get_attr("RTA_GATEWAY") or route.get_attr("RTA_VIA")
        if gateway:
            raise Refused(
                f"node {node} at {address} is not on a link with this gateway: the route leads through {gateway}",
                fix="packets are handed over on the link; put the gateway on the nodes' network",
            )
        return NextHop(int(route.get_attr("RTA_OIF")), route["type"] == _RTN_LOCAL)


@asynccontextmanager
async def routes() -> AsyncIterator[Routes]:
    """The routing table of this network namespace."""
    async with AsyncIPRoute() as netlink:
        yield Routes(netlink)
