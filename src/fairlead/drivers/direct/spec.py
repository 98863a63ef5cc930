"""What the direct data plane should do and what it does, as values, and the steps between them.
Pure.

In: LoadBalancers of class fairlead.io/direct, and what was read from the maps. Out: specs and
changes. Invariant: a change carries the slots that result from it, so that what `diff` says is what
`apply` writes, unless a node turns out to be out of reach (`without`); the slots of a listener
depend on its weights, on who may keep connections, and on the slots before (net/transition.py). A
listener that was set for the same spec before has the slots that it should have."""

import math
from array import array
from collections.abc import Iterable, Mapping, Set
from typing import Literal

import msgspec

from fairlead.model import DirectSettings, Listener, LoadBalancer, ServiceKey, Value
from fairlead.net import maglev
from fairlead.net.address import canonical, is_ipv6, join_host_port
from fairlead.net.transition import Slots, nodes_in, transition
from fairlead.plan import serving

DEFAULT_RETAIN_DEPARTED_S = 24 * 3600.0
"""kube-proxy's time-out of established TCP connections (conntrack.tcpEstablishedTimeout): a node
has forgotten by then what was idle all the time. The list must end somewhere: entries and slots do
not show whether a connection is still in use."""
MAX_RANGES_SHOWN = 5

ListenerProtocol = Literal["TCP", "UDP", "SCTP"]


class ListenerKey(Value, frozen=True):
    """An address, port and protocol that packets may be sent to."""

    address: str
    port: int
    protocol: ListenerProtocol

    def __str__(self) -> str:
        return f"{join_host_port(self.address, self.port)}/{self.protocol}"


class ListenerSpec(Value, frozen=True):
    """One listener: who gets its new connections in which shares, and who may keep the ones they
    have.

    `retain_departed`: a node that is no member any more keeps its connections too. So it is with policy
    Cluster, where they go on to pods elsewhere, whether the node has any or not. `departed`: these
    nodes, and `expired`: members that have kept connections without getting new ones for longer
    than `drain_s` (0: there is no such limit), and keep them no more. `diff` names both.
    `restricted`: only clients in the Service's source ranges are let in."""

    key: ListenerKey
    by_source: bool
    weights: tuple[tuple[str, int], ...]
    retained_nodes: tuple[str, ...]
    retain_departed: bool = False
    departed: tuple[str, ...] = ()
    drain_s: float = 0.0
    expired: tuple[str, ...] = ()
    restricted: bool = False
    refuses: bool = False
    """The Service has no endpoints: a packet for which there is no node is answered with a
    refusal."""
    undecided: tuple[str, ...] = ()
    """Nodes whose first probe is outstanding, while no node is confirmed; see `plan.serving`."""

    @property
    def idle(self) -> set[str]:
        """The nodes that get no new connections and may have some, or might if it had not been for
        too long."""
        return {*self.retained_nodes, *self.departed, *self.expired}.difference(
            [node for node, _ in self.weights]
        )


class DirectSpec(Value, frozen=True):
    """What one Service should have. `addresses` are those of its nodes, of every family it uses."""

    uid: str
    listeners: tuple[ListenerSpec, ...]
    addresses: tuple[tuple[str, str], ...]
    source_ranges: tuple[str, ...] = ()


class ActualListener(Value, frozen=True):
    """One listener as the maps hold it. What they do not say, because only a plan knows it: `spec`,
    what it was last set for, and `retained_nodes`, the nodes that may have connections of it; None and a
    guess until a plan has said it. `idle_s`: of nodes that get no new connections of it, for how
    long that has been so. `used`: packets have been sent on for it; else there is nothing to keep
    where it is, and its slots follow from its weights alone, whatever they were: so gateways that
    learned of a new Service's nodes one by one, each in an order of its own, have the same.
    `degraded`: the listener has less than its spec asks for, because there was no room: it is set
    again until it has everything."""

    key: ListenerKey
    slots: Slots
    spec: ListenerSpec | None = None
    retained_nodes: tuple[str, ...] = ()
    idle_s: tuple[tuple[str, float], ...] = ()
    used: bool = True
    degraded: bool = False


class DirectActual(Value, frozen=True):
    """What one Service has. `addresses` are the usable ones of the nodes that occur in its
    slots."""

    uid: str
    listeners: tuple[ActualListener, ...]
    addresses: tuple[tuple[str, str], ...]
    source_ranges: tuple[str, ...] = ()


class SetNode(Value, frozen=True):
    """Send what the node gets in the address's family to that address."""

    service: ServiceKey
    node: str
    address: str

    def __str__(self) -> str:
        return f"set node {self.node} address {self.address}"


class SetRanges(Value, frozen=True):
    """Have the Service's source ranges be these; listeners that are restricted follow them."""

    service: ServiceKey
    cidrs: tuple[str, ...]

    def __str__(self) -> str:
        others = len(self.cidrs) - MAX_RANGES_SHOWN
        shown = ",".join(self.cidrs[:MAX_RANGES_SHOWN]) + (
            f" and {others} others" if others > 0 else ""
        )
        return f"set ranges {self.service} {shown}"


