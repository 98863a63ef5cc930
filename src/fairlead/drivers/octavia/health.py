"""The operating status of load balancers and members according to Octavia, and where it contradicts
the Kubernetes API.

In: what was Found for each Service. Out: a LoadBalancerHealth for each load balancer, for `/state`.
Pure. The values of operating_status in Octavia's API are:

- ONLINE
- DRAINING: a member has weight 0
- DEGRADED: some members fail
- ERROR: a member fails, or all members of a pool fail
- NO_MONITOR: there is no health monitor
- OFFLINE: no status has been received yet, or the object is disabled

A member has a weight if, according to the Kubernetes API, pods on its node are ready."""

from collections.abc import Iterator, Mapping

from fairlead.drivers.octavia.balancers import BalancerState, Found, FoundPool
from fairlead.model import ServiceKey
from fairlead.role_state import LoadBalancerHealth, MemberHealth

FAILS = ("ERROR", "OFFLINE")


def healths(
    known: Mapping[ServiceKey, Found], seen_s_ago: Mapping[ServiceKey, float]
) -> list[LoadBalancerHealth]:
    return [
        _health(key, balancer, seen_s_ago.get(key, 0.0))
        for key in sorted(known)
        for balancer in known[key].balancers
    ]


def _health(key: ServiceKey, balancer: BalancerState, seen_s_ago: float) -> LoadBalancerHealth:
    pools = {pool.id: pool for pool in balancer.pools}
    members = {
        f"{each.protocol}/{each.port}": _members(pools[each.pool_id])
        for each in balancer.listeners
        if each.pool_id in pools
    }
    discrepancies = tuple(_discrepancies(balancer, members))
    return LoadBalancerHealth(
        str(key),
        balancer.id,
        balancer.provider,
        balancer.address,
        balancer.operating,
        members,
        discrepancies,
        seen_s_ago,
    )


def _members(pool: FoundPool) -> tuple[MemberHealth, ...]:
    return tuple(
        sorted(
            MemberHealth(
                each.member.address,
                each.member.port,
                each.member.weight,
                each.operating,
                pool.monitor is not None,
            )
            for each in pool.members
        )
    )


def _discrepancies(
    balancer: BalancerState, members: Mapping[str, tuple[MemberHealth, ...]]
) -> Iterator[str]:
    ready = [
        (listener, each)
        for listener, some in members.items()
        for each in some
        if each.weight and each.monitored
    ]
    if ready and balancer.operating in FAILS:
        yield f"pods are ready, but Octavia reports the load balancer as {balancer.operating}"
    for listener, each in ready:
        if each.operating in FAILS:
            yield (
                f"{listener}: pods on {each.address} are ready, but Octavia reports the member as "
                f"{each.operating}"
            )
