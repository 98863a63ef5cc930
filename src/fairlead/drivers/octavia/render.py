"""Computes the desired state at Octavia for each Service.

In: LoadBalancers with OctaviaSettings. Out: BalancerSpecs. Pure."""

import ipaddress
from collections.abc import Iterable, Mapping

import msgspec

from fairlead.drivers.octavia.balancers import (
    BalancerSpec,
    Explicit,
    Listener,
    Member,
    Monitor,
    Pool,
    Rule,
    family_of,
)
from fairlead.drivers.octavia.marks import Owner
from fairlead.model import Family, LoadBalancer, OctaviaSettings, ServiceKey
from fairlead.model import Listener as PlannedListener

MAX_WEIGHT = 256
"""The maximum weight of a member."""
NO_SOURCE: Mapping[Family, str] = {"IPv4": "255.255.255.255/32", "IPv6": "::/128"}
"""Addresses that no client has, for a listener without any allowed source. An empty list would
allow every source."""
ANY_SOURCE: Mapping[Family, str] = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}
MAX_AFFINITY_S = 65535
"""The maximum that OVN accepts (ovn-nb(5), affinity_timeout)."""
MIN_UDP_DELAY_S = 3
"""The minimum interval that Octavia accepts for health checks over UDP."""


def specs_of(
    intents: Mapping[ServiceKey, LoadBalancer], owner: Owner
) -> dict[ServiceKey, BalancerSpec]:
    return {
        key: _state(intent, intent.settings, owner)
        for key, intent in intents.items()
        if isinstance(intent.settings, OctaviaSettings)
    }


def _state(intent: LoadBalancer, settings: OctaviaSettings, owner: Owner) -> BalancerSpec:
    return BalancerSpec(
        service=intent.service,
        uid=intent.uid,
        provider=settings.provider,
        name=owner.load_balancer_name(intent.service),
        description=owner.description(intent.service),
        tags=owner.tags(intent.service, intent.uid),
        child_tags=owner.tags(intent.service, intent.uid),
        place=settings.place,
        listeners=tuple(
            sorted(_listener(intent, settings, each) for each in _of_ports(intent, settings))
        ),
        families=_families(intent),
        addresses=settings.held,
        why=settings.why,
        shared_or_adopted=settings.shared_or_adopted,
        existing=settings.existing,
        floating=settings.floating,
        rules=_rules(intent, settings) if settings.secured else None,
        network_marks=(
            owner.network_mark(intent.service),
            owner.network_mark(intent.service, kept=True),
        ),
    )


def _families(intent: LoadBalancer) -> tuple[Family, ...]:
    return tuple(sorted({each.family for each in intent.listeners}))


def _of_ports(intent: LoadBalancer, settings: OctaviaSettings) -> list[PlannedListener]:
    """Return one listener for each port, which covers all addresses and has the members of all
    families."""
    ports: dict[tuple[str, int], list[PlannedListener]] = {}
    for each in intent.listeners:
        ports.setdefault((each.protocol, each.port), []).append(each)
    merged = []
    for (protocol, _), same in ports.items():
        if settings.provider == "amphora" and protocol == "TCP":
            # Provider amphora opens its own connections to members, of any family: each node is a
            # member once.
            same = [next((each for each in same if each.members), same[0])]
        merged.append(
            msgspec.structs.replace(
                same[0], members=tuple(member for each in same for member in each.members)
            )
        )
    return merged


def _listener(
    intent: LoadBalancer, settings: OctaviaSettings, planned: PlannedListener
) -> Listener:
    tcp = planned.protocol == "TCP"
    timeouts: dict[Explicit, int | None] = {
        "timeout_client_data": settings.client_ms,
        "timeout_member_connect": settings.connect_ms,
        "timeout_member_data": settings.member_ms,
        "timeout_tcp_inspect": settings.inspect_ms,
    }
    return Listener(
        protocol="HTTP" if tcp and settings.forwarded_for else planned.protocol,
        port=planned.port,
        pool=_pool(intent, settings, planned),
        connection_limit=settings.connection_limit,
        timeouts=tuple(
            (name, value) for name, value in sorted(timeouts.items()) if value is not None and tcp
        ),
        cidrs=_all_cidrs(intent) if settings.provider == "amphora" else (),
        forwarded_for=tcp and settings.forwarded_for,
    )


def _pool(intent: LoadBalancer, settings: OctaviaSettings, planned: PlannedListener) -> Pool:
    protocol: str = planned.protocol
    if protocol == "TCP":
        protocol = (
            "HTTP"
            if settings.forwarded_for
            else {"": "TCP", "v1": "PROXY", "v2": "PROXYV2"}[settings.header]
        )
    method, affinity_s = _algorithm(intent, settings, planned)
    monitor = _monitor(intent, settings, planned)
    port = (
        intent.health_monitor.port
        if monitor is not None and monitor.type == "HTTP" and intent.health_monitor
        else None
    )
    return Pool(protocol, method, _members(settings, planned, port), monitor, affinity_s)