class SetListener(Value, frozen=True):
    """Put these slots in the place of what the listener has; make it first if it is new. Where it
    has them already, nothing changes in the kernel; it is noted what they are for. `taken_from`:
    the Service that has it, but wants it no more. `from_scratch`: the slots before did not count, because
    no packet had been sent on by them. `old_slots`: those that it had."""

    service: ServiceKey
    uid: str
    listener: ListenerSpec
    slots: Slots
    taken_from: ServiceKey | None = None
    from_scratch: bool = False
    old_slots: Slots = Slots()

    def __str__(self) -> str:
        listener = self.listener
        weights = ",".join(f"{node}={weight}" for node, weight in listener.weights) or "none"
        active = {node for node, _ in listener.weights}
        retained = ",".join(sorted({*listener.retained_nodes, *listener.departed} - active))
        words = [
            f"set listener {listener.key} {self.service} weights {weights} slots "
            f"{len(self.slots.current) // 2}"
        ]
        words += ["affinity ClientIP"] * listener.by_source
        words += [f"retained {retained}"] * bool(retained)
        words += [f"expired {','.join(listener.expired)}"] * bool(listener.expired)
        words += ["restricted"] * listener.restricted
        words += ["refusing"] * listener.refuses
        return " ".join(words)


class RemoveListener(Value, frozen=True):
    """Take the listener away; packets for it are no longer ours."""

    service: ServiceKey
    key: ListenerKey

    def __str__(self) -> str:
        return f"remove listener {self.key} {self.service}"


DirectChange = SetNode | SetRanges | SetListener | RemoveListener


def render(
    intents: Mapping[ServiceKey, LoadBalancer], drain_s: float = 0.0
) -> dict[ServiceKey, DirectSpec]:
    """The specs of the LoadBalancers with DirectSettings. `drain_s`: of those that do not say it
    themselves."""
    return {
        key: _render(intent, intent.settings, drain_s)
        for key, intent in intents.items()
        if isinstance(intent.settings, DirectSettings)
    }


def _render(intent: LoadBalancer, settings: DirectSettings, drain_s: float) -> DirectSpec:
    listeners = []
    addresses = set()
    limit_s = serving.drain_limit_s(settings, drain_s)
    for listener in intent.listeners:
        for address in intent.listening(listener):
            key = ListenerKey(canonical(address), listener.port, listener.protocol)
            listeners.append(_listener(key, listener, intent, limit_s))
        addresses.update([(member.node, canonical(member.address)) for member in listener.members])
    return DirectSpec(
        intent.uid, tuple(sorted(listeners)), tuple(sorted(addresses)), intent.source_ranges
    )


def _listener(
    key: ListenerKey, listener: Listener, intent: LoadBalancer, drain_s: float
) -> ListenerSpec:
    shares = serving.shares_of(listener)
    return ListenerSpec(
        key,
        by_source=intent.affinity_timeout_s > 0,
        weights=shares.weights,
        retained_nodes=shares.retained_nodes,
        retain_departed=shares.retain_departed,
        drain_s=drain_s,
        restricted=bool(intent.source_ranges),
        refuses=not listener.has_endpoints,
        undecided=shares.undecided,
    )


def diff(
    desired: Mapping[ServiceKey, DirectSpec],
    actual: Mapping[ServiceKey, DirectActual],
    retain_departed_s: float = DEFAULT_RETAIN_DEPARTED_S,
) -> tuple[DirectChange, ...]:
    """The steps from `actual` to `desired`: nodes and source ranges first, then listeners, then
    what is to go.

    `retain_departed_s`: so long a node that is no member any more may keep connections, where the policy
    lets it. A listener that passes from one Service to another keeps its slots, and so its
    connections. One that a node without a usable next hop is to serve is set in any case: only
    `apply` finds out whether that node may have a share."""
    present = {
        each.key: (service, one.uid, each)
        for service, one in actual.items()
        for each in one.listeners
    }
    known = {pair for one in actual.values() for pair in one.addresses}
    wanted = {each.key for spec in desired.values() for each in spec.listeners}
    nodes: dict[tuple[str, str], SetNode] = {}
    sets: list[SetRanges | SetListener] = []
    for service, spec in sorted(desired.items()):
        missing = [pair for pair in spec.addresses if pair not in known]
        needed: set[str] = set()
        if spec.source_ranges and spec.source_ranges != (
            actual[service].source_ranges if service in actual else ()
        ):
            sets.append(SetRanges(service, spec.source_ranges))
        for each in spec.listeners:
            owner, uid, found = present.get(
                each.key, (service, "", ActualListener(each.key, Slots()))
            )
            if (
                each.undecided
                and owner == service
                and serving.stays_as_it_is(each.weights, each.undecided, _serving(found.slots))
            ):
                needed.update(found.slots.nodes)
                continue
            listener = _with_retention(each, found, retain_departed_s)
            old_slots = found.slots if found.used else Slots()
            slots = (
                found.slots
                if listener == found.spec and not found.degraded
                else _computed_slots(listener, old_slots)
            )
            needed.update(slots.nodes)
            same = (owner, uid, found.spec) == (service, spec.uid, listener) and not found.degraded
            if not same or _serves_any(missing, listener, slots):
                taken_from = (
                    owner
                    if owner != service and not _includes(desired.get(owner), each.key)
                    else None
                )
                from_scratch = not found.used and bool(found.slots.current)
                sets.append(
                    SetListener(
                        service, spec.uid, listener, slots, taken_from, from_scratch, found.slots
                    )
                )
        for pair in missing:
            if (
                pair[0] in needed and pair not in nodes
            ):  # at a start nearly all are, a hundred thousand times
                nodes[pair] = SetNode(service, *pair)
    removals = [
        RemoveListener(owner, key)
        for key, (owner, _, _) in sorted(present.items())
        if key not in wanted
    ]
    return (*sorted(nodes.values()), *sets, *removals)


