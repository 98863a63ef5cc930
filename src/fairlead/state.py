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

from fairlead.kube.crds import AddressGrant, AddressPool
from fairlead.kube.objects import EndpointSlice, Namespace, Node, ObjectKey, Service
from fairlead.model import ExistingLoadBalancer, ServiceKey, Verdict
from fairlead.plan.addresses import held_by
from fairlead.plan.announce import SilentLinks, announcers_of, moved
from fairlead.plan.exclusions import (
    AFTER_ALL,
    API_SERVICE,
    Exclusions,
    Use,
    of_api_servers,
    of_hosts,
    of_node,
    of_service,
)
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

    def __init__(self, sources: Collection[str], *, cluster_ips: bool = True) -> None:
        """`cluster_ips`: whether ClusterIPs are excluded addresses; false saves memory in a role
        that does not need this."""
        self._cluster_ips = cluster_ips
        self.exclusions = Exclusions()
        """The addresses that the cluster itself uses."""
        self._gateways: frozenset[str] = frozenset()
        """The gateways whose addresses are excluded."""
        self.services: dict[ServiceKey, Service] = {}
        self.nodes: dict[str, Node] = {}
        self.pools: dict[str, AddressPool] = {}
        """Replaced by a new dictionary whenever a field of a pool changes that plans read
        (`_offers`)."""
        self.pools_changed = asyncio.Event()
        """Set when `pools` changes or a Node has other addresses, for observers of pools that must
        act even if there is no Service."""
        self.grants: dict[str, AddressGrant] = {}
        self.gateways: Gateways | None = None
        """The gateways that are alive; None: not known yet."""
        self.silent: SilentLinks = frozenset()
        """The interfaces of other gateways that do not answer this gateway: it takes over what they
        announce."""
        self.gateways_forbidden = False
        """Whether the gateways cannot become known, because the API server does not permit it."""
        self.absent: set[str] = set()
        """Sources whose resource type the API server does not serve."""
        self._grants_of: dict[ServiceKey, set[str]] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._showing: dict[str, set[ServiceKey]] = {}
        self._slices: dict[ServiceKey, dict[ObjectKey, EndpointSlice]] = defaultdict(dict)
        self._service_of_slice: dict[ObjectKey, ServiceKey] = {}
        self._verdicts: dict[tuple[str, int, bool], Verdict] = {}
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

    def belongs_to_host(self, address: str) -> bool:
        """Return whether a host of the cluster has the address, and takes precedence over every
        Service that shows it."""
        created = [
            self.services[key].metadata.creation_timestamp or "" for key in self.showing(address)
        ]
        return self.exclusions.host_at(address, min(created, default=AFTER_ALL)) is not None

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
            if self._cluster_ips:
                uses = of_service(service) if service is not None else {}
                keys |= self._exclude(f"Service {key}", uses)
            if service is None:
                self.services.pop(key, None)
            else:
                self.services[key] = service
        self._mark(keys)

    def exclude(self, owner: str, uses: Mapping[str, Use]) -> None:
        """Replace the addresses and networks that an owner outside the objects of the cluster uses
        (`Exclusions.update`)."""
        version = self.exclusions.version
        self._exclude(owner, uses)
        if version != self.exclusions.version:
            self.pools_changed.set()
            self._mark(self._at_hosts())

    def exclude_gateways(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Replace the addresses that each gateway needs itself, by the name of the gateway."""
        for name in self._gateways.union(addresses):
            words = f"an address or next hop of gateway {name}"
            self.exclude(f"gateway {name}", of_hosts(addresses.get(name, ()), words))
        self._gateways = frozenset(addresses)

    def _exclude(self, owner: str, uses: Mapping[str, Use]) -> set[ServiceKey]:
        """Update the exclusions. Return the Services that show an address whose use has changed."""
        changed = self.exclusions.update(owner, uses)
        return {key for span in changed for key in self.showing(str(span))}

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
        first gateway that forwards has appeared, or the last one has ended, or if gateways are
        gone or have returned, or other problems of their hosts count; otherwise the Services for
        which refusals of gateways have changed, those that a gateway refuses if other gateways are
        alive now, and those whose addresses have another owner or are used by another station."""
        before = self.gateways
        self.update_announcers(gateways)
        if (
            before is None
            or bool(before.forwarding) != bool(gateways.forwarding)
            or before.gone != gateways.gone
            or before.problems != gateways.problems
            or before.problem_classes != gateways.problem_classes
        ):
            self._mark(self._balanced())
            return
        old, new = before.refusals, gateways.refusals
        claims_before, claims = before.claimed, gateways.claimed
        differing = {
            address
            for address in claims_before.keys() | claims.keys()
            if claims_before.get(address) != claims.get(address)
        }
        self._mark({key for each in differing for key in self._showing.get(each, ())})
        self._mark(
            {
                key
                for key in old.keys() | new.keys()
                if old.get(key) != new.get(key) or before.alive != gateways.alive
            }
        )

    def update_announcers(self, gateways: Gateways) -> None:
        """Store the gateways that are alive, for a role whose plans depend only on the owners of
        addresses. The Services whose addresses may have another owner now are marked; if the
        gateways were not known before, all that show an address."""
        before, self.gateways = self.gateways, gateways
        changed = self._moved(before, gateways, self.silent)
        old, new = before.refusals if before is not None else {}, gateways.refusals
        for key in old.keys() | new.keys():
            if old.get(key, {}).keys() != new.get(key, {}).keys():
                changed |= _shown(self.services.get(key))
        self._mark_announced(changed)

    def observe_silent(self, links: SilentLinks) -> None:
        """Store the interfaces of other gateways that do not answer, and mark the Services whose
        addresses have another owner now."""
        before, self.silent = self.silent, links
        if self.gateways is not None and before != links:
            self._mark_announced(self._moved(self.gateways, self.gateways, before))

    def _moved(self, before: Gateways | None, after: Gateways, silent: SilentLinks) -> set[str]:
        """Return the addresses whose owner has changed. `silent`: the interfaces that did not
        answer before."""
        return set(
            moved(
                self._showing,
                announcers_of(before, self.nodes, silent) if before is not None else None,
                announcers_of(after, self.nodes, self.silent),
            )
        )

    def _mark_announced(self, addresses: Collection[str]) -> None:
        """Mark the Services that show these addresses. What is probed does not depend on the
        owners."""
        self.subscribers.mark({key for each in addresses for key in self._showing.get(each, ())})

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
        if API_SERVICE in keys:
            self.exclude("API servers", of_api_servers(self.slices_of(API_SERVICE)))

    def update_nodes(self, changed: Mapping[ObjectKey, Node | None]) -> None:
        """Store changed nodes. A Service of type LoadBalancer may have pods on a node that is new,
        deleted or has other addresses or labels; a Service of type NodePort answers at the
        addresses of nodes; a Service with external IPs does not. So all these Services are marked
        if a field of a node changed that plans read."""
        differs, version = False, self.exclusions.version
        for name, node in changed.items():
            before = self.nodes.get(name.name)
            if node is None:
                self.nodes.pop(name.name, None)
            else:
                self.nodes[name.name] = node
            differs |= before is None or node is None or _matters(before) != _matters(node)
            self._exclude(f"Node {name.name}", of_node(node) if node is not None else {})
        if version != self.exclusions.version:
            self.pools_changed.set()
        if differs:
            self._mark(self._at_hosts())

    def _at_hosts(self) -> set[ServiceKey]:
        """Return the Services that depend on the addresses of hosts."""
        return {
            key
            for key, service in self.services.items()
            if service.spec.type in ("LoadBalancer", "NodePort") or service.spec.external_ips
        }

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
        if verdict is None:
            self._verdicts.pop((address, port, routed), None)
        else:
            self._verdicts[address, port, routed] = verdict
        # Plans treat both verdicts alike, so this change marks no Service. After a start there may
        # be a hundred thousand such changes.
        if (before, verdict) != ("assumed_up", "up"):
            self.subscribers.mark(tuple(services))

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
    return meta.labels, meta.deletion_timestamp, spec.taints, spec.pod_cidrs, node.status.addresses


def _shown(service: Service | None) -> set[str]:
    return {*held_by(service)} if service is not None else set()


def _offers(pool: AddressPool) -> tuple[object, ...]:
    """Return the fields of a pool that plans read."""
    meta = pool.metadata
    return pool.spec, meta.uid, meta.deletion_timestamp, meta.creation_timestamp
