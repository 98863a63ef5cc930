"""The values of a plan for routers. Pure.

Invariant: prefixes and addresses are canonical texts, and names contain no character that ends a
comment, so that they can be written into any configuration."""

import msgspec

from fairlead.model import Family

FAMILIES: tuple[Family, ...] = ("IPv4", "IPv6")

HOLD_TIME_S, KEEPALIVE_TIME_S = 9, 3
"""The times of BGP sessions. Most routers accept no shorter ones."""
BFD_INTERVAL_MS, BFD_MULTIPLIER = 100, 3
"""A dead gateway is noticed after the product of both."""
MAX_ROUTES = 65536
"""More host routes than routers of an access layer have room for."""
MIN_PATHS, MAX_PATHS = 16, 64
"""Limits of the number of next hops of a route that routers are told to use."""


class Prefix(msgspec.Struct, frozen=True):
    """A part of a pool."""

    pool: str
    prefix: str
    family: Family

    @property
    def length(self) -> int:
        return int(self.prefix.partition("/")[2])

    @property
    def bits(self) -> int:
        """The length of the prefix of one address."""
        return 32 if self.family == "IPv4" else 128


def element(prefix: Prefix) -> str:
    """Return the single addresses of a prefix, as an element of a set of prefixes of BIRD."""
    return f"{prefix.prefix}{{{prefix.bits},{prefix.bits}}}"


class Hop(msgspec.Struct, frozen=True):
    """A gateway, with at most one address of each family."""

    name: str
    addresses: tuple[str, ...]

    def address(self, family: Family) -> str | None:
        """Return the address of this family; None if the gateway has none."""
        return next((each for each in self.addresses if (":" in each) == (family == "IPv6")), None)


class Reach(msgspec.Struct, frozen=True):
    """What makes the pools reachable: their prefixes, and the gateways as next hops.

    `gateways`: none for the side of the gateways, which is the same on all of them. `asn` is the AS
    number of the gateways, and `router_asn` that of the router; they count only with BGP."""

    prefixes: tuple[Prefix, ...]
    gateways: tuple[Hop, ...]
    asn: int
    router_asn: int
    bfd: bool = False

    @property
    def families(self) -> tuple[Family, ...]:
        """The families in which there are both prefixes and gateways, IPv4 first."""
        return tuple(each for each in FAMILIES if self.of(each) and self.addresses(each))

    @property
    def internal(self) -> bool:
        """Whether the sessions are iBGP."""
        return self.asn == self.router_asn

    @property
    def paths(self) -> int:
        """How many next hops a route may have."""
        return min(MAX_PATHS, max(MIN_PATHS, len(self.gateways)))

    def of(self, family: Family) -> tuple[Prefix, ...]:
        """Return the prefixes of this family."""
        return tuple(each for each in self.prefixes if each.family == family)

    def addresses(self, family: Family) -> tuple[tuple[str, str], ...]:
        """Return the names of the gateways with their addresses of this family."""
        found = ((each.name, each.address(family)) for each in self.gateways)
        return tuple((name, address) for name, address in found if address is not None)

    def routes(self, family: Family) -> int:
        """Return how many routes a gateway announces at most: one for each address, within
        MAX_ROUTES."""
        return min(MAX_ROUTES, sum(1 << (each.bits - each.length) for each in self.of(family)))