def _algorithm(
    intent: LoadBalancer, settings: OctaviaSettings, planned: PlannedListener
) -> tuple[str, int | None]:
    """Return the algorithm and the affinity in seconds. Octavia does not allow a duration of
    affinity for TCP, and without a duration provider ovn 11 ignores affinity, or writes the word
    None to OVN. Therefore provider ovn chooses members for TCP by the client's address."""
    if not intent.affinity_timeout_s:
        return settings.method, None
    if settings.provider == "ovn":
        over_tcp = planned.protocol == "TCP"
        return (
            ("SOURCE_IP", None)
            if over_tcp
            else (settings.method, min(intent.affinity_timeout_s, MAX_AFFINITY_S))
        )
    return settings.method, intent.affinity_timeout_s if planned.protocol != "TCP" else 0


def _monitor(
    intent: LoadBalancer, settings: OctaviaSettings, planned: PlannedListener
) -> Monitor | None:
    type_, checks = dict(settings.monitor_types).get(planned.protocol), settings.checks
    if type_ is None or checks is None:
        return None
    delay_s = max(checks.delay_s, MIN_UDP_DELAY_S) if type_ == "UDP-CONNECT" else checks.delay_s
    path = intent.health_monitor.path if type_ == "HTTP" and intent.health_monitor else ""
    return Monitor(type_, delay_s, checks.timeout_s, checks.rise, checks.fall, path)


def _members(
    settings: OctaviaSettings, planned: PlannedListener, monitor_port: int | None
) -> tuple[Member, ...]:
    """Return the members, one for each address. A draining node stays a member with weight 0, and
    keeps its connections, if the provider supports weights.

    Octavia refuses two members with one address. Two Nodes have one address if a host was
    registered again under another name; then the Node with the greater weight counts."""
    weighted = settings.provider == "amphora"
    heaviest = max((each.weight for each in planned.members), default=0)
    members: dict[str, Member] = {}
    for each in planned.members:
        weight = each.weight if each.state == "active" else 0
        if heaviest > MAX_WEIGHT and weight:
            weight = max(1, weight * MAX_WEIGHT // heaviest)
        other = members.get(each.address)
        if (weighted or weight) and (other is None or other.weight < weight):
            members[each.address] = Member(
                each.address,
                planned.node_port,
                weight if weighted else 1,
                monitor_port,
                _subnet(settings, each.address),
            )
    return tuple(sorted(members.values()))


def _subnet(settings: OctaviaSettings, address: str) -> str:
    """Return the subnet of a member if Octavia needs it. Provider ovn needs the subnet of members
    that are not in the subnet of the load balancer's first address."""
    if settings.provider == "ovn" and settings.place.subnet_id_v6 and family_of(address) == "IPv6":
        return settings.place.subnet_id_v6
    return settings.member_subnet_id


def _rules(intent: LoadBalancer, settings: OctaviaSettings) -> tuple[Rule, ...]:
    """Return the security group rules. With provider ovn, packets reach nodes with the addresses of
    the clients."""
    rules: set[Rule] = set()
    for each in intent.listeners:
        protocol = each.protocol.lower()
        if settings.provider == "amphora" or intent.source_ranges:
            rules.add(Rule(protocol, each.node_port))
        if settings.provider == "ovn":
            ranges = _cidrs(intent.source_ranges, each.family) or (ANY_SOURCE[each.family],)
            rules |= {Rule(protocol, each.node_port, source) for source in ranges}
    monitors = [_monitor(intent, settings, each) for each in intent.listeners]
    if intent.health_monitor is not None and any(
        each is not None and each.type == "HTTP" for each in monitors
    ):
        rules.add(Rule("tcp", intent.health_monitor.port))
    return tuple(sorted(rules))


def _all_cidrs(intent: LoadBalancer) -> tuple[str, ...]:
    return tuple(
        sorted(
            {cidr for family in _families(intent) for cidr in _cidrs(intent.source_ranges, family)}
        )
    )


def _cidrs(ranges: Iterable[str], family: Family) -> tuple[str, ...]:
    """Return the ranges of this family: Octavia rejects ranges of other families. If there are
    ranges, but none of this family, no client is allowed."""
    given = {ipaddress.ip_network(text, strict=False) for text in ranges}
    own = {str(each) for each in given if (each.version == 6) == (family == "IPv6")}
    return tuple(sorted(own or {NO_SOURCE[family]})) if given else ()
