"""All of a HAProxy's taken away, be it that a part is gone already.

A container takes its HAProxy along when it ends, and its folder; routes and rules stay, and the
host goes on answering for the addresses. Routes are known by their protocol number and a table by
its name, so nothing else is needed to find them."""

from fairlead.drivers.proxy import shield
from fairlead.drivers.proxy.process import Haproxy
from fairlead.net import localroutes


async def remove(haproxy: Haproxy, protocol: int, table: str) -> bool:
    """HAProxy, with its connections and its folder, the routes of this protocol number, and this
    table. False if none of them was there."""
    alive, routed = haproxy.alive(), await localroutes.present(protocol)
    await haproxy.kill()
    await localroutes.delete(routed, protocol)
    shielded = shield.shown(
        table
    )  # last: it is Refused where there is no libnftables, and so no table of ours
    shield.put((), table)
    return bool(alive or routed or shielded)
