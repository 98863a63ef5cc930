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
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


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
    """A listener with its servers, sorted by node. `undecided`: nobody is proved to serve yet, but
    some are about to be proved; one that serves goes on as it does."""

    listener: ProxyListener
    servers: tuple[Server, ...]
    undecided: bool = False


class ProxySpec(Value, frozen=True):
    """What one Service should have, or has. `drain_s`: so long a server keeps connections after it
    has ceased to get new ones; 0: as long as they last."""

    uid: str
    listeners: tuple[Served, ...]
    source_ranges: tuple[str, ...] = ()
    drain_s: float = 0.0


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


ProxyChange = SetRanges | SetDrain | SetServers | SetListener | RemoveListener


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
    limit_s = drain_s if settings.drain_timeout_s is None else settings.drain_timeout_s
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
            servers = servers_of(listener, settings)
            listeners.append(Served(made, servers, _undecided(listener)))
    return ProxySpec(intent.uid, tuple(sorted(listeners)), intent.source_ranges, limit_s)


def _undecided(listener: Listener) -> bool:
    states = {member.state for member in listener.members if member.weight}
    return "pending" in states and "active" not in states


def servers_of(listener: Listener, settings: ProxySettings) -> tuple[Server, ...]:
    """Every member; who is not active has weight 0, which leaves it the connections that it has.
    Where nobody is proved yet, who drains may have a weight (see `plan.members`)."""
    state = "draining" if _undecided(listener) else "active"
    weights = {
        member.node: member.weight if member.state == state else 0 for member in listener.members
    }
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
    """What the listener is to have, where nothing is proved yet: nobody who serves is taken away,
    and nobody else gets anything as long as there is one. Who is no member any more serves on only
    if nobody else may."""
    if not served.undecided:
        return served
    before = {each.node: each for each in found.servers} if found is not None else {}
    wanted = {each.node: each for each in served.servers}
    others = any(each.weight for each in served.servers)
    kept = {
        node: each
        for node, each in before.items()
        if each.weight and (_same(each, wanted[node]) if node in wanted else not others)
    }
    if kept:
        wanted = {node: msgspec.structs.replace(each, weight=0) for node, each in wanted.items()}
    return Served(served.listener, tuple(sorted((wanted | kept).values())))


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
    """The Services that want a listener which another one has: two would share its connections. Who
    had it before keeps it, else the first by name."""
    taken = {
        each.listener.key: service
        for service, spec in before.items()
        if service in specs
        for each in spec.listeners
    }
    found: dict[ServiceKey, ServiceKey] = {}
    for service, spec in sorted(specs.items()):
        for each in spec.listeners:
            owner = taken.get(each.listener.key, service)
            if owner != service and any(
                theirs.listener.key == each.listener.key for theirs in specs[owner].listeners
            ):
                found[service] = owner
            else:
                taken[each.listener.key] = service
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
