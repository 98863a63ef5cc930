"""The one mutable index: objects in, dirty keys out.

Reflectors and probes put in what they see; each loop takes from its own `DirtyKeys` which Services
to look at again. Nobody is told *what* happened, only *where* to look: the present state is what
counts. Invariant: a Service is dirty for every subscriber after any change that its plan can depend
on. `whole` is set only once every source has delivered a complete list, and nothing may be planned
before: half a view would take traffic away. It is the `Cluster` of `plan.cluster`."""

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
from fairlead.plan.gateways import Gateways

KeyT = TypeVar("KeyT")
ContraKeyT = TypeVar("ContraKeyT", contravariant=True)


class DirtyKeys(Generic[KeyT]):
    """The Services, or whatever its keys stand for, that one loop has yet to look at. Marking is cheap and idempotent."""

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

    async def take(self, coalesce_s: float, patience_s: float = 0.0) -> set[KeyT]:
        """Wait for a dirty key; return and forget all that there are. What comes after quiet is
        taken after `patience_s`, what comes sooner than `coalesce_s` after the last time waits
        until that is over, for others that may come with it."""
        await self._some.wait()
        clock = asyncio.get_running_loop().time
        # At the least those get their turn who are about to mark the same keys for another reason.
        await asyncio.sleep(max(patience_s, self._taken_s + coalesce_s - clock()))
        self._taken_s = clock()
        keys, self._keys = self._keys, set()
        self._some.clear()
        return keys


class Markable(Protocol[ContraKeyT]):
    """Who is told which Services to look at again."""

    def mark(self, keys: Iterable[ContraKeyT]) -> None:
        """These."""


class Subscribers(Generic[KeyT]):
    """Those who want to be told which Services to look at again."""

    def __init__(self) -> None:
        self._all: list[Markable[KeyT]] = []

    def add(self, other: Markable[KeyT]) -> None:
        """Tell this one too, from now on and for ever."""
        self._all.append(other)

    @contextmanager
    def subscription(self) -> Iterator[DirtyKeys[KeyT]]:
        """A set of dirty keys of one's own, for the time of the block. It starts empty: begin with
        a look at everything."""
        dirty = DirtyKeys[KeyT]()
        self._all.append(dirty)
        try:
            yield dirty
        finally:
            self._all.remove(dirty)

    @contextmanager
    def telling(self, other: Markable[KeyT]) -> Iterator[None]:
        """Tell this one too, for the time of the block."""
        self._all.append(other)
        try:
            yield
        finally:
            self._all.remove(other)

    def __len__(self) -> int:
        return len(self._all)

    def mark(self, keys: Collection[KeyT]) -> None:
        """Tell them all."""
        for each in self._all:
            each.mark(keys)


_WORSE: Sequence[Verdict] = ("up", "believed", "unasked", "flapping", "unready", "down")
"""Each verdict is worse than the one before."""


class ObjectsOnly(NamedTuple):
    """The source of a loop that does not care what probes show: the one that probes."""

    whole: asyncio.Event
    services: Collection[ServiceKey]
    subscribers: Subscribers[ServiceKey]


