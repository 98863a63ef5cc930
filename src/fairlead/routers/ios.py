"""The text of a plan for the routers of Cisco: IOS and IOS XE, then IOS XR. Pure."""

import ipaddress
from collections.abc import Iterator
from typing import NamedTuple

from fairlead.announce_sections import BfdConfig
from fairlead.model import Family
from fairlead.routers.frr import MAX_PREFIXES
from fairlead.routers.values import DISCARD_DISTANCE, Network, Reach, Sessions

NAME = "FAIRLEAD"


class _Limits(NamedTuple):
    """What a system accepts: the most next hops of a route; the intervals of BFD in milliseconds,
    and its multipliers, from and to."""

    paths: int
    intervals_ms: tuple[int, int]
    multipliers: tuple[int, int]


_XE_LIMITS = _Limits(32, (50, 999), (3, 50))
_XR_LIMITS = _Limits(64, (3, 30_000), (2, 16))


def render(reach: Reach) -> str:
    """Return both texts, each after a heading; only one of them fits a router."""
    lines = [
        "! ==== IOS and IOS XE ====",
        *_xe(reach),
        "! ==== IOS XR (then `commit`) ====",
        *_xr(reach),
    ]
    return "\n".join(lines) + "\n"


def _xe(reach: Reach) -> Iterator[str]:
    about = ""
    for route in reach.routes:
        if route.about != about:
            yield f"! {(about := route.about)}"
        for target in route.targets:
            yield f"{_destination(route.prefix, route.family)} {target.address}"
    yield "! Addresses of the pools without another route are discarded instead of sent back."
    for each in reach.networks:
        yield f"{_destination(each.prefix, each.family)} Null0 {DISCARD_DISTANCE}"
    if reach.sessions is not None:
        yield from _xe_bgp(reach, reach.sessions)


def _destination(prefix: str, family: Family) -> str:
    if family == "IPv6":
        return f"ipv6 route {prefix}"
    network = ipaddress.IPv4Network(prefix)
    return f"ip route {network.network_address} {network.netmask}"


def _xe_bgp(reach: Reach, sessions: Sessions) -> Iterator[str]:
    for family in reach.families:
        command = "ip" if family == "IPv4" else "ipv6"
        for number, each in enumerate(reach.of(family), 1):
            entry = f"seq {number * 5} permit {_permitted(each)}"
            yield f"{command} prefix-list {NAME}{family[-1]} {entry}"
        yield f"route-map {NAME}-IN{family[-1]} permit 10"
        yield f" match {command} address prefix-list {NAME}{family[-1]}"
    yield f"route-map {NAME}-OUT deny 10"
    yield from _remarks(sessions, _XE_LIMITS)
    if sessions.bfd is not None:
        interval, multiplier = _bfd(sessions.bfd, _XE_LIMITS)
        yield "! On the interface to the hosts:"
        yield f"!  bfd interval {interval} min_rx {interval} multiplier {multiplier}"
    yield f"router bgp {sessions.router_asn}"
    yield " bgp bestpath as-path multipath-relax"
    yield f" neighbor {NAME} peer-group"
    yield f" neighbor {NAME} remote-as {sessions.hosts_asn}"
    yield f" neighbor {NAME} timers {sessions.keepalive_time_s} {sessions.hold_time_s}"
    if sessions.ttl_security:
        yield f" neighbor {NAME} ttl-security hops 1"
    elif sessions.multihop and not sessions.internal:
        yield f" neighbor {NAME} ebgp-multihop {sessions.multihop}"
    if sessions.password:
        yield f" ! neighbor {NAME} password PASSWORD-OF-THE-SESSION"
    if sessions.bfd is not None:
        yield f" neighbor {NAME} fall-over bfd"
    for neighbor in sessions.neighbors:
        yield f" neighbor {neighbor.address} peer-group {NAME}"
        yield f" neighbor {neighbor.address} description {neighbor.name}"
    for network in sessions.ranges:
        yield f" bgp listen range {network} peer-group {NAME}"
    if sessions.interfaces:
        yield " ! Unnumbered sessions do not exist here: give the hosts the address of this router."
    for family in _families(reach, sessions):
        limit = min(MAX_PREFIXES, reach.prefixes(family))
        yield f" address-family {family.lower()} unicast"
        yield f"  neighbor {NAME} activate"
        for neighbor in sessions.neighbors:
            yield f"  neighbor {neighbor.address} activate"
        yield f"  neighbor {NAME} route-map {NAME}-IN{family[-1]} in"
        yield f"  neighbor {NAME} route-map {NAME}-OUT out"
        yield f"  neighbor {NAME} maximum-prefix {limit}"
        paths = min(sessions.paths, _XE_LIMITS.paths)
        yield f"  maximum-paths {'ibgp ' if sessions.internal else ''}{paths}"
        yield " exit-address-family"


