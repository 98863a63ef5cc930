"""Delete tracked flows that lead to somebody who no longer answers.

In: what clients called (address and port) and who may answer there now. Out: how many flows were deleted.
Invariant: a flow is deleted only if its original destination is one of those given and somebody else than those that may
answer there answers it; all others stay. Follows linux/netfilter/nfnetlink_conntrack.h.

The kernel filters the dump (Linux 5.8), so a large table is walked there and not copied. Each filter costs one walk: beyond
a few destinations one copy of the protocol's flows is cheaper.
"""

import asyncio
import errno
import socket
from collections.abc import Collection, Mapping

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import AsyncNFCTSocket, NFCTAttrTuple

from fairlead.errors import Unavailable

Endpoint = tuple[str, int]
"""Address and port."""

_FILTERED_DUMPS = 32


async def delete_stale(protocol: int, answering: Mapping[Endpoint, Collection[Endpoint]], *, timeout_s: float = 60.0) -> int:
    """Delete the flows to each key of `answering` that none of its value answers; return their number.

    The next packet of such a flow is routed afresh. Raises Unavailable if the kernel does not answer in time.
    """
    deleted = 0
    try:
        async with asyncio.timeout(timeout_s):
            for family in (socket.AF_INET, socket.AF_INET6):
                mine = {called: by for called, by in answering.items() if (":" in called[0]) == (family == socket.AF_INET6)}
                if mine:
                    deleted += await _delete_stale(family, protocol, mine)
    except (NetlinkError, OSError, TimeoutError) as error:
        raise Unavailable(f"deleting stale tracked flows of protocol {protocol} failed: {error!r}") from error
    return deleted


async def _delete_stale(family: int, protocol: int, answering: Mapping[Endpoint, Collection[Endpoint]]) -> int:
    if len(answering) <= _FILTERED_DUMPS:
        # Linux compares IPv6 addresses the wrong way round here: asked for one, it gives the flows to all others.
        by_port = {(None if family == socket.AF_INET6 else host, port) for host, port in answering}
        filters = [NFCTAttrTuple(family=family, daddr=host, proto=protocol, dport=port) for host, port in by_port]
    else:
        filters = [NFCTAttrTuple(family=family, proto=protocol)]
    deleted = 0
    async with AsyncNFCTSocket(nfgen_family=family) as netlink:
        for wanted in filters:
            for message in [message async for message in await netlink.dump(tuple_orig=wanted)]:
                original = NFCTAttrTuple.from_netlink(family, message.get_attr("CTA_TUPLE_ORIG"))
                reply = NFCTAttrTuple.from_netlink(family, message.get_attr("CTA_TUPLE_REPLY"))
                allowed = answering.get((original.daddr, original.dport))
                if allowed is not None and (reply.saddr, reply.sport) not in allowed:
                    deleted += await _delete(netlink, original)
    return deleted


async def _delete(netlink: AsyncNFCTSocket, original: NFCTAttrTuple) -> bool:
    """Delete one flow. It may have ended by itself since it was listed."""
    try:
        await netlink.entry("del", tuple_orig=original)
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise
        return False
    return True
