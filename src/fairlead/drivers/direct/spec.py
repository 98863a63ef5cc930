"""What the direct data plane should do and what it does, as values, and the steps between them. Pure.

In: LoadBalancers of class fairlead.io/direct, and what was read from the maps. Out: specs and changes.
Invariant: a change carries the slots that result from it, so that what `diff` says is what `apply` writes; the slots of a
listener depend on its weights, on who may keep connections, and on the slots before (net/transition.py).
"""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal

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

ServerProtocol = Literal["TCP", "UDP"]


class ServerKey(Value, frozen=True):
    """An address, port and protocol that packets may be sent to."""

    address: str
    port: int
    protocol: ServerProtocol

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}/{self.protocol}"


class VirtualServer(Value, frozen=True):
    """One listener: who gets its new connections in which shares, and who may keep the ones they have."""

    key: ServerKey
    by_source: bool
    weights: tuple[tuple[str, int], ...]
    keepers: tuple[str, ...]


class DirectSpec(Value, frozen=True):
    """What one Service should have. `addresses` are those of its nodes, of every family it uses."""

    uid: str
    servers: tuple[VirtualServer, ...]
    addresses: tuple[tuple[str, str], ...]

    @property
    def keepers(self) -> tuple[str, ...]:
        """The nodes that may keep connections of any of its listeners."""
        return tuple(sorted({node for server in self.servers for node in server.keepers}))


class ActualServer(Value, frozen=True):
    """One listener as the maps hold it."""

    key: ServerKey
    slots: Slots


class DirectActual(Value, frozen=True):
    """What one Service has. `addresses` are the usable ones of the nodes that occur in its slots. `held` are the nodes that
    connection entries may name besides; the maps do not say it, so it is None until a plan has."""

    uid: str
    servers: tuple[ActualServer, ...]
    addresses: tuple[tuple[str, str], ...]
    held: tuple[str, ...] | None = None


class SetNode(Value, frozen=True):
    """Send what the node gets in the address's family to that address."""

    service: ServiceKey
    node: str
    address: str

    def __str__(self) -> str:
        return f"set node {self.node} address {self.address}"


class SetServer(Value, frozen=True):
    """Put these slots in the place of what the listener has; make it first if it is new."""

    service: ServiceKey
    uid: str
    server: VirtualServer
    slots: Slots

    def __str__(self) -> str:
        weights = ",".join(f"{node}={weight}" for node, weight in self.server.weights) or "none"
        active = {node for node, _ in self.server.weights}
        draining = ",".join(node for node in self.server.keepers if node not in active)
        words = [f"set vip {self.server.key} {self.service} weights {weights} slots {len(self.slots.current) // 2}"]
        words += ["affinity ClientIP"] * self.server.by_source
        words += [f"keeping {draining}"] * bool(draining)
        return " ".join(words)


class HoldNodes(Value, frozen=True):
    """Leave these nodes known for as long as the Service says so: its connection entries may name them, even if no slot does.
    Changes nothing in the kernel."""

    service: ServiceKey
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"hold nodes {','.join(self.nodes) or 'none'} {self.service}"


class RemoveServer(Value, frozen=True):
    """Take the listener away; packets for it are no longer ours."""

    service: ServiceKey
    key: ServerKey

    def __str__(self) -> str:
        return f"remove vip {self.key} {self.service}"


DirectChange = SetNode | SetServer | HoldNodes | RemoveServer


def render(intents: Mapping[ServiceKey, LoadBalancer]) -> dict[ServiceKey, DirectSpec]:
    """The specs of the LoadBalancers of our class. SCTP listeners are passed over: the plan refuses them."""
    return {key: _render(intent) for key, intent in intents.items() if intent.class_name == DIRECT}


def _render(intent: LoadBalancer) -> DirectSpec:
    servers = []
    addresses = set()
    for listener in intent.listeners:
        if listener.protocol == "SCTP":
            continue
        for address in intent.listening(listener):
            key = ServerKey(canonical(address), listener.port, listener.protocol)
            servers.append(_server(key, listener, by_source=intent.affinity_timeout_s > 0))
        addresses |= {(member.node, canonical(member.address)) for member in listener.members}
    return DirectSpec(intent.uid, tuple(sorted(servers)), tuple(sorted(addresses)))


@lru_cache(maxsize=65536)
def canonical(address: str) -> str:
    """The one way to write it, as the maps give it back: no difference may come of 2001:DB8::1 and 2001:db8:0::1."""
    parsed = ip_address(address)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _server(key: ServerKey, listener: Listener, *, by_source: bool) -> VirtualServer:
    weights = [(member.node, member.weight) for member in listener.members if member.state == "active" and member.weight > 0]
    keepers = [member.node for member in listener.members if member.state in _KEEPING[key.protocol]]
    return VirtualServer(key, by_source, tuple(sorted(weights)), tuple(sorted(keepers)))


def diff(desired: Mapping[ServiceKey, DirectSpec], actual: Mapping[ServiceKey, DirectActual]) -> tuple[DirectChange, ...]:
    """The steps from `actual` to `desired`: nodes first, then listeners, then who is held, then what is to go.

    A listener that passes from one Service to another keeps its slots, and so its connections.
    """
    present = {server.key: (service, each.uid, server.slots) for service, each in actual.items() for server in each.servers}
    known = {pair for each in actual.values() for pair in each.addresses}
    nodes: set[SetNode] = set()
    sets: list[SetServer] = []
    holds: list[HoldNodes] = []
    wanted = set()
    for service, spec in sorted(desired.items()):
        needed: set[str] = set()
        for server in spec.servers:
            wanted.add(server.key)
            owner, uid, slots = present.get(server.key, (None, "", Slots()))
            after = transition(slots, maglev.table(server.weights), frozenset(server.keepers), by_source=server.by_source)
            needed.update(after.nodes)
            if (owner, uid, slots) != (service, spec.uid, after):
                sets.append(SetServer(service, spec.uid, server, after))
        missing = (pair for pair in spec.addresses if pair[0] in needed and pair not in known)
        nodes.update(SetNode(service, node, address) for node, address in missing)
        known.update(pair for pair in spec.addresses if pair[0] in needed)
        if spec.servers and (service not in actual or actual[service].held != spec.keepers):
            holds.append(HoldNodes(service, spec.keepers))
    removals = [RemoveServer(owner, key) for key, (owner, _, _) in sorted(present.items()) if key not in wanted]
    return (*sorted(nodes), *sets, *holds, *removals)
