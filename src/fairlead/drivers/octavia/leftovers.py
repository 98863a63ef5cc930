"""Finds objects at Octavia of Services and clusters that no longer exist, and deletes them; for
Neutron see `network_leftovers`.

In: a Cloud, a cluster, the Services of the cluster. Out: Leftovers; and whether each could be
deleted. A running controller deletes leftovers of its own cluster itself. Leftovers remain after a
controller that was stopped, or lost its cloud, before its Services were deleted, and after clusters
that were deleted as a whole. Invariant: objects without the mark of the given cluster are neither
listed nor changed. On a load balancer with listeners of others, only the Service's own parts are
deleted."""

from collections import defaultdict
from collections.abc import Container, Sequence

from fairlead.drivers.octavia import answers
from fairlead.drivers.octavia.answers import get_list
from fairlead.drivers.octavia.apply import (
    DEFAULT_PACE,
    Pace,
    PollSchedule,
    StillWorking,
    carry_out,
    wait_settled,
)
from fairlead.drivers.octavia.balancers import ACTIVE, DELETED, ERROR, BalancerState
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.diff import drop
from fairlead.drivers.octavia.marks import Owner, clusters_of, ownerless
from fairlead.drivers.octavia.network_leftovers import (
    CLUSTER_GONE,
    SERVICE_GONE,
    clusters_at_neutron,
)
from fairlead.drivers.octavia.read import listeners_on, read_all, read_at
from fairlead.errors import Conflict, FairleadError, Unavailable
from fairlead.model import ServiceKey, Value


class Leftover(Value, frozen=True):
    """The objects of one Service on one load balancer. `whole`: the load balancer itself; otherwise
    the Service's listeners and pools on a load balancer of others. `service` and `uid` are empty if
    only the cluster is known."""

    cluster: str
    service: str
    uid: str
    load_balancer: str
    address: str
    whole: bool
    why: str
    balancer: BalancerState


class OtherCluster(Value, frozen=True):
    """The objects of a cluster other than the given one. `names`: names of some of its load
    balancers, by which people recognize the cluster. `network`: the number of floating IPs and
    security groups."""

    cluster: str
    load_balancers: int
    names: tuple[str, ...]
    network: int = 0


async def read_marked(cloud: Cloud, owner: Owner) -> list[BalancerState]:
    """Read everything at Octavia that carries the cluster's mark. Read the Services after this
    call: otherwise the load balancer of a Service that is created in between counts as a leftover.
    """
    balancers = [
        balancer for found in (await read_all(cloud, owner)).values() for balancer in found
    ]
    known = {balancer.id for balancer in balancers}
    listed = await get_list(cloud, "loadbalancers", answers.Balancer, {"tags": owner.tag})
    present = [one for one in listed if one.id not in known and one.provisioning_status != DELETED]
    return [*balancers, *(_ownerless_state(one) for one in present if ownerless(one.tags))]


def find_leftovers(
    balancers: Sequence[BalancerState],
    owner: Owner,
    alive: Container[tuple[ServiceKey, str]] | None,
) -> list[Leftover]:
    """Return the leftovers, ordered by Service. `alive`: the existing Services with their uids;
    None: the cluster no longer exists."""
    found = []
    for balancer in balancers:
        key = balancer.service if balancer.uid else None
        if alive is None:
            why = CLUSTER_GONE
        elif key is None:
            why = "the Services that used it are deleted"
        elif (key, balancer.uid) in alive:
            continue
        else:
            why = SERVICE_GONE
        if key is None and balancer.others:
            continue  # other listeners are on it
        whole = not balancer.others and balancer.ownership == "own"
        name = str(key) if key is not None else ""
        found.append(
            Leftover(
                owner.uid, name, balancer.uid, balancer.id, balancer.address, whole, why, balancer
            )
        )
    return sorted(found, key=lambda each: (each.service, each.load_balancer))


async def other_clusters(cloud: Cloud, known: Container[str]) -> list[OtherCluster]:
    """Count the objects of other clusters in the project. Octavia cannot search for tags by prefix,
    so all load balancers are listed."""
    names: dict[str, list[str]] = defaultdict(list)
    for one in await get_list(cloud, "loadbalancers", answers.Balancer):
        for cluster in clusters_of(one.tags):
            if cluster not in known and one.provisioning_status != DELETED:
                names[cluster].append(one.name)
    network = await clusters_at_neutron(cloud, known)
    return [
        OtherCluster(
            cluster, len(names[cluster]), tuple(sorted(names[cluster])[:3]), network.get(cluster, 0)
        )
        for cluster in sorted(names.keys() | network.keys())
    ]


async def delete(cloud: Cloud, leftover: Leftover, pace: Pace = DEFAULT_PACE) -> str:
    """Delete the leftover. Return the reason of a failure, or ""."""
    schedule = PollSchedule(pace)
    try:
        if leftover.balancer.status not in (ACTIVE, ERROR):
            await wait_settled(cloud, leftover.load_balancer, schedule)
        for balancer in await _as_it_is(cloud, leftover):
            await carry_out(cloud, drop(balancer), schedule, lambda: None)
    except StillWorking:
        return str(
            Unavailable(
                f"Octavia is still working on load balancer {leftover.load_balancer}",
                fix="try again later",
            )
        )
    except FairleadError as error:
        return str(error)
    return ""


async def _as_it_is(cloud: Cloud, leftover: Leftover) -> list[BalancerState]:
    """Read the present state of the leftover, because another deletion may have changed the same
    load balancer. The list is empty if the leftover is gone."""
    if leftover.uid:
        identity = leftover.balancer.service, leftover.uid
        found = await read_at(cloud, Owner(leftover.cluster, ""), leftover.load_balancer, identity)
        return [balancer for balancer in found if balancer.uid == leftover.uid]
    if await listeners_on(cloud, leftover.load_balancer):
        raise Conflict(
            f"load balancer {leftover.load_balancer} has listeners now",
            fix="list the leftovers again",
        )
    return [leftover.balancer]


def _ownerless_state(one: answers.Balancer) -> BalancerState:
    """Represent a shared load balancer without Services, under an empty ServiceKey."""
    return BalancerState(
        one.id,
        ServiceKey("", ""),
        "",
        one.provisioning_status,
        one.provider,
        one.vip_address or "",
        one.name,
        tags=tuple(sorted(one.tags)),
        others=len(one.listeners),
    )
