"""Static routes for a router that runs Linux, as commands of iproute2. Pure.

In: a Reach. Out: a script. It may be run again after a change: it replaces routes of the same
prefix."""

from collections.abc import Iterator

from fairlead.model import Family
from fairlead.routers.values import Reach

RULE_PRIORITY = 32000
"""The priority of the rules on gateways: after their own rules, before the table main."""


def render(reach: Reach) -> str:
    """Return the script."""
    return "\n".join(_lines(reach)) + "\n"


def _lines(reach: Reach) -> Iterator[str]:
    yield "# On the router: routes of the pools to the gateways."
    if len(reach.gateways) > 1:
        yield "# Choose the next hop by addresses and ports, so that one client uses all of them."
        for family in reach.families:
            yield f"sysctl -w net.{family.lower()}.fib_multipath_hash_policy=1"
    for family in reach.families:
        hops = [f"via {address}" for _, address in reach.addresses(family)]
        via = hops[0] if len(hops) == 1 else " ".join(f"nexthop {each}" for each in hops)
        for each in reach.of(family):
            yield f"{_ip(family)} route replace {each.prefix} {via}  # pool {each.pool}"
    yield "# On each gateway, for the INTERFACE to the router: drop packets for addresses that no"
    yield "# Service has, which would otherwise go back to the router."
    for family in reach.families:
        for each in reach.of(family):
            rule = f"to {each.prefix} iif INTERFACE priority {RULE_PRIORITY} blackhole"
            yield f"# {_ip(family)} rule add {rule}"


def _ip(family: Family) -> str:
    return "ip" if family == "IPv4" else "ip -6"
