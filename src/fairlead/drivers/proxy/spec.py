"""What HAProxy should do and what it does, as values, and the steps between them. Pure.

In: LoadBalancers of class fairlead.io/proxy, and what was read from HAProxy. Out: specs and
changes. Servers and source ranges are changed in the running process; a listener that comes, goes
or works otherwise needs another configuration, which a new worker takes over with the open sockets
(a reload), while connections end in the old one. Invariant: equal plans give equal specs, on every
gateway; HAProxy's choice by the client's address is the same there, then."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlead.model import (
    HealthMonitor,
    Listener,
    LoadBalancer,
    ProxyHeader,
    ProxySettings,
    ServiceKey,
    Value,
)
from fairlead.net.address import join_host_port
from fairlead.plan import serving
from fairlead.plan.conflicts import Basis, Precedence, first

MOST_WEIGHT = 256
"""HAProxy's limit."""
SOURCE_SCALE = 16
"""A server has 16 points on the ring of addresses for each unit of weight: too few to be fair where
pods are the units."""


class ProxyKey(Value, frozen=True):
    """An address and port that connections are taken on."""

    address: str
    port: int

    def __str__(self) -> str:
        return join_host_port(self.address, self.port)


class Server(Value, frozen=True):
    """A node that connections are passed to. `weight` 0: it gets no new ones."""

    node: str
    address: str
    port: int
    weight: int


class ProxyListener(Value, frozen=True):
    """One listener but for its servers: what only another configuration can change. `check`: how
    HAProxy asks members, if the Service wants that (None with `settings.checks`: whether they take
    a connection). `restricted`: only source ranges are let in."""

    key: ProxyKey
    settings: ProxySettings
    check: HealthMonitor | None = None
    restricted: bool = False


class Served(Value, frozen=True):
    """A listener with its servers, sorted by node. `undecided`: nodes whose first probe is
    outstanding, while no node is confirmed; see `plan.serving`."""

    listener: ProxyListener
    servers: tuple[Server, ...]
    undecided: tuple[str, ...] = ()


class ProxySpec(Value, frozen=True):
    """What one Service should have, or has. `drain_s`: so long a server keeps connections after it
    has ceased to get new ones; 0: as long as they last. `cut`: connections that were ended and of
    which the Service's owner is to be told."""

    uid: str
    listeners: tuple[Served, ...]
    source_ranges: tuple[str, ...] = ()
    drain_s: float = 0.0
    cut: int = 0


class SetRanges(Value, frozen=True):
    """Let in who is in these ranges, and nobody else."""

    service: ServiceKey
    cidrs: tuple[str, ...]

    def __str__(self) -> str:
        return f"set acl {self.service} {len(self.cidrs)} ranges"


class SetDrain(Value, frozen=True):
    """End connections of servers that get nothing new after this time."""

    service: ServiceKey
    drain_s: float

    def __str__(self) -> str:
        return f"set drain {self.service} {self.drain_s:g}s"


class SetServers(Value, frozen=True):
    """Have these servers behind the listener, in the process that runs."""

    service: ServiceKey
    key: ProxyKey
    servers: tuple[Server, ...]

    def __str__(self) -> str:
        servers = ",".join(f"{each.node}={each.weight}" for each in self.servers) or "none"
        return f"set server {self.key} {self.service} weights {servers}"


class SetListener(Value, frozen=True):
    """Have this listener, by a reload. `cidrs`: the source ranges of its Service."""

    service: ServiceKey
    uid: str
    served: Served
    cidrs: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = self.served.listener.settings
        words = [f"reload with listener {self.served.listener.key} {self.service}"]
        words += [f"PROXY {settings.header}"] * bool(settings.header) + [
            "HTTP"
        ] * settings.forwarded_for
        return " ".join(words)


class RemoveListener(Value, frozen=True):
    """Take nothing more on this address and port, by a reload."""

    service: ServiceKey
    key: ProxyKey

    def __str__(self) -> str:
        return f"reload without listener {self.key} {self.service}"