class State:
    """What is: the objects of the cluster and what probes have shown."""

    def __init__(self, sources: Collection[str]) -> None:
        self.services: dict[ServiceKey, Service] = {}
        self.nodes: dict[str, Node] = {}
        self.pools: dict[str, AddressPool] = {}
        """Another dictionary whenever what a pool has to give, or to whom, is another."""
        self.pools_changed = asyncio.Event()
        """For those who look at pools though there may be no Service."""
        self.grants: dict[str, AddressGrant] = {}
        self.gateways: Gateways | None = None
        """The gateways that are alive; None: not known."""
        self.absent: set[str] = set()
        """Sources whose kind the API server does not have."""
        self._grants_of: dict[ServiceKey, set[str]] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._showing: dict[str, set[ServiceKey]] = {}
        self._slices: dict[ServiceKey, dict[ObjectKey, EndpointSlice]] = defaultdict(dict)
        self._service_of_slice: dict[ObjectKey, ServiceKey] = {}
        self._verdicts: dict[tuple[str, int, bool], Verdict] = {}
        self.load_balancers: dict[ServiceKey, ExistingLoadBalancer] = {}
        """What the driver of class octavia saw at the cloud."""
        self.tunnels: dict[str, str] = {}
        """The kind of tunnel by the address of each node that this gateway reaches, and probes,
        through a tunnel."""
        self.believing = False
        """Whether the API is believed about health ports of which nothing is known: for a start
        that has too many to ask them all before it serves anybody."""
        self.subscribers = Subscribers[ServiceKey]()
        self._missing = set(sources)
        self.whole = asyncio.Event()
        self.objects_only = ObjectsOnly(self.whole, self.services, Subscribers[ServiceKey]())

    def synced(self, source: str) -> None:
        """`source` has delivered a complete list."""
        if source in self.absent:
            self.absent.discard(source)
            self._mark(self._balanced())
        self._missing.discard(source)
        if not self._missing:
            self.whole.set()

    def lack(self, source: str) -> None:
        """The API server does not have the kind of `source`: nothing is there, until `synced` says
        otherwise."""
        if source not in self.absent:
            self.absent.add(source)
            self._mark(self._balanced())
        self._missing.discard(source)
        if not self._missing:
            self.whole.set()

    @property
    def granted(self) -> Collection[ServiceKey]:
        """All Services that an AddressGrant names."""
        return self._grants_of.keys()

    def grants_of(self, key: ServiceKey) -> Sequence[AddressGrant]:
        """The AddressGrants that name this Service, by their names."""
        return [self.grants[name] for name in sorted(self._grants_of.get(key, ()))]

    def namespace(self, name: str) -> Namespace | None:
        return self._namespaces.get(name)

    def namespace_labels(self, namespace: str) -> Mapping[str, str]:
        found = self._namespaces.get(namespace)
        return found.metadata.labels if found is not None else {}

    def namespace_uid(self, namespace: str) -> str:
        """Empty: there is none of this name."""
        found = self._namespaces.get(namespace)
        return found.metadata.uid if found is not None else ""

    def showing(self, address: str) -> Collection[ServiceKey]:
        """The Services whose status shows this address."""
        return self._showing.get(address, ())

    def slices_of(self, key: ServiceKey) -> Sequence[EndpointSlice]:
        return tuple(self._slices[key].values()) if key in self._slices else ()

    def verdict_of(self, address: str, port: int) -> Verdict | None:
        return self._verdicts.get((address, port, False), "believed" if self.believing else None)

    def routed_verdict_of(self, address: str, port: int) -> Verdict | None:
        """The same for connections that follow the host's routes to the node, whichever path
        forwarded packets take."""
        return self._verdicts.get((address, port, True), "believed" if self.believing else None)

    def probed(self) -> Mapping[str, Mapping[str, Verdict]]:
        """The worst of the last verdicts, by the node's address and then by the path of the
        probes."""
        shown: dict[str, dict[str, Verdict]] = {}
        for (address, _, routed), verdict in sorted(self._verdicts.items()):
            ways = shown.setdefault(address, {})
            way = "route" if routed else self.tunnels.get(address, "route")
            ways[way] = max(verdict, ways.get(way, verdict), key=_WORSE.index)
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
        """Note which addresses a Service shows. Answers who else shows one of them, or of those
        that it showed before."""
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
        """Every Service may want an address of a pool that is another one. What a pool's status
        says is no change."""
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
        """Whoever holds an address, or held it, is concerned. A grant under a name that is not its
        address's counts for nothing."""
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
        """A gateway that comes or goes matters to Services only if it is the first or the last."""
        before, self.gateways = self.gateways, gateways
        if before is None or bool(before.alive) != bool(gateways.alive):
            self._mark(self._balanced())
            return
        old, new = before.refusals, gateways.refusals
        self._mark({key for key in old.keys() | new.keys() if old.get(key) != new.get(key)})

    def update_namespaces(self, changed: Mapping[ObjectKey, Namespace | None]) -> None:
        """Pools may be for namespaces with certain labels. Addresses that are kept for a namespace
        are free when it goes."""
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
        """Any Service with a load balancer may have pods on a node that came, went or changed its
        addresses or labels; any with a NodePort answers at the nodes' addresses."""
        differs = False
        for name, node in changed.items():
            before = self.nodes.get(name.name)
            if node is None:
                self.nodes.pop(name.name, None)
            else:
                self.nodes[name.name] = node
            differs |= before is None or node is None or _matters(before) != _matters(node)
        if differs:
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
        """Probing a node's health port for these Services showed something new, or new to them;
        None: it is not probed any more."""
        before = self.routed_verdict_of(address, port) if routed else self.verdict_of(address, port)
        if verdict is None:
            self._verdicts.pop((address, port, routed), None)
        else:
            self._verdicts[address, port, routed] = verdict
        if (before, verdict) != (
            "believed",
            "up",
        ):  # the same to every plan, and after a start said a hundred thousand times
            self.subscribers.mark(tuple(services))

    def observe_load_balancer(
        self, service: ServiceKey, existing: ExistingLoadBalancer | None
    ) -> None:
        """The driver of class octavia has looked at the load balancer of this Service. None: the
        Service has no load balancer."""
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
    """The part of a node that plans read: heartbeats and versions do not count."""
    meta = node.metadata
    return meta.labels, meta.deletion_timestamp, node.spec.taints, node.status.addresses


def _shown(service: Service | None) -> set[str]:
    return {*held_by(service)} if service is not None else set()


def _offers(pool: AddressPool) -> tuple[object, ...]:
    """The part of a pool that plans read."""
    meta = pool.metadata
    return pool.spec, meta.uid, meta.deletion_timestamp, meta.creation_timestamp
