"""The desired and the actual state of HAProxy as values, and the steps between them. Pure.

In: LoadBalancers of class fairlead.io/proxy, and the state that was read from HAProxy. Out: specs
and changes. Servers and source ranges are changed in the running worker, and listeners are removed
there. A listener that is added or configured differently needs a reload: a new worker takes over
the listening sockets with another configuration, while the open connections end in the old worker.
HAProxy 2.6.12 could also change the connection limit of a listener at run time, but it hangs, and
kills itself, if connections wait for the limit that is raised. Invariant: equal plans give equal
specs on every gateway, so that HAProxy's choice by client address is the same on every gateway."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

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

MAX_WEIGHT = 256
"""The greatest weight that HAProxy accepts."""
SOURCE_SCALE = 16
"""Factor for weights with `balance source`. HAProxy gives a server 16 points on its hash ring per
unit of weight, which is too few for a fair spread if one unit is one pod."""


FullBy = Literal["", "share", "limit"]
"""What keeps new connections of a Service from being served: its share, or that of its namespace;
or the limit that the Service itself requests for each listener."""


class ProxyKey(Value, frozen=True):
    """The address and port of a listener."""

    address: str
    port: int

    def __str__(self) -> str:
        return join_host_port(self.address, self.port)


class Server(Value, frozen=True):
    """A node to which connections are passed. With weight 0 it gets no new connections."""

    node: str
    address: str
    port: int
    weight: int


class ProxyListener(Value, frozen=True):
    """A listener without its servers: the part that only a reload can change.

    - `check`: the health port that HAProxy probes, if the Service requests checks by HAProxy. With
      `settings.checks` and without `check`, HAProxy checks whether members accept a connection.
    - `restricted`: only clients in the source ranges may connect."""

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
    """The desired or actual state of one Service.

    - `drain_s`: how long a server keeps its connections after it stopped getting new ones; 0: until
      they end.
    - `closed`: the number of closed connections that remain to be reported on the Service.
    - `full`: a limit that the Service has reached, which remains to be reported."""

    uid: str
    listeners: tuple[Served, ...]
    source_ranges: tuple[str, ...] = ()
    drain_s: float = 0.0
    closed: int = 0
    full: FullBy = ""


class SetRanges(Value, frozen=True):
    """Accept connections from these source ranges only."""

    service: ServiceKey
    cidrs: tuple[str, ...]

    def __str__(self) -> str:
        return f"set acl {self.service} {len(self.cidrs)} ranges"


class SetDrain(Value, frozen=True):
    """Close the connections of drained servers after this time."""

    service: ServiceKey
    drain_s: float

    def __str__(self) -> str:
        return f"set drain {self.service} {self.drain_s:g}s"


class SetServers(Value, frozen=True):
    """Set the servers of a listener in the running worker."""

    service: ServiceKey
    key: ProxyKey
    servers: tuple[Server, ...]

    def __str__(self) -> str:
        servers = ",".join(f"{each.node}={each.weight}" for each in self.servers) or "none"
        return f"set server {self.key} {self.service} weights {servers}"


class SetListener(Value, frozen=True):
    """Add or replace a listener, by a reload. `cidrs`: the source ranges of its Service."""

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
    """Remove a listener."""

    service: ServiceKey
    key: ProxyKey

    def __str__(self) -> str:
        return f"remove listener {self.key} {self.service}"


class ReportClosed(Value, frozen=True):
    """Report on the Service that connections were closed."""

    service: ServiceKey
    connections: int

    def __str__(self) -> str:
        return f"report {self.connections} closed connections on {self.service}"


class ReportFull(Value, frozen=True):
    """Report on the Service that it has reached a limit of open connections."""

    service: ServiceKey
    full: FullBy

    def __str__(self) -> str:
        return f"report the {self.full} of connections reached by {self.service}"


ProxyChange = (
    SetRanges | SetDrain | SetServers | SetListener | RemoveListener | ReportClosed | ReportFull
)


def specs_of(
    intents: Mapping[ServiceKey, LoadBalancer], drain_s: float = 0.0
) -> dict[ServiceKey, ProxySpec]:
    """Return the specs of the LoadBalancers with ProxySettings. `drain_s` applies to Services that
    do not set a drain time themselves."""
    return {
        key: _spec(intent, intent.settings, drain_s)
        for key, intent in intents.items()
        if isinstance(intent.settings, ProxySettings)
    }


def _spec(intent: LoadBalancer, settings: ProxySettings, drain_s: float) -> ProxySpec:
    limit_s = serving.drain_limit_s(settings, drain_s)
    # The drain time is not part of the listener, because a change of it needs no reload.
    settings = msgspec.structs.replace(settings, drain_timeout_s=None)
    listeners = []
    for listener in intent.listeners:
        for address in intent.listening(listener):
            if listener.protocol != "TCP" or not listener.node_port:
                continue  # the plan has reported it already
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
    """Return a server for every member. A member without a share gets weight 0 and so keeps its
    connections: a member keeps TCP connections in every state (see `plan.serving`)."""
    weights = {member.node: 0 for member in listener.members} | dict(shares)
    greatest = max(weights.values(), default=0)
    scale = SOURCE_SCALE if settings.method == "source" else 1
    return tuple(
        sorted(
            Server(
                member.node,
                member.address,
                listener.node_port,
                _scaled(weights[member.node], greatest, scale),
            )
            for member in listener.members
        )
    )


def _scaled(weight: int, greatest: int, scale: int) -> int:
    """Scale a weight to HAProxy's limit. A weight above 0 stays above 0."""
    if greatest * scale <= MAX_WEIGHT:
        return weight * scale
    return max(1, round(weight * MAX_WEIGHT / greatest)) if weight else 0