class TellCut(Value, frozen=True):
    """Tell the Service's owner that connections were ended."""

    service: ServiceKey
    connections: int

    def __str__(self) -> str:
        return f"tell {self.service} that {self.connections} connections were ended"


ProxyChange = SetRanges | SetDrain | SetServers | SetListener | RemoveListener | TellCut


def specs_of(
    intents: Mapping[ServiceKey, LoadBalancer], drain_s: float = 0.0
) -> dict[ServiceKey, ProxySpec]:
    """The specs of the LoadBalancers with ProxySettings. `drain_s`: of those that do not say it
    themselves."""
    return {
        key: _spec(intent, intent.settings, drain_s)
        for key, intent in intents.items()
        if isinstance(intent.settings, ProxySettings)
    }


def _spec(intent: LoadBalancer, settings: ProxySettings, drain_s: float) -> ProxySpec:
    limit_s = serving.drain_limit_s(settings, drain_s)
    # A listener is set by a reload, which a new limit does not need.
    settings = msgspec.structs.replace(settings, drain_timeout_s=None)
    listeners = []
    for listener in intent.listeners:
        for address in intent.listening(listener):
            if listener.protocol != "TCP" or not listener.node_port:
                continue  # the plan has said so already
            made = ProxyListener(
                ProxyKey(address, listener.port),
                settings,
                intent.health_monitor if settings.checks else None,
                bool(intent.source_ranges),
            )
            shares = serving.shares_of(listener)
            servers = _servers(listener, shares.weights, settings)
            listeners.append(Served(made, servers, shares.undecided))
    return ProxySpec(intent.uid, tuple(sorted(listeners)), intent.source_ranges, limit_s)


def _servers(
    listener: Listener, shares: Sequence[tuple[str, int]], settings: ProxySettings
) -> tuple[Server, ...]:
    """Every member. A member without a share has weight 0, which leaves it the connections that it
    has: a member keeps TCP connections in every state (see `plan.serving`)."""
    weights = {member.node: 0 for member in listener.members} | dict(shares)
    most = max(weights.values(), default=0)
    scale = SOURCE_SCALE if settings.method == "source" else 1
    return tuple(
        sorted(
            Server(
                member.node,
                member.address,
                listener.node_port,
                _scaled(weights[member.node], most, scale),
            )
            for member in listener.members
        )
    )


def _scaled(weight: int, most: int, scale: int) -> int:
    """Within HAProxy's limit, and never 0 for what has a share."""
    if most * scale <= MOST_WEIGHT:
        return weight * scale
    return max(1, round(weight * MOST_WEIGHT / most)) if weight else 0


def diff(
    desired: Mapping[ServiceKey, ProxySpec], actual: Mapping[ServiceKey, ProxySpec]
) -> tuple[ProxyChange, ...]:
    """The steps from `actual` to `desired`: what the running process can do first."""
    live: list[ProxyChange] = []
    sets: list[ProxyChange] = []
    removals: list[ProxyChange] = []
    nothing = ProxySpec("", ())
    for service in sorted(desired.keys() | actual.keys()):
        wanted, present = desired.get(service, nothing), actual.get(service, nothing)
        there = {each.listener.key: each for each in present.listeners}
        restricted = False
        if present.cut:
            live.append(TellCut(service, present.cut))
        for served in wanted.listeners:
            found = there.pop(served.listener.key, None)
            if found is None or found.listener != served.listener or present.uid != wanted.uid:
                sets.append(
                    SetListener(service, wanted.uid, _settled(served, found), wanted.source_ranges)
                )
                continue
            restricted |= found.listener.restricted
            servers = _settled(served, found).servers
            if servers != found.servers:
                live.append(SetServers(service, served.listener.key, servers))
        removals += [RemoveListener(service, key) for key in sorted(there)]
        if restricted and wanted.source_ranges != present.source_ranges:
            live.append(SetRanges(service, wanted.source_ranges))
        if wanted.listeners and wanted.drain_s != present.drain_s:
            sets.append(SetDrain(service, wanted.drain_s))
    return (*live, *sets, *removals)


