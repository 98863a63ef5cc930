"""The JSON bodies of requests to Octavia's API.

In: values of `balancers`. Out: bodies of requests, without the enclosing object name. Pure. Fields:
Octavia API reference, version 2.30. An update leaves omitted fields as they are, except in a batch
of members, where an omitted field returns to its default. Null means the default."""

from collections.abc import Iterable, Mapping

from fairlead.drivers.octavia.balancers import (
    BalancerSpec,
    Listener,
    Member,
    Monitor,
    Pool,
    family_of,
    pool_name,
)
from fairlead.drivers.octavia.marks import explicit_tags
from fairlead.model import OctaviaPlace

Body = dict[str, object]

HEADER = "X-Forwarded-For"
CODES = "200"
_DEFAULTS: Body = {"connection_limit": -1, "allowed_cidrs": None, "insert_headers": {}}
"""Default values of a listener. They are omitted, because a provider may reject a field even with
its default value."""


def member(one: Member) -> Body:
    body: Body = {"address": one.address, "protocol_port": one.port, "weight": one.weight}
    if one.monitor_port is not None:
        body["monitor_port"] = one.monitor_port
    if one.subnet_id:
        body["subnet_id"] = one.subnet_id
    return body


def member_settings(one: Member) -> Body:
    """Return the fields of an existing member that can be changed."""
    return {"weight": one.weight, "monitor_port": one.monitor_port}


def members(all_: Iterable[Member]) -> Body:
    return {"members": [member(one) for one in all_]}


def monitor_settings(one: Monitor) -> Body:
    """Return the fields of an existing monitor that can be changed."""
    body: Body = {
        "delay": one.delay_s,
        "timeout": one.timeout_s,
        "max_retries": one.max_retries,
        "max_retries_down": one.max_retries_down,
    }
    return body | ({"url_path": one.path, "expected_codes": CODES} if one.path else {})


def monitor(one: Monitor, tags: Iterable[str]) -> Body:
    return {"type": one.type, **monitor_settings(one), "tags": list(tags)}


def pool_settings(one: Pool) -> Body:
    """Return the fields of an existing pool that can be changed."""
    persistence: Body | None = None
    if one.affinity_s is not None:
        persistence = {"type": "SOURCE_IP"}
        if one.affinity_s:
            persistence["persistence_timeout"] = one.affinity_s
    return {"lb_algorithm": one.method, "session_persistence": persistence}


def pool(listener: Listener, tags: Iterable[str]) -> Body:
    one = listener.pool
    body = {
        "name": pool_name(listener),
        "protocol": one.protocol,
        **pool_settings(one),
        "tags": list(tags),
    }
    return {name: value for name, value in body.items() if value is not None}


def listener_settings(one: Listener, tags: Iterable[str], stale: Iterable[str] = ()) -> Body:
    """Return the fields of an existing listener that can be changed. `stale`: names of time-outs
    that the Service no longer sets; they return to the defaults."""
    return {
        "connection_limit": one.connection_limit,
        "allowed_cidrs": list(one.cidrs) or None,
        "insert_headers": {HEADER: "true"} if one.forwarded_for else {},
        **dict.fromkeys(sorted(stale)),
        **dict(one.timeouts),
        "tags": [*tags, *explicit_tags(name for name, _ in one.timeouts)],
    }


def listener(one: Listener, tags: Iterable[str]) -> Body:
    """Return the body of a new listener."""
    name: Body = {
        "name": f"{one.protocol}-{one.port}",
        "protocol": one.protocol,
        "protocol_port": one.port,
    }
    return without_defaults(listener_settings(one, tags) | name)


def without_defaults(body: Body) -> Body:
    return {
        name: value
        for name, value in body.items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    }


def load_balancer(balancer: BalancerSpec) -> Body:
    """Return the body that creates a load balancer with everything below it in one call. If the
    answer is lost, no partial load balancer remains, and the tags identify the whole one."""
    place = balancer.place
    # The shown address is the load balancer's own address only if it has no floating IP.
    before = {family_of(each): each for each in reversed(balancer.addresses)}
    address = place.address or (
        before.get(balancer.families[0], "") if balancer.floating is None else ""
    )
    where: Mapping[str, str] = {
        "vip_subnet_id": place.subnet_id,
        "vip_network_id": place.network_id if not place.subnet_id else "",
        "vip_port_id": place.port_id,
        "vip_address": address if not place.port_id else "",
        "flavor_id": place.flavor_id,
        "availability_zone": place.availability_zone,
    }
    listeners = []
    for one in balancer.listeners:
        nested = pool(one, balancer.child_tags) | {
            "members": [member(each) for each in one.pool.members]
        }
        if one.pool.monitor is not None:
            nested["healthmonitor"] = monitor(one.pool.monitor, balancer.monitor_tags)
        listeners.append(listener(one, balancer.child_tags) | {"default_pool": nested})
    return {
        "name": balancer.name,
        "description": balancer.description,
        "provider": balancer.provider,
        "tags": list(balancer.tags),
        **{name: value for name, value in where.items() if value},
        **(
            {"additional_vips": [_second(place, before.get("IPv6", ""))]}
            if place.subnet_id_v6
            else {}
        ),
        "listeners": listeners,
    }


def _second(place: OctaviaPlace, before: str) -> Body:
    address = place.address_v6 or before
    return {"subnet_id": place.subnet_id_v6, **({"ip_address": address} if address else {})}
