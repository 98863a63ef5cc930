"""The desired and the installed state of the direct data plane, and the changes between them. Pure.

In: LoadBalancers of class fairlead.io/direct, and the state that was read from the maps. Out: specs
and changes. Invariant: a change contains the resulting slots, so `apply` writes exactly what `diff`
computed, unless a node turns out to be unreachable (`without_nodes`). The slots of a listener
depend on its weights, on the nodes that may keep connections, and on the slots that the listener
has (net/transition.py). A listener that was last set for an equal spec already has the right
slots."""

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
"""How long a node that is no longer a member may keep connections.

This is kube-proxy's timeout of established TCP connections (conntrack.tcpEstablishedTimeout): the
node has forgotten a connection that was idle for so long. A limit is necessary because neither flow
entries nor slots show whether a connection is still in use."""
MAX_RANGES_SHOWN = 5
"""The number of source ranges in the text of a change."""

ListenerProtocol = Literal["TCP", "UDP", "SCTP"]


class ListenerKey(Value, frozen=True):
    """The address, port and protocol of a listener."""

    address: str
    port: int
    protocol: ListenerProtocol

    def __str__(self) -> str:
        return f"{join_host_port(self.address, self.port)}/{self.protocol}"


class ListenerSpec(Value, frozen=True):
    """The desired state of one listener: the nodes that get new connections, and the nodes that
    keep the connections that they have. `render` leaves `departed` and `expired` empty; `diff`
    fills them."""

    key: ListenerKey
    by_source: bool
    """The client's address alone selects the node (session affinity)."""
    weights: tuple[tuple[str, int], ...]
    """(node, weight) of the nodes that get new connections."""
    retained_nodes: tuple[str, ...]
    """The members that keep their open connections."""
    retain_departed: bool = False
    """A node that is no longer a member keeps its open connections. True with policy Cluster: the
    node passes the connections to pods of other nodes, whether it has pods itself or not."""
    departed: tuple[str, ...] = ()
    """The nodes that are no longer members and keep their open connections."""
    drain_s: float = 0.0
    """How long a node keeps open connections after it last got new ones; 0: no limit."""
    expired: tuple[str, ...] = ()
    """Members that have used up `drain_s`, and no longer keep connections."""
    restricted: bool = False
    """Only clients in the Service's source ranges may connect."""
    refuses: bool = False
    """The Service has no endpoints: a packet for which there is no node is refused."""
    undecided: tuple[str, ...] = ()
    """Nodes whose first probe is outstanding, while no node is confirmed; see `plan.serving`."""

    @property
    def idle(self) -> set[str]:
        """The nodes that get no new connections but may have open ones, including the nodes that
        may not keep them any longer."""
        return {*self.retained_nodes, *self.departed, *self.expired}.difference(
            [node for node, _ in self.weights]
        )


class DirectSpec(Value, frozen=True):
    """The desired state of one Service."""

    uid: str
    listeners: tuple[ListenerSpec, ...]
    addresses: tuple[tuple[str, str], ...]
    """(node, address) of all members, in every address family that the Service uses."""
    source_ranges: tuple[str, ...] = ()


class ActualListener(Value, frozen=True):
    """The installed state of one listener."""

    key: ListenerKey
    slots: Slots
    spec: ListenerSpec | None = None
    """The spec for which the listener was last set. The maps do not hold it, so it is None for a
    listener of a previous process until this process has set the listener."""
    retained_nodes: tuple[str, ...] = ()
    """The nodes that may have open connections. While `spec` is None: every node that the maps name
    for the listener, because the maps do not show which of them may keep connections."""
    idle_s: tuple[tuple[str, float], ...] = ()
    """(node, seconds) of the nodes that get no new connections: the time since this began."""
    used: bool = True
    """Packets have been forwarded for the listener. Until then no connection has to stay on its
    node, so `diff` computes the slots from the weights alone. This gives equal slots on all
    gateways, even if they learn of the nodes of a new Service one by one, in different orders."""
    degraded: bool = False
    """The listener has less than its spec requests, because a resource was used up. `diff` plans it
    again until it has everything."""


