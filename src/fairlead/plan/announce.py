"""How hosts announce the addresses of Services: pools, annotations and labels in, `Announcement`s
out.

In: the section `announce`, the pools (of the configuration and AddressPools), a Service with its
addresses, the Nodes. Out: for each group of addresses that are announced in the same way, one
Announcement. The method is that of the annotation `fairlead.io/announce`, else that of the pool
that contains the address, else that of the section. An address that is in no pool, such as an
address that its pool no longer contains, is announced as the section says. Invariants: pure; equal
clusters give equal announcements; without the section there are none. A Service gets no wider
announcement than its pool permits (`plan.pool_terms`)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from fairlead.announce_sections import PoolAnnounce
from fairlead.config import Config
from fairlead.kube.crds import AddressPool, BGPPeer
from fairlead.kube.objects import Node, Service
from fairlead.model import Announcement, LoadBalancer, ServiceKey
from fairlead.net.address import family_of
from fairlead.plan.annotations import announce_method, bgp_peers
from fairlead.plan.members import excluded
from fairlead.plan.network_plugin import is_ovn_kubernetes
from fairlead.plan.peers import host_peers
from fairlead.plan.pool_terms import WITHOUT_POOL, PoolIndex, PoolTerms
from fairlead.plan.pools import matches


class Announced(Protocol):
    """The part of the cluster's state on which announcements depend. `pools` is a new object after
    each change of a pool, and `bgp_peers` after each change of a BGPPeer. `node_changes` grows with
    each change of a node, of `yields` and of `takers`. `yields`: this host hands all its addresses
    over although its Node may serve. `takers`: the names of the Nodes whose hosts can take over
    addresses of this one; None: they are not known (plan/yielding.py)."""

    @property
    def services(self) -> Mapping[ServiceKey, Service]: ...

    @property
    def pools(self) -> Mapping[str, AddressPool]: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def node_changes(self) -> int: ...

    @property
    def yields(self) -> bool: ...

    @property
    def takers(self) -> frozenset[str] | None: ...

    @property
    def bgp_peers(self) -> Mapping[str, BGPPeer] | None: ...


class AnnouncePlan:
    """The plan of the announcements of one host, or of all hosts together.

    It remembers what depends only on pools and nodes, until these change. `host`: the name of the
    host, which is also the name of its Node if it has one; empty: the announcements of all hosts,
    as far as they are equal."""

    def __init__(self, config: Config, host: str = "") -> None:
        self._config = config
        self._host = host
        self._pools: PoolIndex | None = None
        self._source: tuple[object, object] = (None, None)
        self._nodes: tuple[object, int] = (None, 0)
        self._candidates: dict[str, tuple[str, ...] | None] = {}
        self._ovn_kubernetes: frozenset[str] = frozenset()
        self._leaving: dict[tuple[str, str, tuple[str, ...] | None], bool] = {}
        """Whether the host stops announcing, by pool, method and peers."""

    def announcements_of(
        self,
        cluster: Announced,
        service: Service,
        addresses: Sequence[str],
        *,
        weight: int = 0,
        aggregates: bool = True,
    ) -> tuple[Announcement, ...]:
        """Return how the host announces these addresses of the Service. `weight`: see
        `Announcement`. `aggregates`: whether a route may cover other addresses; False: the host
        serves only the addresses of its own announcements."""
        section = self._config.announce
        if section is None:
            return ()
        self._follow(cluster)
        annotations = service.metadata.annotations
        requested, peers = announce_method(annotations), bgp_peers(annotations)
        groups: dict[Announcement, list[str]] = {}
        for address in addresses:
            terms = self._terms_of(address)
            method = requested or terms.section.method or section.method
            if method == "none" or not terms.announces(address):
                continue
            common = Announcement(
                (),
                method,
                leaving=self._leaves(cluster, terms, method, terms.peers(peers)),
                candidates=self._candidates_of(cluster, terms),
            )
            if method == "l2":
                common = msgspec.structs.replace(common, interfaces=terms.section.interfaces)
            elif self._is_candidate(common):
                common = _with_routes(common, terms.section, terms.peers(peers), weight)
                common = self._within_pool(common, address) if aggregates else _host_routes(common)
            else:
                continue
            groups.setdefault(common, []).append(address)
        return tuple(
            sorted(
                msgspec.structs.replace(common, addresses=tuple(own))
                for common, own in groups.items()
            )
        )

    def terms_of(self, cluster: Announced, address: str) -> PoolTerms:
        """Return the terms of the pool that contains this address, or those of an address that is
        in no pool."""
        self._follow(cluster)
        return self._terms_of(address)

    def _within_pool(self, announcement: Announcement, address: str) -> Announcement:
        """Return the announcement of this address with a route that covers only its pool."""
        assert self._pools is not None, "_follow comes first"
        if family_of(address) == "IPv4":
            if (requested := announcement.aggregation_length) == 32:
                return announcement
            length = self._pools.route_length(address, requested)
            return msgspec.structs.replace(announcement, aggregation_length=length)
        if (requested := announcement.aggregation_length_v6) == 128:
            return announcement
        length = self._pools.route_length(address, requested)
        return msgspec.structs.replace(announcement, aggregation_length_v6=length)

    def on_ovn_kubernetes(self, cluster: Announced) -> frozenset[str]:
        """Return the names of the Nodes on which OVN-Kubernetes serves Services."""
        self._follow(cluster)
        return self._ovn_kubernetes

    def _terms_of(self, address: str) -> PoolTerms:
        assert self._pools is not None, "_follow comes first"
        return self._pools.find(address) or WITHOUT_POOL

    def _follow(self, cluster: Announced) -> None:
        """Compute again what depends on pools or nodes that have changed."""
        pools, peers = self._source
        if self._pools is None or pools is not cluster.pools or peers is not cluster.bgp_peers:
            before = self._pools.objects if self._pools is not None else {}
            self._pools = PoolIndex(self._config, cluster.pools, before, cluster.services)
            self._source = cluster.pools, cluster.bgp_peers
            self._candidates.clear()
            self._leaving.clear()
        if self._nodes != (nodes := (id(cluster.nodes), cluster.node_changes)):
            self._nodes = nodes
            self._candidates.clear()
            self._leaving.clear()
            self._ovn_kubernetes = frozenset(
                name for name, node in cluster.nodes.items() if is_ovn_kubernetes(node)
            )

    def _leaves(
        self, cluster: Announced, terms: PoolTerms, method: str, peers: tuple[str, ...] | None
    ) -> bool:
        """Return whether the host stops announcing the addresses of a pool by this method, to these
        peers. A cordon, or a network that is not ready, is a reason only if another host may take
        over these addresses."""
        key = (terms.name, method, peers)
        if key not in self._leaving:
            own = cluster.nodes.get(self._host)
            self._leaving[key] = own is not None and (
                cluster.yields or _ends(own) or self._yields(cluster, own, terms, method, peers)
            )
        return self._leaving[key]

    def _yields(
        self,
        cluster: Announced,
        own: Node,
        terms: PoolTerms,
        method: str,
        peers: tuple[str, ...] | None,
    ) -> bool:
        """Return whether the host leaves the addresses to others, although it could announce
        them."""
        candidates = self._candidates_of(cluster, terms)
        if cluster.takers is None:
            without = own.status.without_network
            return without and self._host not in admitted(cluster.nodes, candidates)
        if not own.spec.unschedulable and not own.status.without_network:
            return False
        takers = [each for each in cluster.takers if candidates is None or each in candidates]
        return any(method != "bgp" or self._reaches(cluster, each, peers) for each in takers)

    def _reaches(self, cluster: Announced, name: str, wanted: tuple[str, ...] | None) -> bool:
        """Return whether the host with this Node has one of the wanted peers; None: any peer."""
        node, section = cluster.nodes.get(name), self._config.announce
        if node is None or section is None:
            return False
        peers = host_peers(section.bgp, cluster.bgp_peers or {}, node.metadata.labels)
        return any(
            each.problem is None and (wanted is None or each.name in wanted) for each in peers
        )

    def _candidates_of(self, cluster: Announced, terms: PoolTerms) -> tuple[str, ...] | None:
        """Return the names of the Nodes that the selectors of a pool match, sorted. None: there is
        no selector, so every host may announce, whether it has a Node or not."""
        if not (selectors := terms.section.node_selectors):
            return None
        if terms.name not in self._candidates:
            self._candidates[terms.name] = tuple(
                sorted(
                    name
                    for name, node in cluster.nodes.items()
                    if any(matches(each, node.metadata.labels) for each in selectors)
                )
            )
        return self._candidates[terms.name]

    def _is_candidate(self, announcement: Announcement) -> bool:
        """Return whether the host may announce. In layer 2 the other hosts need the announcement
        too: they have to know that another host announces the address."""
        candidates = announcement.candidates
        return not self._host or candidates is None or self._host in candidates


def served_addresses(balancer: LoadBalancer) -> tuple[str, ...]:
    """Return the addresses on which the load balancer takes traffic on any port."""
    families = {each.family for each in balancer.listeners}
    return tuple(each for each in balancer.addresses if family_of(each) in families)


def must_not_announce(node: Node) -> bool:
    """Return whether a host with this Node must not get traffic from outside of the cluster: it is
    leaving or shutting down, a label excludes it, or its network is not ready."""
    return _ends(node) or node.status.without_network


def _ends(node: Node) -> bool:
    """Return whether the host must stop announcing even if no other host can take over."""
    return excluded(node) or node.status.shutting_down


def admitted(
    nodes: Mapping[str, Node], candidates: Collection[str] | None = None
) -> Mapping[str, Node]:
    """Return the nodes that may get traffic from outside of the cluster. `candidates`: the nodes
    that the pool of the address selects; None: all. If the network of all these nodes is not ready,
    they are admitted nevertheless: the addresses stay reachable as far as possible."""
    found = {
        name: node
        for name, node in nodes.items()
        if not _ends(node) and (candidates is None or name in candidates)
    }
    return {name: node for name, node in found.items() if not must_not_announce(node)} or found


def _with_routes(
    common: Announcement, section: PoolAnnounce, peers: tuple[str, ...] | None, weight: int
) -> Announcement:
    """Return the announcement of routes by BGP to these peers; None: to every peer."""
    return msgspec.structs.replace(
        common,
        peers=peers,
        communities=tuple(sorted(set(section.communities))),
        local_preference=section.local_preference,
        aggregation_length=section.aggregation_length,
        aggregation_length_v6=section.aggregation_length_v6,
        weight=weight,
    )


def _host_routes(announcement: Announcement) -> Announcement:
    """Return the announcement without aggregates."""
    return msgspec.structs.replace(announcement, aggregation_length=32, aggregation_length_v6=128)
