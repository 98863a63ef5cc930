"""The text of a plan for FRR, and for systems that run it, such as SONiC. Pure.

In: a Reach. Out: commands that `vtysh -f` reads. Follows the documentation of FRR 8.4."""

from collections.abc import Iterator

from fairlead.model import Family
from fairlead.routers.values import DISCARD_DISTANCE, Network, Reach, Sessions

NAME = "fairlead"
MAX_PREFIXES = 65536
"""More host routes than routers of an access layer have room for."""


def render(reach: Reach) -> str:
    """Return the configuration."""
    lines = [*_static(reach), *_discards(reach)]
    if reach.sessions is not None:
        lines += [*_filters(reach), *_bfd(reach.sessions), *_bgp(reach, reach.sessions)]
    return "\n".join(lines) + "\n"


def _command(family: Family) -> str:
    return "ip" if family == "IPv4" else "ipv6"


def _static(reach: Reach) -> Iterator[str]:
    about = ""
    for route in reach.routes:
        if route.about != about:
            yield f"! {(about := route.about)}"
        for target in route.targets:
            yield f"{_command(route.family)} route {route.prefix} {target.address}"


def _discards(reach: Reach) -> Iterator[str]:
    yield "! Addresses of the pools without another route are discarded instead of sent back."
    for each in reach.networks:
        yield f"{_command(each.family)} route {each.prefix} blackhole {DISCARD_DISTANCE}"


def _filters(reach: Reach) -> Iterator[str]:
    for family in reach.families:
        for number, each in enumerate(reach.of(family), 1):
            entry = f"seq {number * 5} permit {_permitted(each)}"
            yield f"{_command(family)} prefix-list {NAME}{family[-1]} {entry}"
    for number, family in enumerate(reach.families, 1):
        yield f"route-map {NAME}-in permit {number * 10}"
        yield f" match {_command(family)} address prefix-list {NAME}{family[-1]}"
        yield "exit"
    yield f"route-map {NAME}-out deny 10"
    yield "exit"


def _permitted(network: Network) -> str:
    """Return the prefixes of this part of a pool, as an entry of a prefix list."""
    length = network.announced_length
    if length == network.bits:
        return network.announced
    limit = f"le {network.bits}" if network.shortest == length else f"ge {network.shortest}"
    return f"{network.announced} {limit}"


def _bfd(sessions: Sessions) -> Iterator[str]:
    if sessions.bfd is None:
        return
    yield "bfd"
    yield f" profile {NAME}"
    yield f"  detect-multiplier {sessions.bfd.multiplier}"
    yield f"  receive-interval {sessions.bfd.interval_ms}"
    yield f"  transmit-interval {sessions.bfd.interval_ms}"
    yield " exit"
    yield "exit"


def _bgp(reach: Reach, sessions: Sessions) -> Iterator[str]:
    yield f"router bgp {sessions.router_asn}"
    yield " bgp bestpath as-path multipath-relax"
    yield " no bgp default ipv4-unicast"
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
        yield f" neighbor {NAME} bfd"
        yield f" neighbor {NAME} bfd profile {NAME}"
    for neighbor in sessions.neighbors:
        yield f" neighbor {neighbor.address} peer-group {NAME}"
        yield f" neighbor {neighbor.address} description {neighbor.name}"
    for interface in sessions.interfaces:
        yield f" neighbor {interface} interface peer-group {NAME}"
    if sessions.ranges:
        yield f" bgp listen limit {max(100, 2 * len(reach.hops))}"
    for network in sessions.ranges:
        yield f" bgp listen range {network} peer-group {NAME}"
    for family in reach.families:
        if family not in sessions.families:
            continue
        yield f" address-family {family.lower()} unicast"
        yield f"  neighbor {NAME} activate"
        yield f"  neighbor {NAME} route-map {NAME}-in in"
        yield f"  neighbor {NAME} route-map {NAME}-out out"
        yield f"  neighbor {NAME} maximum-prefix {min(MAX_PREFIXES, reach.prefixes(family))}"
        ibgp = " ibgp" if sessions.internal else ""
        yield f"  maximum-paths{ibgp} {sessions.paths}"
        yield " exit-address-family"
    yield "exit"
