"""What the direct data plane should do and what it does, as values, and the steps between them. Pure.

In: LoadBalancers of class fairlead.io/direct, and what was read from the maps. Out: specs and changes.
Invariant: a change carries the slots that result from it, so that what `diff` says is what `apply` writes, unless a node turns
out to be out of reach (`without`); the slots of a listener depend on its weights, on who may keep connections, and on the
slots before (net/transition.py). A listener that was set for the same spec before has the slots that it should have.
"""

from collections.abc import Iterable, Mapping, Set
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal

import msgspec

from fairlead.model import Listener, LoadBalancer, MemberState, ServiceKey, Value
from fairlead.net import maglev
from fairlead.net.transition import Slots, transition
from fairlead.plan.balancer import DIRECT

_KEEPING: Mapping[str, frozenset[MemberState]] = {
    # One that is pending may have connections from before this process began, and none otherwise.
    "TCP": frozenset({"active", "draining", "pending", "down"}),
    # A flow of datagrams loses nothing by moving, and would not come back from a dead node: it has nothing to retry by.
    "UDP": frozenset({"active", "draining", "pending"}),
}

ListenerProtocol = Literal["TCP", "UDP"]


class ListenerKey(Value, frozen=True):
    """An address, port and protocol that packets may be sent to."""

    address: str
    port: int
    protocol: ListenerProtocol

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}/{self.protocol}"


class ListenerSpec(Value, frozen=True):
    """One listener: who gets its new connections in which shares, and who may keep the ones they have.

    `keeps_left`: a node that is no member any more keeps its connections too. So it is with policy Cluster, where they go on
    to pods elsewhere, whether the node has any or not. `left`: these nodes; `diff` names them, for as long as the driver does.
    """

    key: ListenerKey
    by_source: bool
    weights: tuple[tuple[str, int], ...]
    keepers: tuple[str, ...]
    keeps_left: bool = False
    left: tuple[str, ...] = ()
    undecided: bool = False
    """Nobody is to be served by yet, but some are about to be proved: a listener that serves goes on as it does."""


class DirectSpec(Value, frozen=True):
    """What one Service should have. `addresses` are those of its nodes, of every family it uses."""

    uid: str
    listeners: tuple[ListenerSpec, ...]
    addresses: tuple[tuple[str, str], ...]


class ActualListener(Value, frozen=True):
    """One listener as the maps hold it. What they do not say, because only a plan knows it: `spec`, what it was last set for,
    and `keeping`, the nodes that may have connections of it; None and a guess until a plan has said it."""

    key: ListenerKey
    slots: Slots
    spec: ListenerSpec | None = None
    keeping: tuple[str, ...] = ()


class DirectActual(Value, frozen=True):
    """What one Service has. `addresses` are the usable ones of the nodes that occur in its slots."""

    uid: str
    listeners: tuple[ActualListener, ...]
    addresses: tuple[tuple[str, str], ...]


class SetNode(Value, frozen=True):
    """Send what the node gets in the address's family to that address."""

    service: ServiceKey
    node: str
    address: str

    def __str__(self) -> str:
        return f"set node {self.node} address {self.address}"


class SetListener(Value, frozen=True):
    """Put these slots in the place of what the listener has; make it first if it is new. Where it has them already, nothing
    changes in the kernel; it is noted what they are for. `taken_from`: the Service that has it, but wants it no more."""

    service: ServiceKey
    uid: str
    listener: ListenerSpec
    slots: Slots
    taken_from: ServiceKey | None = None

    def __str__(self) -> str:
        listener = self.listener
        weights = ",".join(f"{node}={weight}" for node, weight in listener.weights) or "none"
        active = {node for node, _ in listener.weights}
        keeping = ",".join(sorted({*listener.keepers, *listener.left} - active))
        words = [f"set listener {listener.key} {self.service} weights {weights} slots {len(self.slots.current) // 2}"]
        words += ["affinity ClientIP"] * listener.by_source
        words += [f"keeping {keeping}"] * bool(keeping)
        return " ".join(words)


class RemoveListener(Value, frozen=True):
    """Take the listener away; packets for it are no longer ours."""

    service: ServiceKey
    key: ListenerKey

    def __str__(self) -> str:
        return f"remove listener {self.key} {self.service}"


DirectChange = SetNode | SetListener | RemoveListener


def render(intents: Mapping[ServiceKey, LoadBalancer]) -> dict[ServiceKey, DirectSpec]:
    """The specs of the LoadBalancers of our class. SCTP listeners are passed over: the plan refuses them."""
    return {key: _render(intent) for key, intent in intents.items() if intent.class_name == DIRECT}


