"""The ready endpoints of this node that have no route on the host yet.

In: the addresses of ready local endpoints, the routes of the host. Out: how many of them count at a
health port. After a boot of the host, EndpointSlices show the pods of before the boot as ready
until the kubelet has reported them as unready. A health port that counted them would draw
connections to addresses that nobody has. A host without a route to the address (`net.pod_routes`)
shows that the pod is not there.

Invariant: an address is awaited for at most WAIT_S. By then the control plane has reported the pods
of a node as unready whose kubelet does not run. If an endpoint is still ready, this network plugin
gives its pods no routes that could show anything, and no address is awaited any more."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Set
from ipaddress import ip_address, ip_network

import structlog

from fairlead.errors import FairleadError
from fairlead.model import Family, HealthCheck
from fairlead.net.address import family_of
from fairlead.net.pod_routes import without_route

log = structlog.get_logger()

WAIT_S = 60.0
"""How long an address is awaited. The control plane reports the pods of a node as unready 40 to
50 s after the last sign of its kubelet (node-monitor-grace-period)."""


class AwaitedPods:
    """Remembers which addresses are awaited, and since when. `networks`: those of pods; other
    addresses, such as those of servers outside the cluster, are never awaited. Empty: not known."""

    def __init__(
        self,
        networks: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_S,
    ) -> None:
        self._networks = [ip_network(each) for each in networks]
        self._clock = clock
        self._wait_s = wait_s
        self._since_s: dict[str, float] = {}
        self._given_up = False

    def __bool__(self) -> bool:
        """Whether any address is awaited."""
        return bool(self._since_s)

    async def look(self, addresses: Iterable[str]) -> None:
        """Await those of the addresses that have no route."""
        if self._given_up or not (new := set(addresses).difference(self._since_s)):
            return
        if missing := set(filter(self._is_of_pod, await _without_route(new))):
            now_s = self._clock()
            self._since_s |= dict.fromkeys(missing, now_s)
            log.info("ready endpoints of this node have no route yet", addresses=sorted(missing))

    async def look_again(self, used: Collection[str]) -> set[str]:
        """Look for the awaited addresses among those that are `used`; the others are forgotten.
        Return those that are no longer awaited."""
        before = self._since_s
        missing = await _without_route(before.keys() & set(used))
        late_s = self._clock() - self._wait_s
        if late := sorted(each for each in missing if before[each] <= late_s):
            log.warning(
                "ready endpoints of this node have no route: the network plugin seems to give "
                "none, so the health ports count endpoints without it",
                addresses=late,
            )
            self._given_up, missing = True, set()
        self._since_s = {each: before[each] for each in missing}
        return before.keys() - missing

    def _is_of_pod(self, address: str) -> bool:
        value = ip_address(address)
        return not self._networks or any(value in network for network in self._networks)

    def count(self, check: HealthCheck) -> int:
        """Return the number of ready endpoints of a Service without those that are awaited. As in
        the plan, the family with the most endpoints counts."""
        if not self._since_s or self._since_s.keys().isdisjoint(check.addresses):
            return check.local_endpoints
        by_family: dict[Family, int] = {}
        for address in check.addresses:
            if address not in self._since_s:
                by_family[family_of(address)] = by_family.get(family_of(address), 0) + 1
        return max(by_family.values(), default=0)


async def _without_route(addresses: Set[str]) -> Set[str]:
    """Return the addresses to which the host has no route; none if the routes cannot be read."""
    if not addresses:
        return addresses
    try:
        return await asyncio.to_thread(without_route, addresses)
    except FairleadError as problem:
        log.warning("cannot read the routes to pods", problem=str(problem))
        return set()
