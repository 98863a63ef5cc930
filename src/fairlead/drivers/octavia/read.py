"""What there is at Octavia with our mark.

In: a Cloud, a tag that everything of a cluster or of one Service carries. Out: FoundTrees. A handful of calls whatever the
number of load balancers, and one for each pool that has members: their weights are told nowhere else.
Octavia lists a page of a thousand at most.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from fairlead.drivers.octavia.cloud import Cloud
from fairlead.drivers.octavia.marks import Owner, service_of, service_tag
from fairlead.drivers.octavia.tree import (
    DELETED,
    ERROR,
    FoundListener,
    FoundMember,
    FoundMonitor,
    FoundPool,
    FoundTree,
    Member,
    Monitor,
)
from fairlead.errors import Unavailable
from fairlead.kube.networks import read_address, read_network
from fairlead.model import ServiceKey

PAGE = 1000


class _Id(msgspec.Struct):
    id: str


class _Balancer(msgspec.Struct):
    id: str
    provisioning_status: str
    operating_status: str = ""
    provider: str = ""
    vip_address: str | None = None
    name: str = ""
    description: str | None = None
    tags: tuple[str, ...] = ()
    created_at: str | None = None


class _Listener(msgspec.Struct):
    id: str
    provisioning_status: str
    protocol: str
    protocol_port: int
    loadbalancers: tuple[_Id, ...] = ()
    default_pool_id: str | None = None
    connection_limit: int | None = None
    timeout_client_data: int | None = None
    timeout_member_connect: int | None = None
    timeout_member_data: int | None = None
    timeout_tcp_inspect: int | None = None
    allowed_cidrs: tuple[str, ...] | None = None
    insert_headers: Mapping[str, str] | None = None
    tags: tuple[str, ...] = ()


class _Persistence(msgspec.Struct):
    type: str
    persistence_timeout: int | None = None


class _Pool(msgspec.Struct):
    id: str
    provisioning_status: str
    protocol: str
    lb_algorithm: str
    name: str | None = None
    loadbalancers: tuple[_Id, ...] = ()
    members: tuple[_Id, ...] = ()
    session_persistence: _Persistence | None = None


class _Monitor(msgspec.Struct):
    id: str
    provisioning_status: str
    type: str
    delay: int
    timeout: int
    max_retries: int
    max_retries_down: int = 3
    url_path: str | None = None
    pools: tuple[_Id, ...] = ()


class _Member(msgspec.Struct):
    id: str
    provisioning_status: str
    address: str
    protocol_port: int
    operating_status: str = ""
    weight: int | None = 1
    monitor_port: int | None = None
    subnet_id: str | None = None


ItemT = TypeVar("ItemT", _Balancer, _Listener, _Pool, _Monitor, _Member)


async def read_all(cloud: Cloud, owner: Owner) -> dict[ServiceKey, list[FoundTree]]:
    """Everything of this cluster."""
    return await _read(cloud, owner.tag)


async def read_one(cloud: Cloud, owner: Owner, key: ServiceKey) -> list[FoundTree]:
    """Everything of one Service."""
    return (await _read(cloud, f"{owner.tag},{service_tag(key)}")).get(key, [])


async def settled(cloud: Cloud, balancer_id: str) -> str:
    """The status of a load balancer on which nothing is being done; PENDING while something is, be it on the last of its
    children: provider ovn calls a load balancer ACTIVE when the first of several things is done. DELETED: it is gone. ERROR:
    it has failed, whatever its children are waiting for."""
    body = await cloud.get(f"loadbalancers/{balancer_id}/status")
    if body is None:
        return DELETED
    whole = msgspec.json.decode(body, type=dict[str, dict[str, dict[str, object]]])
    status = str(whole.get("statuses", {}).get("loadbalancer", {}).get("provisioning_status", DELETED))
    return "PENDING" if b"PENDING_" in body and status not in (DELETED, ERROR) else status


async def _read(cloud: Cloud, tags: str) -> dict[ServiceKey, list[FoundTree]]:
    balancers = [each for each in await _list(cloud, "loadbalancers", _Balancer, tags) if each.provisioning_status != DELETED]
    if not balancers:
        return {}
    listeners, pools, monitors = await asyncio.gather(
        _list(cloud, "listeners", _Listener, tags),
        _list(cloud, "pools", _Pool, tags),
        _list(cloud, "healthmonitors", _Monitor, tags),
    )
    with_members = [pool for pool in pools if pool.members]
    lists = await asyncio.gather(*(_list(cloud, f"pools/{each.id}/members", _Member, "") for each in with_members))
    members = {pool.id: found for pool, found in zip(with_members, lists, strict=True)}
    monitor_of = {pool.id: each for each in monitors for pool in each.pools}
    pools_of: dict[str, list[FoundPool]] = defaultdict(list)
    for pool in pools:
        for balancer in pool.loadbalancers:
            pools_of[balancer.id].append(_pool(pool, members.get(pool.id, ()), monitor_of.get(pool.id)))
    listeners_of: dict[str, list[FoundListener]] = defaultdict(list)
    for listener in listeners:
        for balancer in listener.loadbalancers:
            listeners_of[balancer.id].append(_listener(listener))
    trees: dict[ServiceKey, list[FoundTree]] = defaultdict(list)
    for one in balancers:
        if (whose := service_of(one.tags)) is not None:
            key, uid = whose
            trees[key].append(_tree(one, key, uid, listeners_of[one.id], pools_of[one.id]))
    return {key: sorted(found, key=lambda tree: (tree.created, tree.id)) for key, found in trees.items()}


def _tree(
    one: _Balancer, key: ServiceKey, uid: str, listeners: Iterable[FoundListener], pools: Iterable[FoundPool]
) -> FoundTree:
    return FoundTree(
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
        listeners=tuple(sorted(listeners)),
        pools=tuple(sorted(pools, key=lambda pool: pool.id)),
    )


def _listener(one: _Listener) -> FoundListener:
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


def _pool(one: _Pool, members: Iterable[_Member], monitor: _Monitor | None) -> FoundPool:
    persistence = one.session_persistence
    affinity_s = None
    if persistence is not None:
        affinity_s = (persistence.persistence_timeout or 0) if persistence.type == "SOURCE_IP" else -1
    return FoundPool(
        id=one.id,
        status=one.provisioning_status,
        name=one.name or "",
        protocol=one.protocol,
        method=one.lb_algorithm,
        affinity_s=affinity_s,
        members=tuple(sorted(map(_member, members), key=lambda each: each.id)),
        monitor=_monitor(monitor) if monitor is not None else None,
    )


def _monitor(one: _Monitor) -> FoundMonitor:
    path = one.url_path or "" if one.type == "HTTP" else ""
    found = Monitor(one.type, one.delay, one.timeout, one.max_retries, one.max_retries_down, path)
    return FoundMonitor(one.id, one.provisioning_status, found)


def _member(one: _Member) -> FoundMember:
    address = read_address(one.address) or one.address
    weight = 1 if one.weight is None else one.weight
    found = Member(address, one.protocol_port, weight, one.monitor_port, one.subnet_id or "")
    return FoundMember(one.id, one.provisioning_status, found, one.operating_status)


async def _list(cloud: Cloud, path: str, type_: type[ItemT], tags: str) -> list[ItemT]:
    """All pages. Raises Unavailable for an answer that is none of Octavia's."""
    name = path.rpartition("/")[2]
    found: list[ItemT] = []
    while True:
        params = {"limit": str(PAGE)} | ({"tags": tags} if tags else {}) | ({"marker": found[-1].id} if found else {})
        body = await cloud.get(path, params)
        if body is None:
            return found  # gone since it was listed
        try:
            page = msgspec.convert(msgspec.json.decode(body)[name], list[type_])  # type: ignore[valid-type]
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
            raise Unavailable(f"GET /lbaas/{path}: what was answered cannot be read: {error}") from error
        found += page
        if len(page) < PAGE:
            return found
