"""Finds at Neutron what was made for Services and clusters that are no more, and takes it away.

In: a Cloud, a cluster, the Services that it has. Out: NetworkLeftovers; and whether each could be
deleted. Load balancers are `leftovers`, and go before: their floating IPs lead nowhere then.
Invariant: nothing is named, or touched, whose description does not carry the mark of the cluster in
question. A floating IP that is kept outlives its Service and its cluster, for somebody wished so,
unless it is asked for; one that leads to what stays is left alone."""

from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from fairlead.drivers.octavia import neutron, security_group
from fairlead.drivers.octavia.answers import get_list
from fairlead.drivers.octavia.balancers import FloatingIp, FoundRule
from fairlead.drivers.octavia.changes import DeleteRules
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import Owner, cluster_marked
from fairlead.drivers.octavia.paths import FLOATING_IPS, GROUPS
from fairlead.errors import Conflict, FairleadError
from fairlead.model import ServiceKey, Value

CLUSTER_GONE, SERVICE_GONE = "its cluster is said to be gone", "its Service is gone"
GROUP_UNUSED = "no Service has a rule in it"


class NetworkLeftover(Value, frozen=True):
    """A floating IP, or the rules that one Service has left in the cluster's security group. With
    neither: the group itself, which has no rules of Services. `service`: empty for the group."""

    cluster: str
    service: str
    why: str
    floating: FloatingIp | None = None
    rules: tuple[str, ...] = ()


class MarkedAtNeutron(msgspec.Struct, frozen=True):
    """What there is of one cluster. `group`: it has a security group."""

    floating: Sequence[FloatingIp]
    rules: Mapping[ServiceKey, Sequence[FoundRule]]
    group: bool


class _Marked(msgspec.Struct):
    id: str
    description: str | None = None


async def read_marked_at_neutron(cloud: Cloud, owner: Owner) -> MarkedAtNeutron:
    """All that carries the cluster's mark. Services must be read later than this, as with load
    balancers."""
    floating = [
        each for each in await neutron.all_floating(cloud, owner) if each.service is not None
    ]
    return MarkedAtNeutron(
        floating,
        await security_group.all_rules(cloud, owner),
        await security_group.has_group(cloud, owner),
    )


def find_network_leftovers(
    theirs: MarkedAtNeutron,
    owner: Owner,
    alive: Container[ServiceKey] | None,
    going: Container[str],
    *,
    kept: bool = False,
) -> list[NetworkLeftover]:
    """`alive`: the Services that there are; None: the cluster is no more. `going`: ports of load
    balancers that are leftovers themselves. `kept`: floating IPs that are kept, too."""
    why = CLUSTER_GONE if alive is None else SERVICE_GONE

    def is_left(key: ServiceKey | None) -> bool:
        return key is not None and (alive is None or key not in alive)

    found = [
        NetworkLeftover(owner.uid, str(each.service), why, floating=each)
        for each in theirs.floating
        if is_left(each.service)
        and (kept or not each.kept)
        and (not each.port_id or each.port_id in going)
    ]
    found += [
        NetworkLeftover(owner.uid, str(key), why, rules=tuple(sorted(each.id for each in rules)))
        for key, rules in theirs.rules.items()
        if is_left(key)
    ]
    if theirs.group and not theirs.rules:
        found.append(
            NetworkLeftover(owner.uid, "", CLUSTER_GONE if alive is None else GROUP_UNUSED)
        )
    return sorted(found, key=lambda each: (each.service, each.floating is None))


async def delete(cloud: Cloud, leftover: NetworkLeftover) -> str:
    """Take it away; why that failed, or nothing."""
    owner, floating = Owner(leftover.cluster, ""), leftover.floating
    try:
        if floating is None:
            await security_group.delete_rules(
                cloud, owner, DeleteRules(ServiceKey.parse(leftover.service or "/"), leftover.rules)
            )
            return ""
        now = await neutron.floating_at(cloud, owner, floating.address)
        if now is None or now.id != floating.id:
            return ""
        if now.port_id not in ("", floating.port_id) or now.description != floating.description:
            raise Conflict(f"floating IP {now.address} is somebody's now", fix="look again")
        await cloud.write("DELETE", f"{FLOATING_IPS}/{now.id}", None, now.revision)
    except FairleadError as error:
        return str(error)
    return ""


async def clusters_at_neutron(cloud: Cloud, known: Container[str]) -> dict[str, int]:
    """Of other clusters in the project: how many floating IPs and security groups they have, kept
    ones aside."""
    of: dict[str, int] = {}
    for path in (FLOATING_IPS, GROUPS):
        for cluster in _clusters(await get_list(cloud, path, _Marked)):
            if cluster not in known:
                of[cluster] = of.get(cluster, 0) + 1
    return of


def _clusters(found: Iterable[_Marked]) -> Iterable[str]:
    return (cluster for each in found if (cluster := cluster_marked(each.description or "")))
