"""The values of a plan for routers. Pure.

Invariant: networks and addresses are canonical text. A `Reach` has either sessions or routes."""

import ipaddress
from typing import Literal

import msgspec

from fairlead.announce_sections import BfdConfig
from fairlead.model import Family

Router = Literal["frr", "bird", "junos", "ios", "sonic", "linux"]
Method = Literal["static", "bgp"]

DISCARD_DISTANCE = 254
"""The administrative distance of a route that discards packets: any other route is preferred."""


class Hop(msgspec.Struct, frozen=True, omit_defaults=True):
    """A host to which a router sends packets for load-balancer addresses."""

    name: str
    addresses: tuple[str, ...]
    """At most one of each family."""
    interfaces: tuple[str, ...] = ()
    """The interfaces where the host expects these packets, as far as they are known."""

    def address(self, family: Family) -> str | None:
        """Return the address of this family; None if the host has none."""
        return next((each for each in self.addresses if (":" in each) == (family == "IPv6")), None)


class Network(msgspec.Struct, frozen=True):
    """A part of a pool. Hosts announce prefixes in it, of at least `shortest` bits."""

    pool: str
    prefix: str
    family: Family
    shortest: int

    @property
    def length(self) -> int:
        return int(self.prefix.partition("/")[2])

    @property
    def bits(self) -> int:
        """The length of the prefix of one address."""
        return 32 if self.family == "IPv4" else 128

    @property
    def announced(self) -> str:
        """The prefix that contains all announced prefixes: an aggregate may be larger than this
        part of the pool."""
        if self.shortest >= self.length:
            return self.prefix
        return str(ipaddress.ip_network(self.prefix).supernet(new_prefix=self.shortest))

    @property
    def announced_length(self) -> int:
        return min(self.length, self.shortest)


class Target(msgspec.Struct, frozen=True):
    """One next hop of a route."""

    address: str
    weight: int = 1


class Route(msgspec.Struct, frozen=True, omit_defaults=True):
    """A route with one or several next hops. `about`: the pool or the Service."""

    prefix: str
    family: Family
    targets: tuple[Target, ...]
    about: str

    @property
    def weighted(self) -> bool:
        """Whether the next hops get different shares."""
        return len({each.weight for each in self.targets}) > 1


class Neighbor(msgspec.Struct, frozen=True):
    """An announcing host, as the router sees it."""

    name: str
    address: str


MAX_NEXT_HOPS = 16
"""How many next hops of one host a limit of routes allows for."""


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """The BGP sessions between the router and all hosts that announce addresses."""

    router_asn: int
    hosts_asn: int
    router_address: str = ""
    """The address of the router in these sessions; empty: not known."""
    neighbors: tuple[Neighbor, ...] = ()
    """Empty if `ranges` are given: then the router accepts every host of these networks."""
    ranges: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    """The router's interfaces of unnumbered sessions."""
    bfd: BfdConfig | None = None
    hold_time_s: int = 9
    keepalive_time_s: int = 3
    multihop: int = 0
    ttl_security: bool = False
    password: bool = False
    """The router needs a password, which is not part of this value."""
    families: tuple[Family, ...] = ("IPv4", "IPv6")
    paths: int = 16
    """How many next hops a route may have."""
    add_path: bool = False
    """A host may announce an address with several next hops of its own (ADD-PATH, RFC 7911)."""

    @property
    def internal(self) -> bool:
        return self.router_asn == self.hosts_asn


class Note(msgspec.Struct, frozen=True):
    """A property of the network that the operator has to check."""

    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


class Reach(msgspec.Struct, frozen=True, omit_defaults=True):
    """What makes the pools reachable."""

    networks: tuple[Network, ...]
    hops: tuple[Hop, ...]
    routes: tuple[Route, ...] = ()
    sessions: Sessions | None = None
    notes: tuple[Note, ...] = ()
    host_routes: bool = False
    """Whether hosts announce each address by a route of its own, also in pools with aggregates."""

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of the networks, IPv4 first."""
        found = {each.family for each in self.networks}
        return tuple(each for each in ("IPv4", "IPv6") if each in found)

    def of(self, family: Family) -> tuple[Network, ...]:
        """Return the networks of this family."""
        return tuple(each for each in self.networks if each.family == family)

    def prefixes(self, family: Family) -> int:
        """Return how many routes a host announces at most: one for each address, or for each
        aggregate, and with ADD-PATH one for each next hop of these."""
        found = sum(
            1 << max(0, (each.bits if self.host_routes else each.shortest) - each.length)
            for each in self.of(family)
        )
        several = self.sessions is not None and self.sessions.add_path
        return found * MAX_NEXT_HOPS if several else found
