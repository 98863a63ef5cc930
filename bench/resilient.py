"""Resilient next-hop groups at the router of a lab, as switches have them.

In: a lab whose router has a route to an address from its routing daemon. Out: while the context
manager is open, a rule sends the packets through a resilient group with the same next hops, which
follows the route of the daemon: a connection keeps its next hop as long as that is in the group.
Routing daemons install plain multipath routes, which divide the range of the hash again after each
change. The route to the group is in a table of its own, because FRR removes its own route from the
main table as long as another program has a route to the same prefix there. Follows ip-nexthop(8)
and ip-rule(8).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bench.paths import must

from fairlead.errors import Unavailable
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER

GROUP, FIRST_HOP = 2000, 1000
TABLE, PREFERENCE = 7777, 90
BUCKETS, IDLE_TIMER_S = 1024, 120
"""A bucket without a packet for this time may get another next hop."""
FOLLOW_S = 0.02


@asynccontextmanager
async def resilient(site: Site, address: str) -> AsyncIterator[None]:
    """Send packets to the address through a resilient group. Remove it at the end."""
    hops = await daemon_hops(site, address)
    if not hops:
        raise Unavailable(f"the router of lab {site.name} has no route to {address}")
    ids: dict[str, int] = {}
    await _set_group(site, ids, hops)
    await must(site, ROUTER, f"ip route add {address} nhid {GROUP} table {TABLE}")
    rule = f"pref {PREFERENCE} to {address} lookup {TABLE}"
    await must(site, ROUTER, f"ip rule add {rule}")
    task = asyncio.ensure_future(_follow(site, address, ids, hops))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await must(site, ROUTER, f"ip rule del {rule}")
        await must(site, ROUTER, f"ip route del {address} table {TABLE}")
        await must(site, ROUTER, f"ip nexthop del id {GROUP}")
        for number in ids.values():
            await must(site, ROUTER, f"ip nexthop del id {number}")


async def _follow(
    site: Site, address: str, ids: dict[str, int], present: Mapping[str, int]
) -> None:
    """Change the group whenever the route of the daemon changes. While there is no route, the group
    stays as it is."""
    while True:
        await asyncio.sleep(FOLLOW_S)
        hops = await daemon_hops(site, address)
        if hops and hops != present:
            await _set_group(site, ids, hops)
            present = hops


async def _set_group(site: Site, ids: dict[str, int], hops: Mapping[str, int]) -> None:
    for hop in hops:
        if hop not in ids:
            ids[hop] = FIRST_HOP + len(ids)
            await must(site, ROUTER, f"ip nexthop add id {ids[hop]} via {hop} dev lan")
    members = "/".join(f"{ids[hop]},{weight}" for hop, weight in sorted(hops.items()))
    await must(
        site,
        ROUTER,
        f"ip nexthop replace id {GROUP} group {members} type resilient buckets {BUCKETS} "
        f"idle_timer {IDLE_TIMER_S}",
    )


async def daemon_hops(site: Site, address: str) -> Mapping[str, int]:
    """Return the next hops of the daemon's route, with their weights."""
    text = await must(site, ROUTER, f"ip -json route show {address}")
    for route in json.loads(text or "[]"):
        return {
            hop["gateway"]: hop.get("weight", 1)
            for hop in route.get("nexthops", (route,))
            if "gateway" in hop
        }
    return {}