def _settled(served: Served, found: Served | None) -> Served:
    """The listener with the servers that it is to have now. Where it stays as it is, the servers
    that have a weight keep it, and the others are there without one."""
    planned = {each.node: each for each in served.servers}
    present = {
        each.node: each
        for each in (found.servers if found is not None and served.undecided else ())
        if each.weight and (each.node not in planned or _same(each, planned[each.node]))
    }
    weights = [(each.node, each.weight) for each in served.servers if each.weight]
    if not serving.stays_as_it_is(weights, served.undecided, present):
        return served
    others = {node: msgspec.structs.replace(each, weight=0) for node, each in planned.items()}
    return Served(served.listener, tuple(sorted((others | present).values())))


def _same(one: Server, other: Server) -> bool:
    return (one.address, one.port) == (other.address, other.port)


def after(
    actual: Mapping[ServiceKey, ProxySpec], changes: Iterable[ProxyChange]
) -> dict[ServiceKey, ProxySpec]:
    """What is there when the changes are carried out. A Service that has no listener is not
    there."""
    specs = dict(actual)
    for change in changes:
        spec = specs.get(change.service, ProxySpec("", ()))
        match change:
            case SetRanges(cidrs=cidrs):
                spec = msgspec.structs.replace(spec, source_ranges=cidrs)
            case SetDrain(drain_s=drain_s):
                spec = msgspec.structs.replace(spec, drain_s=drain_s)
            case SetServers(key=key, servers=servers):
                listeners = tuple(
                    Served(each.listener, servers) if each.listener.key == key else each
                    for each in spec.listeners
                )
                spec = msgspec.structs.replace(spec, listeners=listeners)
            case SetListener(served=served, uid=uid, cidrs=cidrs):
                others = [
                    each for each in spec.listeners if each.listener.key != served.listener.key
                ]
                spec = ProxySpec(
                    uid,
                    tuple(sorted([*others, Served(served.listener, served.servers)])),
                    cidrs,
                    spec.drain_s,
                )
            case RemoveListener(key=key):
                left = tuple(each for each in spec.listeners if each.listener.key != key)
                spec = msgspec.structs.replace(spec, listeners=left)
        specs[change.service] = spec
    return {service: spec for service, spec in specs.items() if spec.listeners}


def rivals(
    specs: Mapping[ServiceKey, ProxySpec], before: Mapping[ServiceKey, ProxySpec]
) -> dict[ServiceKey, ServiceKey]:
    """The Services that must wait because another one listens where they want to, each with that
    Service: HAProxy would share the connections between both.

    This is the last line of defence and decides no conflict: the plan gives a port to one Service
    (see `plan.conflicts`). It concerns Services that are not planned in the same pass. A Service
    that has the listener keeps it until it is planned without it."""
    has = {
        each.listener.key: service for service, spec in before.items() for each in spec.listeners
    }
    wanting: dict[ProxyKey, list[ServiceKey]] = {}
    for service, spec in sorted(specs.items()):
        for each in spec.listeners:
            wanting.setdefault(each.listener.key, []).append(service)
    found: dict[ServiceKey, ServiceKey] = {}
    for key, services in wanting.items():
        if len(services) > 1:
            owner = first(
                Precedence(Basis.SHOWN if has.get(key) == each else Basis.WISHED, "", each)
                for each in services
            )
            found |= {each: owner for each in services if each != owner}
    return found


def switches(
    before: Mapping[ServiceKey, ProxySpec], after: Mapping[ServiceKey, ProxySpec]
) -> dict[ServiceKey, tuple[ProxyHeader, ProxyHeader]]:
    """The Services whose new connections begin with another header than those before, and both."""
    found = {}
    for service, one in sorted(after.items()):
        there = before.get(service)
        if there is None or there.uid != one.uid:
            continue
        headers = {each.listener.key: each.listener.settings.header for each in there.listeners}
        for each in one.listeners:
            old, new = headers.get(each.listener.key), each.listener.settings.header
            if old is not None and old != new:
                found[service] = (old, new)
    return found


def needs_reload(changes: Sequence[ProxyChange]) -> bool:
    return any(isinstance(change, SetListener | RemoveListener) for change in changes)