class DirectActual(Value, frozen=True):
    """The installed state of one Service."""

    uid: str
    listeners: tuple[ActualListener, ...]
    addresses: tuple[tuple[str, str], ...]
    """(node, address) of the nodes in its slots; only addresses that the gateway can reach."""
    source_ranges: tuple[str, ...] = ()


class SetNode(Value, frozen=True):
    """Send packets for the node to this address. Affects only the family of the address."""

    service: ServiceKey
    node: str
    address: str

    def __str__(self) -> str:
        return f"set node {self.node} address {self.address}"


class SetRanges(Value, frozen=True):
    """Replace the source ranges of the Service. They apply to its restricted listeners."""

    service: ServiceKey
    cidrs: tuple[str, ...]

    def __str__(self) -> str:
        others = len(self.cidrs) - MAX_RANGES_SHOWN
        shown = ",".join(self.cidrs[:MAX_RANGES_SHOWN]) + (
            f" and {others} others" if others > 0 else ""
        )
        return f"set ranges {self.service} {shown}"


class SetListener(Value, frozen=True):
    """Replace the slots of the listener, or create the listener. If the listener has these slots
    already, nothing changes in the kernel, and only the spec is recorded."""

    service: ServiceKey
    uid: str
    listener: ListenerSpec
    slots: Slots
    taken_from: ServiceKey | None = None
    """The Service that has the listener, and no longer requests it."""
    from_scratch: bool = False
    """`slots` do not depend on `old_slots`, because no packet had been forwarded for the
    listener."""
    old_slots: Slots = Slots()
    """The slots of the listener when the change was planned."""

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
    """Delete the listener. The gateway no longer handles packets for it."""

    service: ServiceKey
    key: ListenerKey

    def __str__(self) -> str:
        return f"remove listener {self.key} {self.service}"


DirectChange = SetNode | SetRanges | SetListener | RemoveListener


def render(
    intents: Mapping[ServiceKey, LoadBalancer], drain_s: float = 0.0
) -> dict[ServiceKey, DirectSpec]:
    """Return the specs of the LoadBalancers that have DirectSettings. `drain_s`: the drain limit of
    Services that do not set one; 0: no limit."""
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
    """Return the changes that lead from `actual` to `desired`: nodes first, then source ranges and
    listeners, then removals.

    `retain_departed_s`: how long a node that is no longer a member may keep connections, if the
    policy allows it. A listener that passes from one Service to another keeps its slots, and so its
    connections. A listener with a node that has no usable next hop is always part of the changes,
    because only `apply` finds out whether the node can be reached."""
    present = {
        each.key: (service, one.uid, each)
        for service, one in actual.items()
        for each in one.listeners
    }
    reachable = {pair for one in actual.values() for pair in one.addresses}
    wanted = {each.key for spec in desired.values() for each in spec.listeners}
    nodes: dict[tuple[str, str], SetNode] = {}
    sets: list[SetRanges | SetListener] = []
    for service, spec in sorted(desired.items()):
        missing = [pair for pair in spec.addresses if pair not in reachable]
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
                # The listener is left as it is until the first probes are answered. The nodes that
                # serve it still need next hops.
                needed.update(found.slots.nodes)
                continue
            listener = _with_retention(each, found, retain_departed_s)
            old_slots = found.slots if found.used else Slots()
            # The slots of an equal spec are right already: computing them is the costly part.
            slots = (
                found.slots
                if listener == found.spec and not found.degraded
                else _computed_slots(listener, old_slots)
            )
            needed.update(slots.nodes)
            same = (owner, uid, found.spec) == (service, spec.uid, listener) and not found.degraded
            if not same or _serves_any(missing, listener, slots):
                # If both Services request the listener, its owner keeps it, and `apply`
                # reports the conflict.
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
            # When a gateway starts, all Services together name the nodes some hundred thousand
            # times, so a change is created only for the first Service that needs the node.
            if pair[0] in needed and pair not in nodes:
                nodes[pair] = SetNode(service, *pair)
    removals = [
        RemoveListener(owner, key)
        for key, (owner, _, _) in sorted(present.items())
        if key not in wanted
    ]
    return (*sorted(nodes.values()), *sets, *removals)