def _serving(slots: Slots) -> set[str]:
    """The nodes that get new connections by these slots."""
    return {slots.nodes[number] for number in nodes_in(array("H", slots.current))}


def precompute_tables(intents: Mapping[ServiceKey, LoadBalancer]) -> None:
    """Make the tables that a diff would ask for; they are kept for it."""
    maglev.prepare(
        serving.active_weights(listener)
        for intent in intents.values()
        for listener in intent.listeners
    )


def without_nodes(change: SetListener, nodes: Set[str], old_slots: Slots) -> SetListener:
    """The change as it is when these nodes cannot be reached: the others have their shares, and
    they keep their connections. Where nobody can be reached the slots stay as they were to be:
    nothing is won by giving up, and all is well again as soon as the network is. Either way the
    spec shows what was left out, so that `diff` asks for it again."""
    weights = tuple((node, weight) for node, weight in change.listener.weights if node not in nodes)
    listener = msgspec.structs.replace(change.listener, weights=weights)
    slots = _computed_slots(listener, old_slots) if weights else change.slots
    return msgspec.structs.replace(change, listener=listener, slots=slots)


def based_on(change: SetListener, old_slots: Slots) -> SetListener:
    """The change as it is when these are the slots before, and there are connections by them."""
    return msgspec.structs.replace(
        change,
        slots=_computed_slots(change.listener, old_slots),
        from_scratch=False,
        old_slots=old_slots,
    )


def _with_retention(
    listener: ListenerSpec, found: ActualListener, retain_departed_s: float
) -> ListenerSpec:
    """The listener with those who have left and may keep connections, and without those whose time
    to keep them is over.

    Who has left stays even if the policy is another one now; only with policy Cluster others
    join."""
    if not found.idle_s and not found.retained_nodes:
        return listener
    idle_s, active = dict(found.idle_s), {node for node, _ in listener.weights}
    expired = {
        node
        for node in listener.retained_nodes
        if node not in active and serving.is_drained(idle_s.get(node, 0.0), listener.drain_s)
    }
    left = set(found.retained_nodes).difference(listener.retained_nodes)
    if not listener.retain_departed:
        left.intersection_update(found.spec.departed if found.spec else ())
    left_s = min(listener.drain_s or math.inf, retain_departed_s)
    left = {node for node in left if idle_s.get(node, 0.0) < left_s}
    if not expired and not left:
        return listener
    retained_nodes = tuple(node for node in listener.retained_nodes if node not in expired)
    return msgspec.structs.replace(
        listener,
        retained_nodes=retained_nodes,
        departed=tuple(sorted(left)),
        expired=tuple(sorted(expired)),
    )


def _computed_slots(listener: ListenerSpec, old_slots: Slots) -> Slots:
    return next_slots(listener, old_slots, maglev.table(listener.weights))


def next_slots(listener: ListenerSpec, old_slots: Slots, table: maglev.Table) -> Slots:
    """The next slots of a listener that has the slots `old_slots`, with this table for its weights."""
    return transition(
        old_slots,
        table,
        frozenset((*listener.retained_nodes, *listener.departed)),
        by_source=listener.by_source,
    )


def _serves_any(missing: Iterable[tuple[str, str]], listener: ListenerSpec, slots: Slots) -> bool:
    """Whether one of these (node, address) has a share of the listener."""
    ipv6, nodes = (
        is_ipv6(listener.key.address),
        {node for node, _ in listener.weights}.intersection(slots.nodes),
    )
    return any(node in nodes and is_ipv6(address) == ipv6 for node, address in missing)


def _includes(spec: DirectSpec | None, key: ListenerKey) -> bool:
    return spec is not None and any(each.key == key for each in spec.listeners)
