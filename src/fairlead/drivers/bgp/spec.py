"""The routes that a host announces by BGP: the desired and the actual state as values. Pure.

In: intents with announcements. Out: for each Service the routes to which it contributes; for each
prefix one route, to which all Services with an address in it contribute. Invariants: a prefix is
announced while any of its addresses is. An address that another method announces from now on stays
announced until this method does. Equal intents give equal specs. The route of a prefix gets
the communities and the peers of all contributions, the highest local preference, and the sums of
the weights and of the highest weights."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import NamedTuple, Protocol

import msgspec

from fairlead.drivers.bgp import communities
from fairlead.drivers.method_change import AnnouncedElsewhere
from fairlead.model import Announcement, ServiceKey, Value

CACHED = 16_384
"""The number of routes whose form is kept: one changed address must not cost time for each of
thousands of others."""


class Announced(Protocol):
    """An intent whose addresses are announced: a LoadBalancer, or a NodeService."""

    @property
    def announcements(self) -> tuple[Announcement, ...]: ...


class Contribution(Value, frozen=True):
    """What one address of a Service contributes to the route of one prefix. `peers`: the names of
    the peers that get the route, sorted; None: every peer. `leaving`: the host is about to stop
    serving the address."""

    prefix: str
    address: str
    peers: tuple[str, ...] | None = None
    communities: tuple[str, ...] = ()
    local_preference: int | None = None
    weight: int = 0
    leaving: bool = False
    most: int = 0


Contributions = tuple[Contribution, ...]


class BgpSpec(Value, frozen=True):
    """The desired state of one Service. `problem`: why it cannot be announced as requested; it
    keeps its present state then. `moving`: its addresses that another method announces from now
    on."""

    contributions: Contributions = ()
    problem: str = ""
    moving: frozenset[str] = frozenset()


class Actual(Value, frozen=True):
    """The actual state of one Service. `grace_ended`: the neighbors had enough time to move to
    other routes since the first contribution began to leave. `to_report`: the state of the sessions
    changed since it was reported for this Service, or must be reported again. `moved`: the
    addresses that another method announces now."""

    contributions: Contributions = ()
    grace_ended: bool = False
    to_report: bool = False
    moved: frozenset[str] = frozenset()


class Route(Value, frozen=True):
    """The route of one prefix. `leaving`: all its contributions are. `most`: the highest weight of
    a host for the prefix."""

    prefix: str
    peers: tuple[str, ...] | None = None
    communities: tuple[str, ...] = ()
    local_preference: int | None = None
    weight: int = 0
    leaving: bool = False
    most: int = 0


class SetRoutes(NamedTuple):
    """Announce these addresses for the Service, and no others. `kept`: those of them that wait for
    another method."""

    service: ServiceKey
    contributions: Contributions
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        routes = ", ".join(
            f"{each.prefix}{' (leaving)' if each.leaving else ''}" for each in self.contributions
        )
        return f"bgp: announce {routes or 'nothing'} for {self.service}"


class Withdraw(NamedTuple):
    """Withdraw the addresses of the Service."""

    service: ServiceKey

    def __str__(self) -> str:
        return f"bgp: withdraw the addresses of {self.service}"


class Report(NamedTuple):
    """Report the sessions that the Service needs, or why it cannot be announced. `kept`: as for
    `SetRoutes`."""

    service: ServiceKey
    problem: str = ""
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"bgp: report the sessions for {self.service}"


Change = SetRoutes | Withdraw | Report


def specs_of(intents: Mapping[ServiceKey, Announced]) -> dict[ServiceKey, BgpSpec]:
    """Return the desired state of each Service that has addresses to be announced by BGP, or by
    another method, which may have been announced by BGP before."""
    specs = {key: _spec(intent.announcements) for key, intent in intents.items()}
    return {key: spec for key, spec in specs.items() if spec != BgpSpec()}


def _spec(announcements: Iterable[Announcement]) -> BgpSpec:
    contributions: set[Contribution] = set()
    problems: set[str] = set()
    moving: set[str] = set()
    for each in announcements:
        if each.method != "bgp":
            moving.update(() if each.leaving else each.addresses)
            continue
        problems |= {
            f"{text} is not a community; write 64512:100, 64512:1:2 or a name such as no-export"
            for text in each.communities
            if communities.parse(text) is None
        }
        for address in each.addresses:
            contributions.add(_contribution(address, each))
            if not is_routable(address):
                problems.add(f"{address} is not an address that routers may learn")
    return BgpSpec(in_order(contributions), "; ".join(sorted(problems)), frozenset(moving))


def is_routable(address: str) -> bool:
    """Return whether a router may learn a route to the address."""
    parsed = ip_address(address)
    return not (
        parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified
    )


def _contribution(address: str, announcement: Announcement) -> Contribution:
    length = (
        announcement.aggregation_length_v6 if ":" in address else announcement.aggregation_length
    )
    return Contribution(
        str(ip_network(f"{address}/{length}", strict=False)),
        address,
        announcement.peers,
        announcement.communities,
        announcement.local_preference,
        announcement.weight,
        announcement.leaving,
        announcement.most,
    )


def in_order(contributions: Iterable[Contribution]) -> Contributions:
    """Return the contributions sorted. The order is that of their texts, because optional fields
    cannot be compared."""
    return tuple(sorted(contributions, key=msgspec.json.encode))


def diff(
    desired: Mapping[ServiceKey, BgpSpec], actual: Mapping[ServiceKey, Actual]
) -> list[Change]:
    """Return the changes: first announcements, then withdrawals."""
    changes: list[Change] = []
    for key, spec in desired.items():
        found = actual.get(key, Actual())
        kept = _kept(spec, found)
        wanted = _wanted(spec.contributions, found)
        if kept:
            wanted = in_order((*wanted, *kept))
        waiting = tuple(each.address for each in kept)
        if spec.problem:
            changes.append(Report(key, spec.problem))
        elif wanted != found.contributions:
            changes.append(SetRoutes(key, wanted, waiting))
        elif found.to_report or waiting:
            changes.append(Report(key, kept=waiting))
    gone = [Withdraw(key) for key in actual if key not in desired]
    return [*changes, *gone]


def withdrawals(
    intents: Mapping[ServiceKey, Announced], actual: Mapping[ServiceKey, Actual]
) -> list[Change]:
    """Return the withdrawals of addresses that these Services no longer announce by any method. An
    address that another method announces from now on is left to `diff`."""
    changes: list[Change] = []
    for key, intent in intents.items():
        if (found := actual.get(key)) is None:
            continue
        announced = {address for each in intent.announcements for address in each.addresses}
        kept = tuple(each for each in found.contributions if each.address in announced)
        if kept != found.contributions:
            changes.append(SetRoutes(key, kept) if kept else Withdraw(key))
    return changes


def moved(contributions: Contributions, elsewhere: AnnouncedElsewhere | None) -> frozenset[str]:
    """Return the addresses that need not wait for another method any more. `elsewhere`: None if no
    address waits."""
    return frozenset(
        each.address for each in contributions if elsewhere is None or elsewhere(each.address)
    )


def _kept(spec: BgpSpec, found: Actual) -> Contributions:
    """Return the contributions that stay until another method announces their addresses."""
    waiting = spec.moving - found.moved
    return tuple(
        each
        for each in found.contributions
        if each.address in waiting and not (each.leaving and found.grace_ended)
    )


def _wanted(contributions: Contributions, found: Actual) -> Contributions:
    """Return the contributions that are due: one that leaves only if it is announced now, and only
    until the neighbors had enough time."""
    present = {(each.prefix, each.address) for each in found.contributions}
    return tuple(
        each
        for each in contributions
        if not each.leaving or ((each.prefix, each.address) in present and not found.grace_ended)
    )


def routes_of(services: Mapping[ServiceKey, Contributions]) -> dict[str, Route]:
    """Return the route of each prefix, by prefix, sorted."""
    found: dict[str, dict[ServiceKey, list[Contribution]]] = {}
    for key, contributions in services.items():
        for each in contributions:
            found.setdefault(each.prefix, {}).setdefault(key, []).append(each)
    return {prefix: _route_of(prefix, found[prefix]) for prefix in sorted(found)}


def _route_of(prefix: str, services: Mapping[ServiceKey, Sequence[Contribution]]) -> Route:
    if len(services) == 1 and len(only := next(iter(services.values()))) == 1:
        return _alone(only[0])
    return _merged(prefix, services)


@lru_cache(CACHED)
def _alone(contribution: Contribution) -> Route:
    """Return the route of a prefix to which only this contributes, as for almost all prefixes."""
    return _merged(contribution.prefix, {ServiceKey("", ""): (contribution,)})


def _merged(prefix: str, services: Mapping[ServiceKey, Collection[Contribution]]) -> Route:
    """Return the route. Contributions that leave count only if all of them do."""
    every = [each for some in services.values() for each in some]
    leaving = all(each.leaving for each in every)
    counted = [each for each in every if leaving or not each.leaving]
    # Two addresses of a Service in one prefix are served by the same pods.
    due = [[each for each in some if leaving or not each.leaving] for some in services.values()]
    weights = [max((each.weight for each in some), default=0) for some in due]
    most = [max((each.most for each in some), default=0) for some in due]
    peers = {name for each in counted for name in each.peers or ()}
    preferences = [each.local_preference for each in counted if each.local_preference is not None]
    return Route(
        prefix,
        None if any(each.peers is None for each in counted) else tuple(sorted(peers)),
        tuple(sorted({name for each in counted for name in each.communities})),
        max(preferences, default=None),
        sum(weights),
        leaving,
        sum(most),
    )


def next_hops_of(route: Route, limit: int) -> int:
    """Return the number of next hops by which a host tells its weight. `limit`: the number of its
    addresses. If a host has a higher weight, all hosts scale their weights down, so that the ratios
    of the weights stay nearly the same, provided that all have the same number of addresses."""
    if route.most <= limit:
        return min(max(route.weight, 1), limit)
    return min(max(round(route.weight * limit / route.most), 1), limit)


def peers_wanted(contributions: Sequence[Contribution]) -> frozenset[str] | None:
    """Return the names of the peers that get any of the routes; None: every peer."""
    if any(each.peers is None for each in contributions):
        return None
    return frozenset(name for each in contributions for name in each.peers or ())