def _serving(slots: Slots) -> set[str]:
    """Return the nodes that get new connections with these slots."""
    return {slots.nodes[number] for number in nodes_in(array("H", slots.current))}


def precompute_tables(intents: Mapping[ServiceKey, LoadBalancer]) -> None:
    """Compute the Maglev tables of these load balancers, so that `diff` finds them in the cache."""
    maglev.prepare(
        serving.active_weights(listener)
        for intent in intents.values()
        for listener in intent.listeners
    )


def without_nodes(change: SetListener, nodes: Set[str], old_slots: Slots) -> SetListener:
    """Return the change for the case that these nodes cannot be reached: the other nodes get their
    shares, and these nodes keep their connections.

    If no node can be reached, the slots stay as planned: empty slots would help no client, and with
    the planned slots traffic flows again as soon as the network is repaired. In both cases the spec
    lacks the weights of these nodes, so it differs from the desired spec, and `diff` plans the
    listener again."""
    weights = tuple((node, weight) for node, weight in change.listener.weights if node not in nodes)
    listener = msgspec.structs.replace(change.listener, weights=weights)
    slots = _computed_slots(listener, old_slots) if weights else change.slots
    return msgspec.structs.replace(change, listener=listener, slots=slots)


def based_on(change: SetListener, old_slots: Slots) -> SetListener:
    """Return the change for the case that the listener has `old_slots`, and open connections that
    depend on them."""
    return msgspec.structs.replace(
        change,
        slots=_computed_slots(change.listener, old_slots),
        from_scratch=False,
        old_slots=old_slots,
    )


def _with_retention(
    listener: ListenerSpec, found: ActualListener, retain_departed_s: float
) -> ListenerSpec:
    """Return the spec with the departed nodes that keep connections, and without the nodes whose
    time to keep connections is over.

    A departed node keeps its connections even if the policy of the Service has changed since. More
    nodes are added only with `retain_departed`."""
    if not found.idle_s and not found.retained_nodes:
        return listener
    idle_s, active = dict(found.idle_s), {node for node, _ in listener.weights}
    expired = {
        node
        for node in listener.retained_nodes
        if node not in active and serving.is_drained(idle_s.get(node, 0.0), listener.drain_s)
    }
    departed = set(found.retained_nodes).difference(listener.retained_nodes)
    if not listener.retain_departed:
        departed.intersection_update(found.spec.departed if found.spec else ())
    limit_s = min(listener.drain_s or math.inf, retain_departed_s)
    departed = {node for node in departed if idle_s.get(node, 0.0) < limit_s}
    if not expired and not departed:
        return listener
    retained_nodes = tuple(node for node in listener.retained_nodes if node not in expired)
    return msgspec.structs.replace(
        listener,
        retained_nodes=retained_nodes,
        departed=tuple(sorted(departed)),
        expired=tuple(sorted(expired)),
    )


def _computed_slots(listener: ListenerSpec, old_slots: Slots) -> Slots:
    return next_slots(listener, old_slots, maglev.table(listener.weights))


def next_slots(listener: ListenerSpec, old_slots: Slots, table: maglev.Table) -> Slots:
    """Return the slots with which the listener serves new connections by `table`, and leaves open
    connections where `old_slots` have them."""
    return transition(
        old_slots,
        table,
        frozenset((*listener.retained_nodes, *listener.departed)),
        by_source=listener.by_source,
    )


def _serves_any(missing: Iterable[tuple[str, str]], listener: ListenerSpec, slots: Slots) -> bool:
    """Return whether the listener sends new connections to one of these (node, address)."""
    ipv6 = is_ipv6(listener.key.address)
    nodes = {node for node, _ in listener.weights}.intersection(slots.nodes)
    return any(node in nodes and is_ipv6(address) == ipv6 for node, address in missing)


def _includes(spec: DirectSpec | None, key: ListenerKey) -> bool:
    return spec is not None and any(each.key == key for each in spec.listeners)
