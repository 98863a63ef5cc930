"""The configuration of a router that runs FRR: BGP sessions with the gateways. Pure.

In: a Reach. Out: commands that `vtysh -f` reads, and adds to the configuration. Follows the
documentation of FRR 8.4."""

from collections.abc import Iterator

from fairlead.model import Family
from fairlead.routers.values import (
    BFD_INTERVAL_MS,
    BFD_MULTIPLIER,
    HOLD_TIME_S,
    KEEPALIVE_TIME_S,
    Prefix,
    Reach,
)

NOTHING = "fairlead-nothing"
"""The name of the policy towards the gateways, which need no route of the router."""


def render(reach: Reach) -> str:
    """Return the commands."""
    return "\n".join((*_header(), *_filters(reach), *_bfd(reach), *_bgp(reach))) + "\n"


def _header() -> Iterator[str]:
    yield "! For FRR on the router. Check it: vtysh -C -f FILE. Add it: vtysh -f FILE"
    yield "! A router that runs Linux chooses the next hop by addresses alone, unless these are 1:"
    yield "! net.ipv4.fib_multipath_hash_policy, net.ipv6.fib_multipath_hash_policy"


def _ip(family: Family) -> str:
    return "ip" if family == "IPv4" else "ipv6"


def _group(family: Family) -> str:
    """Return the name of the peer group, the prefix list and the policy of one family."""
    return f"fairlead{family[-1]}"


def _filters(reach: Reach) -> Iterator[str]:
    """Yield policies. Without one, FRR accepts no route of an eBGP neighbor (RFC 8212)."""
    for family in reach.families:
        for number, each in enumerate(reach.of(family), 1):
            yield f"{_ip(family)} prefix-list {_group(family)} seq {number * 5} {_permit(each)}"
        yield f"route-map {_group(family)} permit 10"
        yield f" match {_ip(family)} address prefix-list {_group(family)}"
        yield "exit"
    yield f"route-map {NOTHING} deny 10"
    yield "exit"


def _permit(prefix: Prefix) -> str:
    """Return the rule that permits the single addresses of a prefix."""
    longer = "" if prefix.length == prefix.bits else f" ge {prefix.bits}"
    return f"permit {prefix.prefix}{longer}"


def _bfd(reach: Reach) -> Iterator[str]:
    if reach.bfd:
        yield "bfd"
        yield " profile fairlead"
        yield f"  detect-multiplier {BFD_MULTIPLIER}"
        yield f"  receive-interval {BFD_INTERVAL_MS}"
        yield f"  transmit-interval {BFD_INTERVAL_MS}"
        yield " exit"
        yield "exit"


def _bgp(reach: Reach) -> Iterator[str]:
    yield f"router bgp {reach.router_asn}"
    yield " bgp bestpath as-path multipath-relax"
    for family in reach.families:
        group = _group(family)
        yield f" neighbor {group} peer-group"
        yield f" neighbor {group} remote-as {reach.asn}"
        yield f" neighbor {group} timers {KEEPALIVE_TIME_S} {HOLD_TIME_S}"
        if reach.bfd:
            yield f" neighbor {group} bfd"
            yield f" neighbor {group} bfd profile fairlead"
        for name, address in reach.addresses(family):
            yield f" neighbor {address} peer-group {group}"
            yield f" neighbor {address} description {name}"
    for family in reach.families:
        group = _group(family)
        if family == "IPv6":
            yield " address-family ipv4 unicast"
            yield f"  no neighbor {group} activate"
            yield " exit-address-family"
        yield f" address-family {family.lower()} unicast"
        yield f"  neighbor {group} activate"
        yield f"  neighbor {group} route-map {group} in"
        yield f"  neighbor {group} route-map {NOTHING} out"
        yield f"  neighbor {group} maximum-prefix {reach.routes(family)}"
        yield f"  maximum-paths {'ibgp ' if reach.internal else ''}{reach.paths}"
        yield " exit-address-family"
    yield "exit"
