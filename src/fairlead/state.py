"""The one mutable index of the cluster: objects in, dirty keys out.

Reflectors and probes store what they observe. Each loop has its own `DirtyKeys`, from which it
takes the Services to process again. A key names a Service, but not what happened to it: only the
present state counts. Invariants: after any change that the plan of a Service can depend on, the
Service is dirty for every subscriber. `has_synced` is set only after every source has delivered a
complete list, and nothing may be planned before, because a plan from a part of the cluster would
remove nodes that serve. `State` implements the `Cluster` of `plan.cluster`."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from fairlead.kube.crds import AddressGrant, AddressPool, BGPPeer
from fairlead.kube.objects import EndpointSlice, Namespace, Node, ObjectKey, Service
from fairlead.model import ExistingLoadBalancer, ServiceKey, Verdict
from fairlead.plan.addresses import held_by
from fairlead.plan.announcers import Announcers, changed_addresses
from fairlead.plan.gateways import Gateways

KeyT = TypeVar("KeyT")
ContraKeyT = TypeVar("ContraKeyT", contravariant=True)


class DirtyKeys(Generic[KeyT]):
    """The keys, mostly of Services, that one loop has yet to process. Marking is cheap and
    idempotent."""

    def __init__(self) -> None:
        self._keys: set[KeyT] = set()
        self._some = asyncio.Event()
        self._taken_s = -math.inf

    def __contains__(self, key: KeyT) -> bool:
        return key in self._keys

    def mark(self, keys: Iterable[KeyT]) -> None:
        self._keys.update(keys)
        if self._keys:
            self._some.set()

    async def take(self, coalesce_s: float, idle_delay_s: float = 0.0) -> set[KeyT]:
        """Wait for a dirty key; then return and clear all dirty keys. The first key after an idle
        time is returned after `idle_delay_s`. A key that follows the previous call sooner than
        `coalesce_s` waits until that time is over, so that further keys are returned together with
        it."""
        await self._some.wait()
        clock = asyncio.get_running_loop().time
        # Even a delay of 0 lets the tasks run that are about to mark the same keys for another
        # reason.
        await asyncio.sleep(max(idle_delay_s, self._taken_s + coalesce_s - clock()))
        self._taken_s = clock()
        keys, self._keys = self._keys, set()
        self._some.clear()
        return keys


class Markable(Protocol[ContraKeyT]):
    """A subscriber that is notified of keys to process again."""

    def mark(self, keys: Iterable[ContraKeyT]) -> None:
        """Mark these keys as dirty."""


class Subscribers(Generic[KeyT]):
    """The subscribers that are notified of keys to process again."""

    def __init__(self) -> None:
        self._all: list[Markable[KeyT]] = []

    def add(self, other: Markable[KeyT]) -> None:
        """Add a subscriber permanently."""
        self._all.append(other)

    @contextmanager
    def subscription(self) -> Iterator[DirtyKeys[KeyT]]:
        """Yield a new `DirtyKeys` that is subscribed during the block. It is empty at first, so the
        caller should begin with all keys."""
        dirty = DirtyKeys[KeyT]()
        self._all.append(dirty)
        try:
            yield dirty
        finally:
            self._all.remove(dirty)

    @contextmanager
    def subscribed(self, other: Markable[KeyT]) -> Iterator[None]:
        """Subscribe `other` during the block."""
        self._all.append(other)
        try:
            yield
        finally:
            self._all.remove(other)

    def __len__(self) -> int:
        return len(self._all)

    def mark(self, keys: Collection[KeyT]) -> None:
        """Notify all subscribers."""
        for each in self._all:
            each.mark(keys)


_WORSE: Sequence[Verdict] = ("up", "assumed_up", "probe_failed", "flapping", "unready", "down")
"""Each verdict is worse than the previous one."""


class ObjectsOnly(NamedTuple):
    """The source of a loop that does not depend on the results of probes: the loop that manages the
    probes."""

    has_synced: asyncio.Event
    services: Collection[ServiceKey]
    subscribers: Subscribers[ServiceKey]


class State:
    """The objects of the cluster, and the results of probes."""

    def __init__(self, sources: Collection[str]) -> None:
        self.services: dict[ServiceKey, Service] = {}
        self.nodes: dict[str, Node] = {}
        self.node_changes = 0
        """The number of changes of nodes, of `yields` and of `takers` so far that plans can depend
        on."""
        self.yields = False
        """Whether this host hands all its addresses over although its Node may serve."""
        self.takers: frozenset[str] | None = None
        """If this host hands over the addresses that others can take: the names of the Nodes of the
        other hosts that can. None: it keeps its addresses, or the others are not known."""
        self.bgp_peers: dict[str, BGPPeer] | None = None
        """The BGPPeer objects; None while they are unknown. Replaced by a new mapping whenever the
        spec of a BGPPeer changes."""
        self.pools: dict[str, AddressPool] = {}
        """Replaced by a new dictionary whenever a field of a pool changes that plans read
        (`_offers`)."""
        self.pools_changed = asyncio.Event()
        """Set when `pools` changes, for observers of pools that must act even if there is no
        Service."""
        self.grants: dict[str, AddressGrant] = {}
        self.gateways: Gateways | None = None
        """The gateways that are alive; None: not known yet."""
        self.announcers: Announcers | None = None
        """The announcers that are alive; None: not known, or not used."""
        self.absent: set[str] = set()
        """Sources whose resource type the API server does not serve."""
        self._grants_of: dict[ServiceKey, set[str]] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._showing: dict[str, set[ServiceKey]] = {}
        self._slices: dict[ServiceKey, dict[ObjectKey, EndpointSlice]] = defaultdict(dict)
        self._service_of_slice: dict[ObjectKey, ServiceKey] = {}
        self._verdicts: dict[tuple[str, int, bool], Verdict] = {}
        self.excused: Collection[str] = ()
        """The addresses of nodes whose recent failures were those of this host, which was cut off:
        they are `up` where their verdict would be `flapping`."""
        self.load_balancers: dict[ServiceKey, ExistingLoadBalancer] = {}
        """The load balancers in the cloud, as the driver of class octavia last saw them."""
        self.tunnels: dict[str, str] = {}
        """The type of the tunnel through which this gateway reaches and probes a node, by the
        address of the node. Nodes without a tunnel are absent."""
        self.trust_api = False
        """Whether the API server is trusted about health ports without a probe result. A starting
        gateway does so if it has too many health ports to probe them all before it serves traffic.
        """
        self.subscribers = Subscribers[ServiceKey]()
        self._missing = set(sources)
        self.has_synced = asyncio.Event()
        self.objects_only = ObjectsOnly(self.has_synced, self.services, Subscribers[ServiceKey]())

    def mark_synced(self, source: str) -> None:
        """Record that `source` has delivered a complete list."""
        if source in self.absent:
            self.absent.discard(source)
            self._mark(self._balanced())
        self._missing.discard(source)
        if not self._missing:
            self.has_synced.set()

    def mark_absent(self, source: str) -> None:
        """Record that the API server does not serve the resource type of `source`: it counts as
        empty until `mark_synced` is called."""
        if source not in self.absent:
            self.absent.add(source)
            self._mark(self._balanced())
        self._missing.discard(source)
        if not self._missing:
            self.has_synced.set()

    @property
    def granted(self) -> Collection[ServiceKey]:
        """The Services that hold an AddressGrant."""
        return self._grants_of.keys()

    def grants_of(self, key: ServiceKey) -> Sequence[AddressGrant]:
        """Return the AddressGrants of this Service, sorted by name."""
        return [self.grants[name] for name in sorted(self._grants_of.get(key, ()))]

    def namespace(self, name: str) -> Namespace | None:
        return self._namespaces.get(name)

    def namespace_labels(self, namespace: str) -> Mapping[str, str]:
        found = self._namespaces.get(namespace)
        return found.metadata.labels if found is not None else {}

    def namespace_uid(self, namespace: str) -> str:
        """Return the uid of the namespace; an empty text if it does not exist."""
        found = self._namespaces.get(namespace)
        return found.metadata.uid if found is not None else ""

    def showing(self, address: str) -> Collection[ServiceKey]:
        """Return the Services whose status shows this address."""
        return self._showing.get(address, ())

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]:
        return tuple(self._slices[key].values()) if key in self._slices else ()

    def verdict_of(self, address: str, port: int) -> Verdict | None:
        return self._verdicts.get((address, port, False), "assumed_up" if self.trust_api else None)

    def routed_verdict_of(self, address: str, port: int) -> Verdict | None:
        """Return the verdict for connections that follow the routes of this host to the node, even
        if forwarded packets use a tunnel."""
        return self._verdicts.get((address, port, True), "assumed_up" if self.trust_api else None)

    def probed(self) -> Mapping[str, Mapping[str, Verdict]]:
        """Return the worst of the last verdicts for each probe path, by the node's address and then
        by path."""
        shown: dict[str, dict[str, Verdict]] = {}
        for (address, _, routed), verdict in sorted(self._verdicts.items()):
            paths = shown.setdefault(address, {})
            path = "route" if routed else self.tunnels.get(address, "route")
            paths[path] = max(verdict, paths.get(path, verdict), key=_WORSE.index)
        return shown

    def update_services(self, changed: Mapping[ObjectKey, Service | None]) -> None:
        keys = set()
        for name, service in changed.items():
            key = ServiceKey(*name)
            keys.add(key)
            keys |= self._show(key, service)
            if service is None:
                self.services.pop(key, None)
            else:
                self.services[key] = service
        self._mark(keys)

    def _show(self, key: ServiceKey, service: Service | None) -> set[ServiceKey]:
        """Record the addresses that a Service shows. Return all Services that show one of these
        addresses, or one of its previous addresses."""
        before = self.services.get(key)
        old, new = _shown(before), _shown(service)
        for address in old - new:
            self._showing[address].discard(key)
            if not self._showing[address]:
                del self._showing[address]
        for address in new:
            self._showing.setdefault(address, set()).add(key)
        return {other for address in old | new for other in self._showing.get(address, ())}

    def update_pools(self, changed: Mapping[ObjectKey, AddressPool | None]) -> None:
        """Store changed pools. Every Service may request an address of a changed pool, so all
        Services are marked, unless only the status of pools has changed."""
        pools = {
            **self.pools,
            **{name.name: pool for name, pool in changed.items() if pool is not None},
        }
        for name, pool in changed.items():
            if pool is None:
                pools.pop(name.name, None)
        differ = {name: _offers(pool) for name, pool in pools.items()} != {
            n: _offers(p) for n, p in self.pools.items()
        }
        if differ:
            self.pools = pools
            self.pools_changed.set()
            self._mark(self._balanced())
        else:
            self.pools.update(pools)

    def update_bgp_peers(self, changed: Mapping[ObjectKey, BGPPeer | None]) -> None:
        """Store changed BGPPeers. Every Service may be announced to a changed peer, so all Services
        are marked, unless only metadata has changed."""
        before = self.bgp_peers or {}
        peers = {
            **before,
            **{name.name: peer for name, peer in changed.items() if peer is not None},
        }
        for name, peer in changed.items():
            if peer is None:
                peers.pop(name.name, None)
        differ = {name: each.spec for name, each in peers.items()} != {
            name: each.spec for name, each in before.items()
        }
        if differ or self.bgp_peers is None:
            self.bgp_peers = peers
            self._mark(self._balanced())
        else:
            self.bgp_peers.update(peers)

    def update_grants(self, changed: Mapping[ObjectKey, AddressGrant | None]) -> None:
        """Store changed AddressGrants, and mark their present and previous holders. A grant whose
        name does not match its address is ignored."""
        keys = set()
        for name, grant in changed.items():
            before = self.grants.pop(name.name, None)
            for holder in before.spec.holders if before is not None else ():
                keys.add(holder.key)
                self._grants_of.get(holder.key, set()).discard(name.name)
                if not self._grants_of.get(holder.key):
                    self._grants_of.pop(holder.key, None)
            if grant is not None and grant.is_lock:
                self.grants[name.name] = grant
                for holder in grant.spec.holders:
                    keys.add(holder.key)
                    self._grants_of.setdefault(holder.key, set()).add(name.name)
        self._mark(keys)

    def update_gateways(self, gateways: Gateways) -> None:
        """Store the gateways that are alive. All Services of type LoadBalancer are marked if the
        first gateway has appeared or the last one is gone; otherwise the Services for which
        refusals of gateways have changed."""
        before, self.gateways = self.gateways, gateways
        if before is None or bool(before.alive) != bool(gateways.alive):
            self._mark(self._balanced())
            return
        old, new = before.refusals, gateways.refusals
        self._mark({key for key in old.keys() | new.keys() if old.get(key) != new.get(key)})

    def update_announcers(self, announcers: Announcers | None) -> None:
        """Store what the announcers that are alive announce. The Services at addresses whose
        announcement has changed are marked; all Services of type LoadBalancer if it has become
        known or unknown who announces at all."""
        before, self.announcers = self.announcers, announcers
        if before is None or announcers is None:
            if before is not announcers:
                self._mark(self._balanced())
        elif before.hidden != announcers.hidden:
            self._mark(self._balanced())
        else:
            changed = changed_addresses(before, announcers)
            self._mark({key for address in changed for key in self._showing.get(address, ())})

    def update_namespaces(self, changed: Mapping[ObjectKey, Namespace | None]) -> None:
        """Store changed namespaces. Mark the Services of a namespace whose labels have changed,
        because pools can select namespaces by label. Mark the Services whose addresses are kept for
        a namespace that is deleted, because these addresses become free."""
        differ, going = set(), set()
        for name, namespace in changed.items():
            before = self.namespace_labels(name.name)
            if namespace is None:
                self._namespaces.pop(name.name, None)
            else:
                self._namespaces[name.name] = namespace
            if before != self.namespace_labels(name.name):
                differ.add(name.name)
            if namespace is None or namespace.metadata.deletion_timestamp is not None:
                going.add(name.name)
        if differ:
            self._mark({key for key in self._balanced() if key.namespace in differ})
        if going:
            self._mark({key for key in self.granted if key.namespace in going})

    def update_slices(self, changed: Mapping[ObjectKey, EndpointSlice | None]) -> None:
        keys = set()
        for name, slice_ in changed.items():
            before = self._service_of_slice.pop(name, None)
            if before is not None:
                keys.add(before)
                self._slices[before].pop(name, None)
                if not self._slices[before]:
                    del self._slices[before]
            after = slice_.service if slice_ is not None else None
            if slice_ is not None and after is not None:
                keys.add(after)
                self._slices[after][name] = slice_
                self._service_of_slice[name] = after
        self._mark(keys)

    def update_nodes(self, changed: Mapping[ObjectKey, Node | None]) -> None:
        """Store changed nodes. A Service of type LoadBalancer may have pods on a node that is new,
        deleted or has other addresses or labels; a Service of type NodePort answers at the
        addresses of nodes. So all Services of these types are marked if a field of a node changed
        that plans read."""
        differs = False
        for name, node in changed.items():
            before = self.nodes.get(name.name)
            if node is None:
                self.nodes.pop(name.name, None)
            else:
                self.nodes[name.name] = node
            differs |= before is None or node is None or _matters(before) != _matters(node)
        if differs:
            self._mark_for_nodes()

    def update_yields(self, yields: bool, takers: frozenset[str] | None = None) -> None:
        """Set `yields` and `takers`, and mark the Services if they have changed."""
        if (yields, takers) != (self.yields, self.takers):
            self.yields, self.takers = yields, takers
            self._mark_for_nodes()

    def _mark_for_nodes(self) -> None:
        self.node_changes += 1
        self._mark(
            {
                key
                for key, service in self.services.items()
                if service.spec.type in ("LoadBalancer", "NodePort")
            }
        )

    def observe(
        self,
        address: str,
        port: int,
        verdict: Verdict | None,
        services: Iterable[ServiceKey],
        routed: bool = False,
    ) -> None:
        """Store the verdict about a node's health port and mark these Services. None: the port is
        not probed any more."""
        before = self.routed_verdict_of(address, port) if routed else self.verdict_of(address, port)
        if verdict == "flapping" and address in self.excused:
            verdict = "up"
        if verdict is None:
            self._verdicts.pop((address, port, routed), None)
        else:
            self._verdicts[address, port, routed] = verdict
        # Plans treat both verdicts alike, so this change marks no Service. After a start there may
        # be a hundred thousand such changes.
        if (before, verdict) != ("assumed_up", "up"):
            self.subscribers.mark(tuple(services))

    def probed_addresses(self) -> Iterator[tuple[str, Verdict]]:
        """Yield the address and the verdict of each health port that has a verdict."""
        return ((address, verdict) for (address, _, _), verdict in self._verdicts.items())

    def observe_load_balancer(
        self, service: ServiceKey, existing: ExistingLoadBalancer | None
    ) -> None:
        """Store the load balancer that the driver of class octavia found for this Service. None:
        the Service has no load balancer."""
        if self.load_balancers.get(service) == existing:
            return
        if existing is None:
            del self.load_balancers[service]
        else:
            self.load_balancers[service] = existing
        self.subscribers.mark((service,))

    def _balanced(self) -> set[ServiceKey]:
        return {
            key for key, service in self.services.items() if service.spec.type == "LoadBalancer"
        }

    def _mark(self, keys: Iterable[ServiceKey]) -> None:
        marked = tuple(keys)
        self.subscribers.mark(marked)
        self.objects_only.subscribers.mark(marked)


def _matters(node: Node) -> tuple[object, ...]:
    """Return the fields of a node that plans read. Heartbeats and versions are not among them."""
    meta = node.metadata
    spec = node.spec
    return meta.labels, meta.deletion_timestamp, spec.taints, spec.unschedulable, node.status


def _shown(service: Service | None) -> set[str]:
    return {*held_by(service)} if service is not None else set()


def _offers(pool: AddressPool) -> tuple[object, ...]:
    """Return the fields of a pool that plans read."""
    meta = pool.metadata
    return pool.spec, meta.uid, meta.deletion_timestamp, meta.creation_timestamp
