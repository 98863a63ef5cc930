"""Finds at Octavia what was made for Services and clusters that are no more, and takes it away; for
Neutron see `network_leftovers`.

In: a Cloud, a cluster, the Services that it has. Out: Leftovers; and whether each could be deleted.
A controller that runs takes leftovers of its cluster away by itself. What stays is of one that was
ended, or lost its cloud, before its Services went, and of clusters that were deleted as a whole.
Invariant: nothing is named, or touched, that does not carry the mark of the cluster in question. On
a load balancer with listeners of others only the Service's own parts go."""

from collections import defaultdict
from collections.abc import Container, Sequence

from fairlead.drivers.octavia import answers
from fairlead.drivers.octavia.answers import get_list
from fairlead.drivers.octavia.apply import (
    PATIENT,
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
    """What one Service has left on one load balancer. `whole`: the load balancer itself; otherwise
    its listeners and pools there, on one of others. `service` and `uid`: empty where only the
    cluster is known."""

    cluster: str
    service: str
    uid: str
    load_balancer: str
    address: str
    whole: bool
    why: str
    balancer: BalancerState


class OtherCluster(Value, frozen=True):
    """What a cluster has that was not asked about. `names`: of some of its load balancers, by which
    people know it. `network`: floating IPs and security groups."""

    cluster: str
    load_balancers: int
    names: tuple[str, ...]
    network: int = 0


async def read_marked(cloud: Cloud, owner: Owner) -> list[BalancerState]:
    """All that carries the cluster's mark. Services must be read later than this: one that is made
    in between would have its load balancer taken for a leftover."""
    balancers = [
        balancer for found in (await read_all(cloud, owner)).values() for balancer in found
    ]
    known = {balancer.id for balancer in balancers}
    listed = await get_list(cloud, "loadbalancers", answers.Balancer, {"tags": owner.tag})
    there = [one for one in listed if one.id not in known and one.provisioning_status != DELETED]
    return [*balancers, *(_ownerless_state(one) for one in there if ownerless(one.tags))]


def find_leftovers(
    balancers: Sequence[BalancerState],
    owner: Owner,
    alive: Container[tuple[ServiceKey, str]] | None,
) -> list[Leftover]:
    """Those that nobody has any more, in the order of their Services. `alive`: the Services that
    there are, with their uids; None: the cluster is no more."""
    found = []
    for balancer in balancers:
        key = balancer.service if balancer.uid else None
        if alive is None:
            why = CLUSTER_GONE
        elif key is None:
            why = "the Services that were on it are gone"
        elif (key, balancer.uid) in alive:
            continue
        else:
            why = SERVICE_GONE
        if key is None and balancer.others:
            continue  # somebody is on it
        whole = not balancer.others and balancer.ownership == "own"
        name = str(key) if key is not None else ""
        found.append(
            Leftover(
                owner.uid, name, balancer.uid, balancer.id, balancer.address, whole, why, balancer
            )
        )
    return sorted(found, key=lambda each: (each.service, each.load_balancer))


async def other_clusters(cloud: Cloud, known: Container[str]) -> list[OtherCluster]:
    """What the project has of other clusters. Octavia finds no tags by their beginning, so
    everything is listed."""
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


async def delete(cloud: Cloud, leftover: Leftover, pace: Pace = PATIENT) -> str:
    """Take it away; why that failed, or nothing."""
    schedule = PollSchedule(pace)
    try:
        if leftover.balancer.status not in (ACTIVE, ERROR):
            await wait_settled(cloud, leftover.load_balancer, schedule)
        for balancer in await _as_it_is(cloud, leftover):
            await carry_out(cloud, drop(balancer), schedule, lambda: None)
    except StillWorking:
        return str(
            Unavailable(
                f"Octavia is still at work on load balancer {leftover.load_balancer}",
                fix="try again later",
            )
        )
    except FairleadError as error:
        return str(error)
    return ""


async def _as_it_is(cloud: Cloud, leftover: Leftover) -> list[BalancerState]:
    """Now: what was on the same load balancer may have gone just before. None: it is gone by
    itself."""
    if leftover.uid:
        whose = leftover.balancer.service, leftover.uid
        found = await read_at(cloud, Owner(leftover.cluster, ""), leftover.load_balancer, whose)
        return [balancer for balancer in found if balancer.uid == leftover.uid]
    if await listeners_on(cloud, leftover.load_balancer):
        raise Conflict(
            f"on load balancer {leftover.load_balancer} there are listeners now", fix="look again"
        )
    return [leftover.balancer]


def _ownerless_state(one: answers.Balancer) -> BalancerState:
    """A load balancer that was shared, as the Service that nobody is."""
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
