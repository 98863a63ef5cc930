"""The configuration of a router that runs BIRD 2 or 3: BGP sessions with the gateways. Pure.

In: a Reach. Out: filters and protocols for its configuration file. The protocols that a router has
only once, `device` and `kernel`, stay the operator's."""

from collections.abc import Iterator

from fairlead.model import Family
from fairlead.routers.values import (
    BFD_INTERVAL_MS,
    BFD_MULTIPLIER,
    HOLD_TIME_S,
    KEEPALIVE_TIME_S,
    Reach,
    element,
)


def render(reach: Reach) -> str:
    """Return the filters and protocols."""
    lines = [
        "# For BIRD on the router, in addition to these protocols, which it may have only once",
        "# (without `merge paths on` a route has one next hop):",
        "#   protocol device {}",
        *(
            f"#   protocol kernel {{ {family.lower()} {{ export all; }}; merge paths on; }}"
            for family in reach.families
        ),
        "# A router that runs Linux chooses the next hop by addresses alone, unless these are 1:",
        "# net.ipv4.fib_multipath_hash_policy, net.ipv6.fib_multipath_hash_policy",
        *(line for family in reach.families for line in _filter(reach, family)),
        *_bfd(reach),
        "template bgp fairlead_gateway {",
        f"    local as {reach.router_asn};",
        "    direct;",
        f"    hold time {HOLD_TIME_S};",
        f"    keepalive time {KEEPALIVE_TIME_S};",
        # By default, BIRD refuses a neighbor for a minute after one error at the start.
        "    error wait time 1, 5;",
        *(["    bfd on;"] if reach.bfd else []),
        "}",
    ]
    for family in reach.families:
        for number, (name, address) in enumerate(reach.addresses(family), 1):
            lines += [
                f"protocol bgp fairlead{family[-1]}_{number} from fairlead_gateway {{  # {name}",
                f"    neighbor {address} as {reach.asn};",
                f"    {family.lower()} {{",
                f"        import filter fairlead{family[-1]};",
                f"        import limit {reach.routes(family)} action block;",
                "        export none;",
                "    };",
                "}",
            ]
    return "\n".join(lines) + "\n"


def _filter(reach: Reach, family: Family) -> Iterator[str]:
    """Yield the filter that accepts the single addresses of the pools and nothing else."""
    yield f"filter fairlead{family[-1]} {{"
    yield f"    if net ~ [ {', '.join(map(element, reach.of(family)))} ] then accept;"
    yield "    reject;"
    yield "}"


def _bfd(reach: Reach) -> Iterator[str]:
    if reach.bfd:
        yield "# If there is a `protocol bfd` already, set its interval instead."
        yield "protocol bfd fairlead_bfd {"
        yield (
            f'    interface "*" {{ interval {BFD_INTERVAL_MS} ms; multiplier {BFD_MULTIPLIER}; }};'
        )
        yield "}"
