"""What Octavia is to have for each Service.

In: LoadBalancers with OctaviaSettings. Out: Trees. Pure.
"""

import ipaddress
from collections.abc import Iterable, Mapping

from fairlead.drivers.octavia.marks import Owner
from fairlead.drivers.octavia.tree import Explicit, Listener, Member, Monitor, Pool, Tree
from fairlead.model import Family, LoadBalancer, OctaviaSettings, ServiceKey
from fairlead.model import Listener as Wanted

HEAVIEST = 256
"""The most that a member may weigh."""
NOBODY: Mapping[Family, str] = {"IPv4": "255.255.255.255/32", "IPv6": "::/128"}
"""Addresses that nobody calls from: an empty list would let everybody in."""
SHORTEST_UDP_DELAY_S = 3
"""Octavia asks over UDP no more often."""


def trees_of(intents: Mapping[ServiceKey, LoadBalancer], owner: Owner) -> dict[ServiceKey, Tree]:
    return {key: _tree(intent, intent.octavia, owner) for key, intent in intents.items() if intent.octavia is not None}


def _tree(intent: LoadBalancer, settings: OctaviaSettings, owner: Owner) -> Tree:
    return Tree(
        service=intent.service,
        uid=intent.uid,
        provider=settings.provider,
        name=owner.load_balancer_name(intent.service),
        description=owner.description(intent.service),
        tags=owner.tags(intent.service, intent.uid),
        child_tags=owner.tags(intent.service, intent.uid),
        place=settings.place,
        listeners=tuple(sorted(_listener(intent, settings, each) for each in intent.listeners)),
        addresses=intent.addresses,
        why=settings.why,
    )


def _listener(intent: LoadBalancer, settings: OctaviaSettings, wanted: Wanted) -> Listener:
    tcp = wanted.protocol == "TCP"
    timeouts: dict[Explicit, int | None] = {
        "timeout_client_data": settings.client_ms,
        "timeout_member_connect": settings.connect_ms,
        "timeout_member_data": settings.member_ms,
        "timeout_tcp_inspect": settings.inspect_ms,
    }
    return Listener(
        protocol="HTTP" if tcp and settings.forwarded_for else wanted.protocol,
        port=wanted.port,
        pool=_pool(intent, settings, wanted),
        connection_limit=settings.connection_limit,
        timeouts=tuple((name, value) for name, value in sorted(timeouts.items()) if value is not None and tcp),
        cidrs=_cidrs(intent.source_ranges, wanted.family),
        forwarded_for=tcp and settings.forwarded_for,
    )


def _pool(intent: LoadBalancer, settings: OctaviaSettings, wanted: Wanted) -> Pool:
    protocol: str = wanted.protocol
    if protocol == "TCP":
        protocol = "HTTP" if settings.forwarded_for else {"": "TCP", "v1": "PROXY", "v2": "PROXYV2"}[settings.header]
    affinity_s = None
    if intent.affinity_timeout_s:
        # How long can be said of protocols without connections alone.
        affinity_s = intent.affinity_timeout_s if wanted.protocol != "TCP" and settings.provider == "amphora" else 0
    monitor = _monitor(intent, settings, wanted)
    port = intent.health_monitor.port if monitor is not None and monitor.type == "HTTP" and intent.health_monitor else None
    return Pool(protocol, settings.method, _members(settings, wanted, port), monitor, affinity_s)


def _monitor(intent: LoadBalancer, settings: OctaviaSettings, wanted: Wanted) -> Monitor | None:
    type_, checks = dict(settings.asking).get(wanted.protocol), settings.checks
    if type_ is None or checks is None:
        return None
    delay_s = max(checks.delay_s, SHORTEST_UDP_DELAY_S) if type_ == "UDP-CONNECT" else checks.delay_s
    path = intent.health_monitor.path if type_ == "HTTP" and intent.health_monitor else ""
    return Monitor(type_, delay_s, checks.timeout_s, checks.rise, checks.fall, path)


def _members(settings: OctaviaSettings, wanted: Wanted, monitor_port: int | None) -> tuple[Member, ...]:
    """A node that gets nothing new keeps its connections where weights are understood: as one without weight."""
    weighted = settings.provider == "amphora"
    heaviest = max((each.weight for each in wanted.members), default=0)
    members = []
    for each in wanted.members:
        weight = each.weight if each.state == "active" else 0
        if heaviest > HEAVIEST and weight:
            weight = max(1, weight * HEAVIEST // heaviest)
        if weighted or weight:
            members.append(
                Member(each.address, wanted.node_port, weight if weighted else 1, monitor_port, settings.member_subnet_id)
            )
    return tuple(sorted(members))


def _cidrs(ranges: Iterable[str], family: Family) -> tuple[str, ...]:
    """Those of the family: Octavia refuses any other."""
    given = {ipaddress.ip_network(text, strict=False) for text in ranges}
    own = {str(each) for each in given if (each.version == 6) == (family == "IPv6")}
    return tuple(sorted(own or {NOBODY[family]})) if given else ()
