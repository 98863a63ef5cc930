"""Addresses that this host answers for without any interface bearing them: local routes.

In: addresses. Out: the kernel's routes `local ADDRESS dev lo table local`, with a protocol number of ours, by which they are
told from those that come with an interface's addresses. Such an address is announced by nobody; whoever routes it here finds
it answered.
Invariant: nothing is touched that does not bear the number that was named. An address that the host has already stays as it is.
Follows rtnetlink(7), ip-route(8).
"""

import errno
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from fairlead.net.iproute import asking

PROTOCOL = 172
"""Ours among routing protocols (`ip route show table local proto 172`): of Services' addresses."""
API_PROTOCOL = 173
"""Of the address of the API server's balancer, which comes and goes by itself."""
_LOCAL_TABLE, _HOST_SCOPE, _LOOPBACK = 255, 254, 1


async def present(protocol: int = PROTOCOL) -> set[str]:
    """The addresses that have a route of ours. Raises Unavailable."""
    found = set()
    async with asking("listing local routes") as route:
        for family in (2, 10):
            async for message in await route.route("dump", family=family, table=_LOCAL_TABLE):
                if message["proto"] == protocol and (address := message.get_attr("RTA_DST")) is not None:
                    found.add(str(ip_address(address)))
    return found


async def add(addresses: Collection[str], protocol: int = PROTOCOL) -> None:
    """Have the host answer for these. Raises Refused without the right, else Unavailable."""
    await _each("add", addresses, errno.EEXIST, protocol)


async def delete(addresses: Collection[str], protocol: int = PROTOCOL) -> None:
    """Have the host not answer for these, unless it has them otherwise."""
    await _each("del", addresses, errno.ESRCH, protocol)


async def borne(address: str) -> bool:
    """Whether an interface of this host bears the address. Raises Unavailable."""
    wanted = ip_address(address)
    async with asking("listing addresses") as route:
        async for message in await route.addr("dump", family=2 if wanted.version == 4 else 10):
            # Of a point-to-point link IFA_ADDRESS is the other end.
            own = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            if own is not None and ip_address(own) == wanted:
                return True
    return False


async def _each(command: str, addresses: Collection[str], harmless: int, protocol: int) -> None:
    if not addresses:
        return
    async with asking(f"{command} local routes") as route:
        for address in sorted(addresses):
            try:
                await route.route(command, **_route(address, protocol))
            except NetlinkError as error:
                if error.code != harmless:
                    raise


def _route(address: str, protocol: int) -> dict[str, Any]:
    ipv6 = ":" in address
    return {
        "dst": f"{address}/{128 if ipv6 else 32}",
        "family": 10 if ipv6 else 2,
        "type": "local",
        "table": _LOCAL_TABLE,
        "scope": 0 if ipv6 else _HOST_SCOPE,
        "oif": _LOOPBACK,
        "proto": protocol,
    }
