"""Decide which prefixes routers send to which gateways. Pure.

In: pools, gateways with their addresses, AS numbers. Out: a Reach, or Refused with what is missing.
Invariants: equal input gives an equal plan, whatever its order; no address of a gateway is in a
prefix, because the route would lead to itself then."""

import ipaddress
from collections.abc import Iterable, Iterator

import msgspec

from fairlead.config import PoolConfig, parse_range
from fairlead.errors import Refused
from fairlead.model import Family
from fairlead.net.address import canonical
from fairlead.plan.pools import family_of_version
from fairlead.routers.values import FAMILIES, MIN_PATHS, Hop, Prefix, Reach

ASN, ROUTER_ASN = 64513, 64512
"""The default AS numbers of gateways and router, from the range for private use (RFC 6996)."""
MANY_PREFIXES = 32
MAX_NAME_LENGTH = 253


def reach_of(
    pools: Iterable[PoolConfig],
    gateways: Iterable[Hop],
    *,
    asn: int = ASN,
    router_asn: int = ROUTER_ASN,
    bfd: bool = False,
) -> Reach:
    """Return the plan for a router. Raise Refused if there is no pool or no gateway, if no gateway
    has an address in the family of a pool, or if one has an address in a pool."""
    reach = side_of_gateways(pools, asn=asn, router_asn=router_asn, bfd=bfd)
    hops = tuple(
        Hop(plain_name(each.name), each.addresses)
        for each in sorted(gateways, key=lambda each: each.name)
    )
    if not hops:
        raise Refused(
            "no gateway is known to which a router could send packets",
            fix="start gateways, or give their addresses with --next-hop",
        )
    for hop in hops:
        for address in hop.addresses:
            check_apart(reach, address, f"gateway {hop.name}")
    reach = msgspec.structs.replace(reach, gateways=hops)
    if not reach.families:
        families = " and ".join(each for each in FAMILIES if reach.of(each))
        raise Refused(
            f"the pools have {families} addresses, and no gateway has an address of that family",
            fix="give one with --next-hop",
        )
    return reach


def side_of_gateways(
    pools: Iterable[PoolConfig], *, asn: int = ASN, router_asn: int = ROUTER_ASN, bfd: bool = False
) -> Reach:
    """Return the plan for the gateways themselves. Raise Refused if there is no pool."""
    prefixes = tuple({each.prefix: each for each in _prefixes(pools)}.values())
    if not prefixes:
        raise Refused("there is no pool", fix="create an AddressPool, or write pools in --config")
    return Reach(prefixes, (), asn, router_asn, bfd)


def check_apart(reach: Reach, address: str, whose: str) -> None:
    """Raise Refused if the address of a host is in a pool: a route for the pool would lead to
    itself, and a gateway could announce the address of the host."""
    parsed = ipaddress.ip_address(address)
    for each in reach.prefixes:
        if parsed in ipaddress.ip_network(each.prefix):
            raise Refused(
                f"address {address} of {whose} is in {each.prefix} of pool {each.pool}, so a route "
                "for the pool would lead to itself",
                fix="take the addresses of hosts out of the pool, or give other ones",
            )


def plain_name(text: str) -> str:
    """Return a name without characters that could end a comment or a description."""
    kept = "".join(each for each in text[:MAX_NAME_LENGTH] if each.isascii() and each.isprintable())
    return kept.strip() or "?"


def next_hop_of(text: str) -> Hop:
    """Return the gateway in `ADDRESS` or `NAME=ADDRESS`. Raise ValueError if the text has no
    address that a router can use as a next hop."""
    name, _, written = text.rpartition("=")
    return Hop(name or written, (usable_address(written),))


def usable_address(text: str) -> str:
    """Return the canonical form of a host's address. Raise ValueError if the text is no address, or
    one that is no host's, or that is valid on one link only."""
    try:
        address = canonical(text)
        parsed = ipaddress.ip_address(address)
    except (OSError, ValueError):
        raise ValueError(f"{text!r} is not an IP address") from None
    if parsed.is_link_local or "%" in address:
        raise ValueError(f"{text!r} is valid on one link only")
    if parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified:
        raise ValueError(f"{text!r} is not the address of another host")
    return address


def merged(hops: Iterable[Hop]) -> list[Hop]:
    """Return one gateway for each name, with the addresses of all. Raise ValueError if one has two
    addresses of a family."""
    found: dict[str, tuple[str, ...]] = {}
    for each in hops:
        addresses = (*found.get(each.name, ()), *each.addresses)
        for family in FAMILIES:
            own = [one for one in addresses if (":" in one) == (family == "IPv6")]
            if len(own) > 1:
                raise ValueError(f"{each.name} has two {family} addresses: {', '.join(own)}")
        found[each.name] = addresses
    return [Hop(name, addresses) for name, addresses in found.items()]


def _prefixes(pools: Iterable[PoolConfig]) -> Iterator[Prefix]:
    for pool in pools:
        for text in pool.addresses:
            version, first, last = parse_range(text)
            family: Family = family_of_version(version)
            kind = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
            for each in ipaddress.summarize_address_range(kind(first), kind(last)):
                yield Prefix(plain_name(pool.name), str(each), family)


def notes_of(reach: Reach) -> Iterator[str]:
    """Yield what the operator has to check, whatever router it is."""
    for family in FAMILIES:
        with_one = {name for name, _ in reach.addresses(family)}
        without = [each.name for each in reach.gateways if each.name not in with_one]
        if reach.of(family) and without:
            yield (
                f"no {family} address is known of {', '.join(without)}: the {family} addresses of "
                "the pools do not lead there"
            )
    if len(reach.gateways) > MIN_PATHS:
        yield (
            f"there are {len(reach.gateways)} next hops, and many routers use 8 to 64 at most and "
            "ignore the others silently: look at the routes that the router has installed"
        )
    if len(reach.prefixes) > MANY_PREFIXES:
        yield f"the pools have {len(reach.prefixes)} prefixes; pools that are CIDRs have fewer"