def diff(
    desired: Mapping[ServiceKey, ProxySpec], actual: Mapping[ServiceKey, ProxySpec]
) -> tuple[ProxyChange, ...]:
    """Return the steps from `actual` to `desired`. Steps that need no reload come first."""
    live: list[ProxyChange] = []
    sets: list[ProxyChange] = []
    removals: list[ProxyChange] = []
    nothing = ProxySpec("", ())
    for service in sorted(desired.keys() | actual.keys()):
        wanted, present = desired.get(service, nothing), actual.get(service, nothing)
        existing = {each.listener.key: each for each in present.listeners}
        restricted = False
        if present.closed:
            live.append(ReportClosed(service, present.closed))
        if present.full:
            live.append(ReportFull(service, present.full))
        for served in wanted.listeners:
            found = existing.pop(served.listener.key, None)
            if found is None or found.listener != served.listener or present.uid != wanted.uid:
                sets.append(
                    SetListener(
                        service,
                        wanted.uid,
                        _with_present_weights(served, found),
                        wanted.source_ranges,
                    )
                )
                continue
            restricted |= found.listener.restricted
            servers = _with_present_weights(served, found).servers
            if servers != found.servers:
                live.append(SetServers(service, served.listener.key, servers))
        removals += [RemoveListener(service, key) for key in sorted(existing)]
        if restricted and wanted.source_ranges != present.source_ranges:
            live.append(SetRanges(service, wanted.source_ranges))
        if wanted.listeners and wanted.drain_s != present.drain_s:
            sets.append(SetDrain(service, wanted.drain_s))
    return (*live, *sets, *removals)


def _with_present_weights(served: Served, found: Served | None) -> Served:
    """Return the listener with the servers that it should have now. While the first probe of its
    nodes is outstanding and `plan.serving` leaves the listener unchanged, servers keep their
    weights, and new servers get weight 0."""
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
    """Return the state after the changes. A Service without listeners is left out."""
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
                spec = msgspec.structs.replace(
                    spec,
                    uid=uid,
                    listeners=tuple(sorted([*others, Served(served.listener, served.servers)])),
                    source_ranges=cidrs,
                )
            case RemoveListener(key=key):
                left = tuple(each for each in spec.listeners if each.listener.key != key)
                spec = msgspec.structs.replace(spec, listeners=left)
        specs[change.service] = spec
    return {service: spec for service, spec in specs.items() if spec.listeners}


def rivals(
    specs: Mapping[ServiceKey, ProxySpec], before: Mapping[ServiceKey, ProxySpec]
) -> dict[ServiceKey, ServiceKey]:
    """Return the Services that must wait because another Service listens on the same address and
    port, each with that other Service. HAProxy would divide the connections between both.

    This is the last line of defence and decides no conflict: the plan gives a port to one Service
    (see `plan.conflicts`). It concerns Services that are planned in different passes. A Service
    that has the listener keeps it until it is planned without it."""
    has = {
        each.listener.key: service for service, spec in before.items() for each in spec.listeners
    }
    requesters: dict[ProxyKey, list[ServiceKey]] = {}
    for service, spec in sorted(specs.items()):
        for each in spec.listeners:
            requesters.setdefault(each.listener.key, []).append(service)
    found: dict[ServiceKey, ServiceKey] = {}
    for key, services in requesters.items():
        if len(services) > 1:
            owner = first(
                Precedence(Basis.SHOWN if has.get(key) == each else Basis.REQUESTED, "", each)
                for each in services
            )
            found |= {each: owner for each in services if each != owner}
    return found


def switches(
    before: Mapping[ServiceKey, ProxySpec], after: Mapping[ServiceKey, ProxySpec]
) -> dict[ServiceKey, tuple[ProxyHeader, ProxyHeader]]:
    """Return the Services whose PROXY protocol header changes for new connections, each with the
    old and the new header."""
    found = {}
    for service, one in sorted(after.items()):
        existing = before.get(service)
        if existing is None or existing.uid != one.uid:
            continue
        headers = {each.listener.key: each.listener.settings.header for each in existing.listeners}
        for each in one.listeners:
            old, new = headers.get(each.listener.key), each.listener.settings.header
            if old is not None and old != new:
                found[service] = (old, new)
    return found


def needing_reload(
    changes: Sequence[ProxyChange], actual: Mapping[ServiceKey, ProxySpec]
) -> list[SetListener | RemoveListener]:
    """Return the changes for which HAProxy must be reloaded. A removal needs no reload of its own.
    It shares the reload of its Service if that also gets a listener, so that a port that replaces
    another one begins when the other one ends. With its last listener HAProxy is stopped, which
    counts as a reload."""
    listeners = [each for each in changes if isinstance(each, SetListener | RemoveListener)]
    if listeners and not after(actual, changes):
        return listeners
    set_up = {each.service for each in listeners if isinstance(each, SetListener)}
    return [each for each in listeners if each.service in set_up]
