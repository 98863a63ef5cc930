"""Addresses that this host answers for without any interface bearing them: local routes.

In: addresses. Out: the kernel's routes `local ADDRESS dev lo table local`, with a protocol number of ours, by which they are
told from those that come with an interface's addresses. Such an address is announced by nobody; whoever routes it here finds
it answered.
Invariant: nothing is touched that does not bear the number. An address that the host has already stays as it is.
Follows rtnetlink(7), ip-route(8).
"""

import errno
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from fairlead.net.iproute import asking

PROTOCOL = 172
"""Ours among routing protocols (`ip route show table local proto 172`)."""
_LOCAL_TABLE, _HOST_SCOPE, _LOOPBACK = 255, 254, 1


async def present() -> set[str]:
    """The addresses that have a route of ours. Raises Unavailable."""
    found = set()
    async with asking("listing local routes") as route:
        for family in (2, 10):
            async for message in await route.route("dump", family=family, table=_LOCAL_TABLE):
                if message["proto"] == PROTOCOL and (address := message.get_attr("RTA_DST")) is not None:
                    found.add(str(ip_address(address)))
    return found


async def add(addresses: Collection[str]) -> None:
    """Have the host answer for these. Raises Refused without the right, else Unavailable."""
    await _each("add", addresses, errno.EEXIST)


async def delete(addresses: Collection[str]) -> None:
    """Have the host not answer for these, unless it has them otherwise."""
    await _each("del", addresses, errno.ESRCH)


async def _each(command: str, addresses: Collection[str], harmless: int) -> None:
    if not addresses:
        return
    async with asking(f"{command} local routes") as route:
        for address in sorted(addresses):
            try:
                await route.route(command, **_route(address))
            except NetlinkError as error:
                if error.code != harmless:
                    raise


def _route(address: str) -> dict[str, Any]:
    ipv6 = ":" in address
    return {
        "dst": f"{address}/{128 if ipv6 else 32}",
        "family": 10 if ipv6 else 2,
        "type": "local",
        "table": _LOCAL_TABLE,
        "scope": 0 if ipv6 else _HOST_SCOPE,
        "oif": _LOOPBACK,
        "proto": PROTOCOL,
    }
