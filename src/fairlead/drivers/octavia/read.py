"""Reads the objects at Octavia that carry the cluster's mark, or that are on a load balancer that a
Service is to be on.

In: a Cloud, and a tag of a cluster or of one Service, or the id of a load balancer. Out:
BalancerStates, one for each Service on each load balancer. The number of calls is small and does
not depend on the number of load balancers, except for one call for each pool with members: the API
shows their weights nowhere else."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fairlead.drivers.octavia import answers
from fairlead.drivers.octavia.answers import decode, get_list, get_one
from fairlead.drivers.octavia.balancers import (
    DELETED,
    ERROR,
    BalancerState,
    Candidate,
    FoundListener,
    FoundMember,
    FoundMonitor,
    FoundPool,
    Member,
    Monitor,
    Ownership,
    PortInUse,
)
from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import ANY, OCCM, Owner, service_tag
from fairlead.drivers.octavia.paths import url_of
from fairlead.kube.networks import read_address, read_network
from fairlead.model import ServiceKey

ServiceIdentity = tuple[ServiceKey, str]
"""The key of a Service, and its uid."""


async def read_all(cloud: Cloud, owner: Owner) -> dict[ServiceKey, list[BalancerState]]:
    """Read everything that carries the mark of this cluster, including parts on load balancers of
    others."""
    return await _read(cloud, owner, owner.tag, everywhere=True)


async def read_one(cloud: Cloud, owner: Owner, key: ServiceKey) -> list[BalancerState]:
    """Read the load balancers that were made for one Service, with all parts of the Service on
    them."""
    return (await _read(cloud, owner, f"{owner.tag},{service_tag(key)}", everywhere=False)).get(
        key, []
    )


async def read_at(
    cloud: Cloud,
    owner: Owner,
    id_: str,
    identity: ServiceIdentity,
    names: Collection[str] | None = None,
) -> list[BalancerState]:
    """Read the parts of this Service, and of earlier Services with the same name, on the load
    balancer with this id; the list is empty if the load balancer is gone. `names`: the names that
    cloud-provider-openstack gives to the Service's load balancer; if given, parts without a mark,
    or with the tag of cloud-provider-openstack for this Service, also count as parts of the
    Service."""
    one = await get_one(cloud, f"loadbalancers/{id_}", answers.Balancer)
    if one is None or one.provisioning_status == DELETED:
        return []
    of = {"loadbalancer_id": id_}
    listeners, pools = await asyncio.gather(
        get_list(cloud, "listeners", answers.Listener, of),
        get_list(cloud, "pools", answers.Pool, of),
    )

    def identity_of(tags: Collection[str]) -> ServiceIdentity | None:
        if (marked := owner.marked_service(tags)) is not None or names is None:
            return marked
        foreign = any(tag.startswith((OCCM, ANY)) and tag not in names for tag in tags)
        return None if foreign else identity

    owned = _owned(owner, listeners, pools)
    for listener in listeners:
        found = identity_of(listener.tags)
        if found is not None:
            owned[listener.id] = found
            if listener.default_pool_id:
                owned.setdefault(listener.default_pool_id, found)
    with_monitor = [
        pool.healthmonitor_id for pool in pools if pool.healthmonitor_id and pool.id in owned
    ]
    monitors = await asyncio.gather(
        *(get_one(cloud, f"healthmonitors/{each}", answers.Monitor) for each in with_monitor)
    )
    own = {identity, *(found for found in owned.values() if found[0] == identity[0])}
    pools = [pool for pool in pools if owned.get(pool.id) in own]
    parts = _Parts([one], listeners, pools, [each for each in monitors if each is not None])
    balancers = await _states(cloud, owner, parts, owned, own)
    ownership: Ownership = "guest" if names is None else "foreign"
    return [
        msgspec.structs.replace(balancer, ownership=ownership)
        if balancer.ownership == "guest"
        else balancer
        for balancer in balancers
    ]


async def find_called(cloud: Cloud, name: str) -> list[Candidate]:
    """Return the load balancers of this name, which need not be unique."""
    found = await get_list(cloud, "loadbalancers", answers.Balancer, {"name": name})
    return [
        _candidate(each)
        for each in found
        if each.provisioning_status not in (DELETED, "PENDING_DELETE")
    ]


async def find_by_id(cloud: Cloud, id_: str) -> Candidate | None:
    found = await get_one(cloud, f"loadbalancers/{id_}", answers.Balancer)
    return (
        _candidate(found)
        if found is not None and found.provisioning_status not in (DELETED, "PENDING_DELETE")
        else None
    )


async def listeners_on(cloud: Cloud, id_: str) -> set[str]:
    """Return the ids of all listeners of the load balancer, also of other users."""
    found = await get_one(cloud, f"loadbalancers/{id_}", answers.Balancer)
    return {each.id for each in found.listeners} if found is not None else set()


async def settled(cloud: Cloud, balancer_id: str) -> str:
    """Return the status of a load balancer, or PENDING while Octavia works on it or on any of its
    children: provider ovn reports a load balancer as ACTIVE when the first of several operations is
    done. DELETED: the load balancer is gone. ERROR: it has failed, even if children are still
    pending. Raise Unavailable or Refused as `Cloud.get`, and Unavailable for an answer without
    it."""
    path = f"loadbalancers/{balancer_id}/status"
    body = await cloud.get(path)
    if body is None:
        return DELETED
    tree = decode(f"GET {url_of(path)}", body, answers.StatusTree)
    status = tree.statuses.loadbalancer.provisioning_status
    return "PENDING" if b"PENDING_" in body and status not in (DELETED, ERROR) else status


class _Parts(NamedTuple):
    listed: Sequence[answers.Balancer]
    listeners: Sequence[answers.Listener]
    pools: Sequence[answers.Pool]
    monitors: Sequence[answers.Monitor]


async def _read(
    cloud: Cloud, owner: Owner, tags: str, *, everywhere: bool
) -> dict[ServiceKey, list[BalancerState]]:
    of = {"tags": tags}
    found = await get_list(cloud, "loadbalancers", answers.Balancer, of)
    listed = [each for each in found if each.provisioning_status != DELETED]
    if not listed and not everywhere:
        return {}
    listeners, pools, monitors = await asyncio.gather(
        get_list(cloud, "listeners", answers.Listener, of),
        get_list(cloud, "pools", answers.Pool, of),
        get_list(cloud, "healthmonitors", answers.Monitor, of),
    )
    if everywhere:
        hosts = {each.id for listener in listeners for each in listener.loadbalancers}
        hosts |= {each.id for pool in pools for each in pool.loadbalancers}
        hosts -= {each.id for each in found}
        others = await asyncio.gather(
            *(get_one(cloud, f"loadbalancers/{id_}", answers.Balancer) for id_ in sorted(hosts))
        )
        listed += [
            each for each in others if each is not None and each.provisioning_status != DELETED
        ]
    owned = _owned(owner, listeners, pools)
    balancers: dict[ServiceKey, list[BalancerState]] = defaultdict(list)
    for balancer in await _states(cloud, owner, _Parts(listed, listeners, pools, monitors), owned):
        balancers[balancer.service].append(balancer)
    return {
        key: sorted(own, key=lambda balancer: (balancer.created, balancer.id))
        for key, own in balancers.items()
    }


def _owned(
    owner: Owner, listeners: Iterable[answers.Listener], pools: Iterable[answers.Pool]
) -> dict[str, ServiceIdentity]:
    """Return the Service of each marked listener and pool, by its id."""
    tags = {each.id: each.tags for each in listeners} | {each.id: each.tags for each in pools}
    return {
        id_: identity
        for id_, own in tags.items()
        if (identity := owner.marked_service(own)) is not None
    }


async def _states(
    cloud: Cloud,
    owner: Owner,
    parts: _Parts,
    owned: Mapping[str, ServiceIdentity],
    services: Collection[ServiceIdentity] | None = None,
) -> list[BalancerState]:
    """Return the states of the listed load balancers. `owned`: the Service of each listener and
    pool, by its id. `services`: return a state for each of these Services on each load balancer;
    None: for each Service that has parts on the load balancer, or for which it was made."""
    with_members = [pool for pool in parts.pools if pool.members]
    members_of = [
        get_list(cloud, f"pools/{each.id}/members", answers.Member) for each in with_members
    ]
    members = {
        pool.id: found
        for pool, found in zip(with_members, await asyncio.gather(*members_of), strict=True)
    }
    monitor_of = {pool.id: each for each in parts.monitors for pool in each.pools}
    pools_of: dict[tuple[str, ServiceIdentity], list[FoundPool]] = defaultdict(list)
    for pool in parts.pools:
        if (identity := owned.get(pool.id)) is not None:
            for on in pool.loadbalancers:
                pools_of[on.id, identity].append(
                    _pool(pool, members.get(pool.id, ()), monitor_of.get(pool.id))
                )
    listeners_of: dict[str, list[answers.Listener]] = defaultdict(list)
    for listener in parts.listeners:
        for on in listener.loadbalancers:
            listeners_of[on.id].append(listener)
    identities_on: dict[str, set[ServiceIdentity]] = defaultdict(set)
    for id_, identity in [
        *pools_of,
        *(
            (id_, owned[one.id])
            for id_, all_ in listeners_of.items()
            for one in all_
            if one.id in owned
        ),
    ]:
        identities_on[id_].add(identity)
    balancers = []
    for one in parts.listed:
        holder = owner.marked_service(one.tags)
        for identity in {holder, *identities_on[one.id]} - {None} if services is None else services:
            assert identity is not None
            own = [each for each in listeners_of[one.id] if owned.get(each.id) == identity]
            # Listeners of an earlier Service of the same name do not count as ports in use, because
            # they are deleted first.
            rest = [
                each for each in listeners_of[one.id] if owned.get(each.id, ("",))[0] != identity[0]
            ]
            balancer = _state(
                one, identity[0], identity[1], map(_listener, own), pools_of[one.id, identity]
            )
            ownership: Ownership = "own" if holder == identity else "guest"
            ports_in_use = tuple(
                sorted(
                    PortInUse(each.protocol, each.protocol_port, _holder(each, owned))
                    for each in rest
                )
            )
            others = len({each.id for each in one.listeners} - {each.id for each in own})
            balancers.append(
                msgspec.structs.replace(
                    balancer, ownership=ownership, others=others, ports_in_use=ports_in_use
                )
            )
    return balancers


def _holder(one: answers.Listener, owned: Mapping[str, ServiceIdentity]) -> str:
    if one.id in owned:
        return f"Service {owned[one.id][0]}"
    return f"listener {one.name or one.id}, which is not of this cluster"


def _candidate(one: answers.Balancer) -> Candidate:
    return Candidate(
        one.id,
        one.name,
        one.description or "",
        tuple(one.tags),
        one.provider,
        one.vip_address or "",
    )


def _state(
    one: answers.Balancer,
    key: ServiceKey,
    uid: str,
    listeners: Iterable[FoundListener],
    pools: Iterable[FoundPool],
) -> BalancerState:
    return BalancerState(
        id=one.id,
        service=key,
        uid=uid,
        status=one.provisioning_status,
        provider=one.provider,
        address=read_address(one.vip_address or "") or "",
        name=one.name,
        description=one.description or "",
        tags=tuple(sorted(one.tags)),
        created=one.created_at or "",
        operating=one.operating_status,
        port_id=one.vip_port_id or "",
        subnet_id=one.vip_subnet_id or "",
        further=tuple(
            (read_address(each.ip_address) or "", each.subnet_id or "")
            for each in one.additional_vips
            if each.ip_address
        ),
        listeners=tuple(sorted(listeners)),
        pools=tuple(sorted(pools, key=lambda pool: pool.id)),
    )


def _listener(one: answers.Listener) -> FoundListener:
    timeouts = {
        "timeout_client_data": one.timeout_client_data,
        "timeout_member_connect": one.timeout_member_connect,
        "timeout_member_data": one.timeout_member_data,
        "timeout_tcp_inspect": one.timeout_tcp_inspect,
    }
    return FoundListener(
        id=one.id,
        status=one.provisioning_status,
        protocol=one.protocol,
        port=one.protocol_port,
        pool_id=one.default_pool_id or "",
        connection_limit=-1 if one.connection_limit is None else one.connection_limit,
        timeouts=tuple((name, value) for name, value in timeouts.items() if value is not None),
        cidrs=tuple(sorted(read_network(each) or each for each in one.allowed_cidrs or ())),
        forwarded_for=(one.insert_headers or {}).get("X-Forwarded-For") == "true",
        tags=tuple(sorted(one.tags)),
    )


def _pool(
    one: answers.Pool, members: Iterable[answers.Member], monitor: answers.Monitor | None
) -> FoundPool:
    persistence = one.session_persistence
    affinity_s = None
    if persistence is not None:
        affinity_s = (
            (persistence.persistence_timeout or 0) if persistence.type == "SOURCE_IP" else -1
        )
    return FoundPool(
        id=one.id,
        status=one.provisioning_status,
        name=one.name or "",
        protocol=one.protocol,
        method=one.lb_algorithm,
        affinity_s=affinity_s,
        members=tuple(sorted(map(_member, members), key=lambda each: each.id)),
        monitor=_monitor(monitor) if monitor is not None else None,
        tags=tuple(sorted(one.tags)),
    )


def _monitor(one: answers.Monitor) -> FoundMonitor:
    path = one.url_path or "" if one.type == "HTTP" else ""
    found = Monitor(one.type, one.delay, one.timeout, one.max_retries, one.max_retries_down, path)
    return FoundMonitor(one.id, one.provisioning_status, found, tuple(sorted(one.tags)))


def _member(one: answers.Member) -> FoundMember:
    address = read_address(one.address) or one.address
    weight = 1 if one.weight is None else one.weight
    found = Member(address, one.protocol_port, weight, one.monitor_port, one.subnet_id or "")
    return FoundMember(one.id, one.provisioning_status, found, one.operating_status)
