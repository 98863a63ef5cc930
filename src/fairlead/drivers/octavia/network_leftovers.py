"""Finds objects at Neutron of Services and clusters that no longer exist, and deletes them.

In: a Cloud, a cluster, the Services of the cluster. Out: NetworkLeftovers; and whether each could
be deleted. Load balancers are in `leftovers` and are deleted first, so that their floating IPs are
unattached. Invariant: objects whose description lacks the mark of the given cluster are neither
listed nor changed. A kept floating IP outlives its Service and its cluster unless the caller
includes it. A floating IP that is attached to another port is left alone."""

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

CLUSTER_GONE, SERVICE_GONE = "its cluster is gone, according to --cluster", "its Service is gone"
GROUP_UNUSED = "no Service has a rule in it"


class NetworkLeftover(Value, frozen=True):
    """A floating IP, or the rules of one Service in the cluster's security group. With neither, the
    group itself, which has no rules of Services; `service` is empty then."""

    cluster: str
    service: str
    why: str
    floating: FloatingIp | None = None
    rules: tuple[str, ...] = ()


class MarkedAtNeutron(msgspec.Struct, frozen=True):
    """The objects of one cluster at Neutron. `group`: the cluster has a security group."""

    floating: Sequence[FloatingIp]
    rules: Mapping[ServiceKey, Sequence[FoundRule]]
    group: bool


class _Marked(msgspec.Struct):
    id: str
    description: str | None = None


async def read_marked_at_neutron(cloud: Cloud, owner: Owner) -> MarkedAtNeutron:
    """Read all objects with the cluster's mark. Read the Services after this call, as for load
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
    """Return the leftovers. `alive`: the existing Services; None: the cluster no longer exists.
    `going`: ports of load balancers that are leftovers themselves. `kept`: include kept floating
    IPs."""
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
    """Delete the leftover. Return the reason of a failure, or ""."""
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
            raise Conflict(
                f"floating IP {now.address} is in use now", fix="list the leftovers again"
            )
        await cloud.write("DELETE", f"{FLOATING_IPS}/{now.id}", None, now.revision)
    except FairleadError as error:
        return str(error)
    return ""


async def clusters_at_neutron(cloud: Cloud, known: Container[str]) -> dict[str, int]:
    """Return the number of floating IPs and security groups of each other cluster in the project.
    Kept floating IPs are not counted."""
    of: dict[str, int] = {}
    for path in (FLOATING_IPS, GROUPS):
        for cluster in _clusters(await get_list(cloud, path, _Marked)):
            if cluster not in known:
                of[cluster] = of.get(cluster, 0) + 1
    return of


def _clusters(found: Iterable[_Marked]) -> Iterable[str]:
    return (cluster for each in found if (cluster := cluster_marked(each.description or "")))