def _render(intent: LoadBalancer) -> DirectSpec:
    listeners = []
    addresses = set()
    for listener in intent.listeners:
        if listener.protocol == "SCTP":
            continue
        for address in intent.listening(listener):
            key = ListenerKey(canonical(address), listener.port, listener.protocol)
            listeners.append(_listener(key, listener, by_source=intent.affinity_timeout_s > 0))
        addresses |= {(member.node, canonical(member.address)) for member in listener.members}
    return DirectSpec(intent.uid, tuple(sorted(listeners)), tuple(sorted(addresses)))


@lru_cache(maxsize=65536)
def canonical(address: str) -> str:
    """The one way to write it, as the maps give it back: no difference may come of 2001:DB8::1 and 2001:db8:0::1."""
    parsed = ip_address(address)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _listener(key: ListenerKey, listener: Listener, *, by_source: bool) -> ListenerSpec:
    weights = [(member.node, member.weight) for member in listener.members if member.state == "active" and member.weight > 0]
    keepers = [member.node for member in listener.members if member.state in _KEEPING[key.protocol]]
    keeps_left = listener.policy == "Cluster" and key.protocol == "TCP"
    undecided = not weights and any(member.state == "pending" for member in listener.members)
    return ListenerSpec(key, by_source, tuple(sorted(weights)), tuple(sorted(keepers)), keeps_left, undecided=undecided)


def diff(desired: Mapping[ServiceKey, DirectSpec], actual: Mapping[ServiceKey, DirectActual]) -> tuple[DirectChange, ...]:
    """The steps from `actual` to `desired`: nodes first, then listeners, then what is to go.

    A listener that passes from one Service to another keeps its slots, and so its connections. One that a node without a
    usable next hop is to serve is set in any case: only `apply` finds out whether that node may have a share.
    """
    present = {each.key: (service, one.uid, each) for service, one in actual.items() for each in one.listeners}
    known = {pair for one in actual.values() for pair in one.addresses}
    wanted = {each.key for spec in desired.values() for each in spec.listeners}
    nodes: dict[tuple[str, str], SetNode] = {}
    sets: list[SetListener] = []
    for service, spec in sorted(desired.items()):
        missing = [pair for pair in spec.addresses if pair not in known]
        needed: set[str] = set()
        for each in spec.listeners:
            owner, uid, found = present.get(each.key, (service, "", ActualListener(each.key, Slots())))
            if each.undecided and found.slots.current and owner == service:
                needed.update(found.slots.nodes)
                continue  # nothing is proved yet (another health port is asked since an edit): no reason to take traffic away
            listener = _with_those_who_left(each, found)
            slots = found.slots if listener == found.spec else _slots(listener, found.slots)
            needed.update(slots.nodes)
            if (owner, uid, found.spec) != (service, spec.uid, listener) or _has_any(missing, listener, slots):
                taken_from = owner if owner != service and not _wants(desired.get(owner), each.key) else None
                sets.append(SetListener(service, spec.uid, listener, slots, taken_from))
        for pair in missing:
            if pair[0] in needed:
                nodes.setdefault(pair, SetNode(service, *pair))
    removals = [RemoveListener(owner, key) for key, (owner, _, _) in sorted(present.items()) if key not in wanted]
    return (*sorted(nodes.values()), *sets, *removals)


def without(change: SetListener, nodes: Set[str], before: Slots) -> SetListener:
    """The change as it is when these nodes cannot be reached: the others have their shares, and they keep their connections.
    Where nobody can be reached the slots stay as they were to be: nothing is won by giving up, and all is well again as soon
    as the network is. Either way the spec shows what was left out, so that `diff` asks for it again."""
    weights = tuple((node, weight) for node, weight in change.listener.weights if node not in nodes)
    listener = msgspec.structs.replace(change.listener, weights=weights)
    slots = _slots(listener, before) if weights else change.slots
    return msgspec.structs.replace(change, listener=listener, slots=slots)


def _with_those_who_left(listener: ListenerSpec, found: ActualListener) -> ListenerSpec:
    """Who has left stays as long as the driver names it, even if the policy is another one now; only with policy Cluster
    others join."""
    left = set(found.keeping).difference(listener.keepers)
    if not listener.keeps_left:
        left.intersection_update(found.spec.left if found.spec else ())
    return msgspec.structs.replace(listener, left=tuple(sorted(left))) if left else listener


def _slots(listener: ListenerSpec, before: Slots) -> Slots:
    keepers = frozenset((*listener.keepers, *listener.left))
    return transition(before, maglev.table(listener.weights), keepers, by_source=listener.by_source)


def _has_any(missing: Iterable[tuple[str, str]], listener: ListenerSpec, slots: Slots) -> bool:
    """Whether one of these (node, address) has a share of the listener."""
    ipv6, nodes = ":" in listener.key.address, {node for node, _ in listener.weights}.intersection(slots.nodes)
    return any(node in nodes and (":" in address) == ipv6 for node, address in missing)


def _wants(spec: DirectSpec | None, key: ListenerKey) -> bool:
    return spec is not None and any(each.key == key for each in spec.listeners)
