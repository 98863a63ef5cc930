"""The text of a plan for BIRD 2 and 3. Pure.

In: a Reach. Out: protocols and filters for the configuration file of a router, which `bird -p`
reads. The kernel protocol of the router stays the operator's: BIRD allows one for each table."""

from collections.abc import Iterator

from fairlead.model import Family
from fairlead.routers.frr import MAX_PREFIXES
from fairlead.routers.values import Network, Reach, Sessions

HEADER = """\
# In the `protocol kernel` of this router, for several next hops of a route: merge paths on;"""


def render(reach: Reach) -> str:
    """Return the protocols and filters."""
    lines = [HEADER, *_static(reach)]
    if reach.sessions is not None:
        lines += [*_filter(reach, reach.sessions), *_bgp(reach, reach.sessions)]
    return "\n".join(lines) + "\n"


def _static(reach: Reach) -> Iterator[str]:
    for family in reach.families:
        number = family[-1]
        routes = [each for each in reach.routes if each.family == family]
        if routes:
            yield f"protocol static fairlead{number} {{"
            yield f"    {family.lower()};"
            for route in routes:
                hops = " ".join(
                    f"via {each.address}" + (f" weight {each.weight}" if route.weighted else "")
                    for each in route.targets
                )
                yield f"    route {route.prefix} {hops};  # {route.about}"
            yield "}"
        yield "# Addresses of the pools without another route are discarded instead of sent back."
        yield f"protocol static fairlead_discard{number} {{"
        yield f"    {family.lower()} {{ preference 1; }};"
        for each in reach.of(family):
            yield f"    route {each.prefix} blackhole;"
        yield "}"


def _filter(reach: Reach, sessions: Sessions) -> Iterator[str]:
    for family in reach.families:
        yield f"filter fairlead_in{family[-1]} {{"
        prefixes = ", ".join(_permitted(each) for each in reach.of(family))
        yield f"    if net !~ [ {prefixes} ] then reject;"
        if sessions.hosts_asn < 1 << 16:
            yield f"    # The community {sessions.hosts_asn}:SHARE tells the share of a host."
            yield "    for pair each in bgp_community do"
            yield f"        if each ~ [ ({sessions.hosts_asn}, 1..256) ] then weight = each.data;"
        yield "    accept;"
        yield "}"


def _permitted(network: Network) -> str:
    """Return the prefixes of this part of a pool, as an element of a set of prefixes."""
    return f"{network.announced}{{{network.shortest},{network.bits}}}"


def _bgp(reach: Reach, sessions: Sessions) -> Iterator[str]:
    if sessions.bfd is not None:
        yield "# If this router has a `protocol bfd` already, add the interval there instead."
        yield "protocol bfd fairlead_bfd {"
        yield (
            f'    interface "*" {{ interval {sessions.bfd.interval_ms} ms; '
            f"multiplier {sessions.bfd.multiplier}; }};"
        )
        if sessions.multihop:
            yield (
                f"    multihop {{ interval {sessions.bfd.interval_ms} ms; "
                f"multiplier {sessions.bfd.multiplier}; }};"
            )
        yield "}"
    yield "template bgp fairlead_host {"
    # A session over several hops needs the address of its own end.
    own = f"{sessions.router_address} " if sessions.multihop else ""
    yield f"    local {own}as {sessions.router_asn};"
    yield f"    hold time {sessions.hold_time_s};"
    yield f"    keepalive time {sessions.keepalive_time_s};"
    # By default BIRD refuses a neighbor for a minute after an error.
    yield "    error wait time 1, 5;"
    if sessions.ttl_security:
        yield "    ttl security on;"
    if sessions.multihop:
        yield f"    multihop {sessions.multihop};"
    elif sessions.internal:
        # BIRD takes a neighbor in its own AS for several hops away by default.
        yield "    direct;"
    if sessions.password:
        yield '    # password "PASSWORD-OF-THE-SESSION";'
    if sessions.bfd is not None:
        yield "    bfd on;"
    for family in _families(reach, sessions):
        yield f"    {family.lower()} {{"
        yield f"        import filter fairlead_in{family[-1]};"
        if sessions.add_path:
            yield "        add paths rx;"
        yield f"        import limit {min(MAX_PREFIXES, reach.prefixes(family))} action block;"
        yield "        export none;"
        yield "    };"
    yield "}"
    for number, neighbor in enumerate(sessions.neighbors, 1):
        yield f"protocol bgp fairlead_host{number} from fairlead_host {{  # {neighbor.name}"
        yield f"    neighbor {neighbor.address} as {sessions.hosts_asn};"
        yield "}"
    for number, network in enumerate(sessions.ranges, 1):
        yield f"protocol bgp fairlead_range{number} from fairlead_host {{"
        yield f"    neighbor range {network} as {sessions.hosts_asn};"
        yield f'    dynamic name "fairlead_r{number}_";'
        yield "}"
    for number, interface in enumerate(sessions.interfaces, 1):
        yield f"protocol bgp fairlead_link{number} from fairlead_host {{"
        yield f"    neighbor range fe80::/10 as {sessions.hosts_asn};"
        yield f'    interface "{interface}";'
        yield f'    dynamic name "fairlead_l{number}_";'
        yield "}"


def _families(reach: Reach, sessions: Sessions) -> list[Family]:
    return [each for each in reach.families if each in sessions.families]
