"""Removes everything that belongs to a HAProxy, also if a part is already gone.

When a container ends, its HAProxy and its folder end with it; routes and nftables rules stay, and
the host continues to answer for the addresses. Routes are found by their protocol number and a
table by its name, so nothing else is needed."""

from fairlead.drivers.proxy import shield
from fairlead.drivers.proxy.process import Haproxy
from fairlead.net import localroutes


async def remove(haproxy: Haproxy, protocol: int, table: str) -> bool:
    """Remove HAProxy with its connections and its folder, the routes with this protocol number, and
    this nftables table. Return False if none of them existed."""
    alive, routed = haproxy.alive(), await localroutes.present(protocol)
    await haproxy.kill()
    await localroutes.delete(routed, protocol)
    # The table comes last, because this raises Refused without libnftables; in that case there is
    # no table of ours.
    shielded = shield.listing(table)
    shield.install((), table)
    return bool(alive or routed or shielded)
