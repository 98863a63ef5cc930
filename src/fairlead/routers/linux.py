"""The text of a plan for a router that runs Linux, as commands of iproute2. Pure.

In: a Reach with routes. Out: a script. It can be repeated: it replaces the routes."""

from collections.abc import Iterator

from fairlead.errors import Refused
from fairlead.model import Family
from fairlead.routers.values import Reach, Route

DISCARD_METRIC = 4_278_198_272
"""The metric of a route that discards packets: any other route is preferred."""
RULE_PRIORITY = 32000
"""The priority of the rules of gateways: after the routes to local addresses."""


def render(reach: Reach) -> str:
    """Return the script. Raise Refused if the plan has sessions: iproute2 speaks no BGP."""
    if reach.sessions is not None:
        raise Refused(
            "iproute2 only writes static routes, and the plan has BGP sessions",
            fix="use --method static, or --router frr or bird for a daemon on this router",
        )
    lines = [*_hashing(reach), *_routes(reach), *_discards(reach), *_gateways(reach)]
    return "\n".join(lines) + "\n"


def _ip(family: Family) -> str:
    return "ip" if family == "IPv4" else "ip -6"


def _hashing(reach: Reach) -> Iterator[str]:
    if not any(len(route.targets) > 1 for route in reach.routes):
        return
    yield "# Choose the next hop by addresses and ports, so that clients behind one address spread."
    for family in reach.families:
        yield f"sysctl -w net.{family.lower()}.fib_multipath_hash_policy=1"


def _routes(reach: Reach) -> Iterator[str]:
    about = ""
    for route in reach.routes:
        if route.about != about:
            yield f"# {(about := route.about)}"
        yield f"{_ip(route.family)} route replace {route.prefix} {_targets(route)}"


def _targets(route: Route) -> str:
    if len(route.targets) == 1:
        return f"via {route.targets[0].address}"
    return " ".join(f"nexthop via {each.address} weight {each.weight}" for each in route.targets)


def _discards(reach: Reach) -> Iterator[str]:
    yield "# Addresses of the pools without another route are discarded instead of sent back."
    for each in reach.networks:
        yield f"{_ip(each.family)} route replace blackhole {each.prefix} metric {DISCARD_METRIC}"


def _gateways(reach: Reach) -> Iterator[str]:
    """Yield the rules of the hosts, as comments. An address that no Service has reaches a host
    only if its route covers the whole pool."""
    whole = {route.prefix for route in reach.routes} & {each.prefix for each in reach.networks}
    if not whole:
        return
    yield "# On each of these hosts, so that addresses without a Service do not loop:"
    interfaces = sorted({name for hop in reach.hops for name in hop.interfaces}) or ["INTERFACE"]
    for each in reach.networks:
        for interface in interfaces:
            yield (
                f"#   {_ip(each.family)} rule add to {each.prefix} iif {interface} "
                f"priority {RULE_PRIORITY} blackhole"
            )