def _bfd(bfd: BfdConfig, limits: _Limits) -> tuple[int, int]:
    """Return the interval and the multiplier that the system accepts."""
    (shortest, longest), (least, most) = limits.intervals_ms, limits.multipliers
    return min(max(bfd.interval_ms, shortest), longest), min(max(bfd.multiplier, least), most)


def _remarks(sessions: Sessions, limits: _Limits) -> Iterator[str]:
    """Yield a remark for each value that the system does not accept."""
    if sessions.paths > limits.paths:
        yield f"! A route has at most {limits.paths} next hops here; {sessions.paths} are needed."
    bfd = sessions.bfd
    if bfd is not None and (bfd.interval_ms, bfd.multiplier) != _bfd(bfd, limits):
        (shortest, longest), (least, most) = limits.intervals_ms, limits.multipliers
        yield (
            f"! BFD has intervals of {shortest} to {longest} ms and multipliers of {least} to "
            f"{most} here; the hosts"
        )
        yield f"! use {bfd.interval_ms} ms and {bfd.multiplier}."


def _permitted(network: Network) -> str:
    length = network.announced_length
    if length == network.bits:
        return network.announced
    limit = f"le {network.bits}" if network.shortest == length else f"ge {network.shortest}"
    return f"{network.announced} {limit}"


def _xr(reach: Reach) -> Iterator[str]:
    yield "router static"
    for family in reach.families:
        yield f" address-family {family.lower()} unicast"
        for route in reach.routes:
            if route.family == family:
                for target in route.targets:
                    yield f"  {route.prefix} {target.address}"
        for each in reach.of(family):
            yield f"  {each.prefix} Null0 {DISCARD_DISTANCE}"
        yield " exit"
    yield "exit"
    if reach.sessions is None:
        return
    sessions = reach.sessions
    for family in reach.families:
        yield f"prefix-set {NAME}{family[-1]}"
        yield ",\n".join(f"  {_set_member(each)}" for each in reach.of(family))
        yield "end-set"
        yield f"route-policy {NAME}-IN{family[-1]}"
        yield f"  if destination in {NAME}{family[-1]} then"
        yield "    pass"
        yield "  else"
        yield "    drop"
        yield "  endif"
        yield "end-policy"
    yield f"route-policy {NAME}-OUT"
    yield "  drop"
    yield "end-policy"
    yield from _xr_bgp(reach, sessions)


def _set_member(network: Network) -> str:
    if network.announced_length == network.bits:
        return network.announced
    return f"{network.announced} ge {network.shortest}"


def _xr_bgp(reach: Reach, sessions: Sessions) -> Iterator[str]:
    """Yield the sessions. Each block ends with `exit`: the next one is a command of the mode above.
    A remark is not inside of a block, where a line with `!` may end it."""
    families = _families(reach, sessions)
    yield from _remarks(sessions, _XR_LIMITS)
    if sessions.password:
        yield f"! In neighbor-group {NAME}: password clear PASSWORD-OF-THE-SESSION"
    if sessions.interfaces:
        yield "! This text has no unnumbered sessions: give the hosts the address of this router."
    yield f"router bgp {sessions.router_asn}"
    yield " bgp bestpath as-path multipath-relax"
    for family in families:
        yield f" address-family {family.lower()} unicast"
        kind, paths = "ibgp" if sessions.internal else "ebgp", min(sessions.paths, _XR_LIMITS.paths)
        yield f"  maximum-paths {kind} {paths}"
        yield " exit"
    yield f" neighbor-group {NAME}"
    yield f"  remote-as {sessions.hosts_asn}"
    yield f"  timers {sessions.keepalive_time_s} {sessions.hold_time_s}"
    if sessions.ttl_security:
        yield "  ttl-security"
    elif sessions.multihop and not sessions.internal:
        yield f"  ebgp-multihop {sessions.multihop}"
    if sessions.bfd is not None:
        interval, multiplier = _bfd(sessions.bfd, _XR_LIMITS)
        yield "  bfd fast-detect"
        yield f"  bfd minimum-interval {interval}"
        yield f"  bfd multiplier {multiplier}"
    for family in families:
        yield f"  address-family {family.lower()} unicast"
        yield f"   route-policy {NAME}-IN{family[-1]} in"
        yield f"   route-policy {NAME}-OUT out"
        yield f"   maximum-prefix {min(MAX_PREFIXES, reach.prefixes(family))}"
        yield "  exit"
    yield " exit"
    for neighbor in sessions.neighbors:
        yield f" neighbor {neighbor.address}"
        yield f"  use neighbor-group {NAME}"
        yield f"  description {neighbor.name}"
        yield " exit"
    for network in sessions.ranges:
        yield f" neighbor {network}"
        yield f"  use neighbor-group {NAME}"
        yield " exit"
    yield "exit"


def _families(reach: Reach, sessions: Sessions) -> list[Family]:
    return [each for each in reach.families if each in sessions.families]
