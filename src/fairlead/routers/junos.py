"""The text of a plan for Junos, as `set` commands. Pure."""

from collections.abc import Iterator

from fairlead.model import Family
from fairlead.routers.frr import MAX_PREFIXES
from fairlead.routers.values import DISCARD_DISTANCE, Network, Reach, Sessions

NAME = "FAIRLEAD"


def render(reach: Reach) -> str:
    """Return the commands."""
    lines = [*_static(reach), *_discards(reach)]
    if reach.sessions is not None:
        lines += [*_policy(reach), *_bgp(reach, reach.sessions)]
    lines += [
        f"set policy-options policy-statement {NAME}-ECMP then load-balance per-packet",
        f"set routing-options forwarding-table export {NAME}-ECMP",
    ]
    return "\n".join(lines) + "\n"


def _table(family: Family) -> str:
    return "routing-options static" if family == "IPv4" else "routing-options rib inet6.0 static"


def _static(reach: Reach) -> Iterator[str]:
    about = ""
    for route in reach.routes:
        if route.about != about:
            yield f"# {(about := route.about)}"
        for target in route.targets:
            yield f"set {_table(route.family)} route {route.prefix} next-hop {target.address}"


def _discards(reach: Reach) -> Iterator[str]:
    """Yield routes that discard. A static route has either next hops or `discard`, so parts of
    pools that have a route get none."""
    yield "# Addresses of the pools without another route are discarded instead of sent back."
    routed = {route.prefix for route in reach.routes}
    for each in reach.networks:
        if each.prefix in routed:
            continue
        where = f"{_table(each.family)} route {each.prefix}"
        yield f"set {where} discard"
        yield f"set {where} preference {DISCARD_DISTANCE}"


def _policy(reach: Reach) -> Iterator[str]:
    policy = f"set policy-options policy-statement {NAME}-IN"
    for family in reach.families:
        term = f"{policy} term {family}"
        for each in reach.of(family):
            yield f"{term} from route-filter {each.announced} {_permitted(each)}"
        yield f"{term} then accept"
    yield f"{policy} term others then reject"
    yield f"set policy-options policy-statement {NAME}-OUT then reject"


def _permitted(network: Network) -> str:
    return f"prefix-length-range /{network.shortest}-/{network.bits}"


def _bgp(reach: Reach, sessions: Sessions) -> Iterator[str]:
    group = f"set protocols bgp group {NAME}"
    yield f"set routing-options autonomous-system {sessions.router_asn}"
    yield f"{group} type {'internal' if sessions.internal else 'external'}"
    if sessions.interfaces:
        yield from _unnumbered(sessions)
    elif not sessions.internal:
        yield f"{group} peer-as {sessions.hosts_asn}"
    yield f"{group} multipath" + ("" if sessions.internal else " multiple-as")
    yield f"{group} hold-time {sessions.hold_time_s}"
    if sessions.multihop and not sessions.internal:
        yield f"{group} multihop ttl {sessions.multihop}"
    if sessions.ttl_security:
        yield f"{group} ttl 255"
        yield "# GTSM also needs a filter on the interface that drops BGP packets with another TTL."
    if sessions.password:
        yield f"# {group} authentication-key PASSWORD-OF-THE-SESSION"
    if sessions.bfd is not None:
        detection = f"{group} bfd-liveness-detection"
        yield f"{detection} minimum-interval {sessions.bfd.interval_ms}"
        yield f"{detection} multiplier {sessions.bfd.multiplier}"
    yield f"{group} import {NAME}-IN"
    yield f"{group} export {NAME}-OUT"
    for family in reach.families:
        if family in sessions.families:
            name = "inet" if family == "IPv4" else "inet6"
            limit = min(MAX_PREFIXES, reach.prefixes(family))
            yield f"{group} family {name} unicast prefix-limit maximum {limit}"
    for neighbor in sessions.neighbors:
        yield f"{group} neighbor {neighbor.address} description {neighbor.name}"
    for network in sessions.ranges:
        yield f"{group} allow {network}"


def _unnumbered(sessions: Sessions) -> Iterator[str]:
    """Yield the sessions over link-local addresses, which exist since Junos 21.1. An IPv4 route has
    an IPv6 next hop there (RFC 8950)."""
    group = f"set protocols bgp group {NAME}"
    if sessions.internal:
        yield "# Junos has no unnumbered sessions within one AS: give the hosts another AS number,"
        yield "# or the address of this router."
        return
    yield "# Each of these interfaces needs family inet and family inet6, and leads to one host."
    yield f"set policy-options as-list {NAME}-HOSTS members {sessions.hosts_asn}"
    yield f"{group} peer-as-list {NAME}-HOSTS"
    if "IPv4" in sessions.families:
        yield f"{group} family inet unicast extended-nexthop"
    for interface in sessions.interfaces:
        yield f"set protocols router-advertisement interface {interface}.0"
        discovery = f"{group} dynamic-neighbor {NAME} peer-auto-discovery"
        yield f"{discovery} family inet6 ipv6-nd"
        yield f"{discovery} interface {interface}.0"
