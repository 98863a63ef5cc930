"""What one node announces for Services of class `fairlead.io/announce`.

In: the cluster, a Service, the time, and whether the service proxy of this node serves it. Out: the
Announcements of this node, and the time of the next decision. The nodes of an address come from
`plan.announcing_nodes`, the time at which they join from `plan.settling`, and everything else from
`plan.announce`. In layer 2 one node owns an address at a time, so joins break nothing and are not
collected; every node gets the Announcement, because a node that may not own the address must not
answer for it either. Pure, except for the memory of what was settled."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from fairlead.config import Config
from fairlead.kube.objects import Service
from fairlead.model import Announcement, ServiceKey
from fairlead.plan.addresses import held_by
from fairlead.plan.announce import AnnouncePlan, admitted
from fairlead.plan.announced_notes import served_by_gateways_at, served_by_nodes, services_at
from fairlead.plan.announcing_nodes import AnnouncingNodes, announcing_nodes
from fairlead.plan.settling import Settled, settle
from fairlead.plan.view import Cluster

Serves = Callable[[Service], bool]
"""Whether the service proxy of this node has confirmed that it serves the Service."""


class Decision(NamedTuple):
    """What the node announces for one Service. `due_s`: when to decide again, although nothing has
    changed; infinity: never. `others`: the Services at the same addresses whose decision may have
    changed with this one. `announces`: whether the node announces an address of the Service; in
    layer 2 it then may own the address."""

    announcements: tuple[Announcement, ...] = ()
    due_s: float = math.inf
    others: Collection[ServiceKey] = ()
    announces: bool = False


class NodeAnnouncing:
    """The decisions of one node."""

    def __init__(self, config: Config, node_name: str) -> None:
        self._config = config
        self._node_name = node_name
        self._plan = AnnouncePlan(config, node_name)
        self._settled: dict[str, Settled] = {}
        self._announced: set[str] = set()
        """The addresses that this node announces."""

    def decide(self, cluster: Cluster, service: Service, now_s: float, serves: Serves) -> Decision:
        """Return what the node announces for the Service now."""
        if self._config.announce is None or not served_by_nodes(service, self._config):
            return Decision()
        groups: dict[Announcement, list[str]] = {}
        due_s, others = math.inf, set[ServiceKey]()
        for address in held_by(service):
            if served_by_gateways_at(cluster, self._config, address):
                continue
            for common in self._announcements_of(cluster, service, address):
                at_address = services_at(cluster, self._config, address)
                found = self._nodes_of(cluster, common, at_address)
                settled, changed = self._settle(address, common, found, now_s)
                due_s = min(due_s, settled.due_s)
                # No node can serve a Service without ready pods, and its health port confirms
                # nothing, so it must not withdraw the address of the others.
                busy = [each for each in at_address if each.key not in found.idle]
                ready = self._node_name in settled.weights and all(map(serves, busy or at_address))
                mine = self._mine(cluster, common, settled, at_address, ready)
                announces = mine is not None and self._is_candidate(mine)
                if changed or announces != (address in self._announced):
                    others |= {each.key for each in at_address} - {service.key}
                if announces:
                    self._announced.add(address)
                else:
                    self._announced.discard(address)
                if mine is not None:
                    groups.setdefault(msgspec.structs.replace(mine, addresses=()), []).append(
                        address
                    )
        made = (
            msgspec.structs.replace(common, addresses=tuple(own)) for common, own in groups.items()
        )
        announces = not self._announced.isdisjoint(held_by(service))
        return Decision(tuple(sorted(made)), due_s, others, announces)

    def may_serve(self, cluster: Cluster, service: Service) -> bool:
        """Return whether the node is to announce an address of the Service as soon as its service
        proxy confirms that it serves."""
        if self._config.announce is None or not served_by_nodes(service, self._config):
            return False
        return any(
            self._node_name in self._nodes_of(cluster, common, [service]).weights
            for address in held_by(service)
            for common in self._announcements_of(cluster, service, address)
        )

    def forget(self, cluster: Cluster) -> None:
        """Forget addresses that no Service shows any more."""
        gone = [address for address in self._settled if not cluster.showing(address)]
        for address in gone:
            del self._settled[address]
            self._announced.discard(address)

    def _announcements_of(
        self, cluster: Cluster, service: Service, address: str
    ) -> Sequence[Announcement]:
        return self._plan.announcements_of(cluster, service, [address], aggregates=False)

    def _nodes_of(
        self, cluster: Cluster, common: Announcement, at_address: Sequence[Service]
    ) -> AnnouncingNodes:
        nodes = admitted(cluster.nodes, common.candidates)
        return announcing_nodes(cluster, common.addresses[0], at_address, nodes)

    def _settle(
        self, address: str, common: Announcement, found: AnnouncingNodes, now_s: float
    ) -> tuple[Settled, bool]:
        """Return what is settled for the address now, and whether it has changed."""
        section = self._config.announce
        assert section is not None
        # With policy Cluster nothing confirms that the service proxy of a node without pods serves
        # the address already, so such nodes always join after some time.
        at_once = common.method == "l2" or (section.resilient and found.local)
        before = self._settled.get(address)
        settled = settle(before, found.weights, now_s, at_once=at_once, retiring=found.retiring)
        self._settled[address] = settled
        return settled, before is None or before.weights != settled.weights

    def _mine(
        self,
        cluster: Cluster,
        common: Announcement,
        settled: Settled,
        at_address: Sequence[Service],
        ready: bool,
    ) -> Announcement | None:
        """Return what this node announces; None: nothing. In layer 2, the candidates tell whether
        it may own the address. `ready`: it serves everything at the address."""
        name = self._node_name
        if common.method == "l2":
            candidates = settled.weights.keys() - (set() if ready else {name})
            return msgspec.structs.replace(common, candidates=tuple(sorted(candidates)))
        if ready:
            most = max(settled.weights.values())
            return msgspec.structs.replace(common, weight=settled.weights[name], most=most)
        if not common.leaving or not settled.weights or common.addresses[0] not in self._announced:
            return None
        # The node hands over to the others, as long as it can serve.
        own = announcing_nodes(
            cluster, common.addresses[0], at_address, {name: cluster.nodes[name]}
        )
        if name not in own.weights:
            return None
        weight = own.weights[name]
        most = max(weight, *settled.weights.values())
        return msgspec.structs.replace(common, weight=weight, most=most)

    def _is_candidate(self, announcement: Announcement) -> bool:
        return announcement.method != "l2" or self._node_name in (announcement.candidates or ())
