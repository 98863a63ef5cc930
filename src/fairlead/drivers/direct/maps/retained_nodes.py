"""Which nodes keep the flows that they have, for each listener: the map `retained_nodes`.

In: the place that a listener counts at, numbers of nodes. Out: the same in the kernel, as far as
there is room. The program follows the entry of a flow as long as its node is one of these: so a
node whose time to keep connections is over also loses connections that have entries. Invariant:
what this mirrors is in the map. A node is added before slots name it, and taken out after they have
ceased to."""

from collections.abc import Iterator, Mapping, Set

import structlog

from fairlead.drivers.direct.maps.quota import NO_USE, Quota
from fairlead.drivers.direct.maps.records import INDEX, RETAINED_NODE
from fairlead.errors import FairleadError
from fairlead.net.bpf import Map

log = structlog.get_logger()

_PRESENT = INDEX.pack(1)
_NONE = frozenset[int]()


class RetainedNodes:
    """The map, mirrored: the namespace of a listener and numbers of nodes, by the index that the
    listener counts at."""

    def __init__(self, retained_nodes: Map, quota: Quota) -> None:
        self._map = retained_nodes
        self._quota = quota
        self._of: dict[int, tuple[str, frozenset[int]]] = {}
        self.changed_since_survey: set[int] = set()
        """Indexes whose nodes were changed since whoever surveys has emptied it."""

    def survey(self) -> Iterator[tuple[int, int]]:
        """What is in the map, an index and a node at a time; changes nothing."""
        return (RETAINED_NODE.unpack(key) for key, _ in self._map.items())

    def adopt(self, found: Mapping[int, Set[int]], namespaces: Mapping[int, str]) -> None:
        """Set the mirror to what was found, except for what has changed since, and remove what
        belongs to no listener. `namespaces`: of listeners, by index."""
        for index in (found.keys() | self._of.keys()) - self.changed_since_survey:
            namespace, nodes = namespaces.get(index, ""), found.get(index, _NONE)
            if self._of.get(index) != (namespace, nodes):
                self._note(index, namespace, frozenset(nodes))
        for index in self._of.keys() - namespaces.keys():
            self.only(index, _NONE)

    def add(self, index: int, nodes: Set[int], namespace: str, *, changing: bool) -> Set[int]:
        """Let these nodes keep their flows, in addition to the nodes that already do, as far as the
        quota of the namespace and the kernel have room. Returns the nodes of `nodes` that keep
        their flows."""
        held = self._held(index)
        new = sorted(nodes - held)
        granted = new[: self._quota.available(namespace, changing=changing)] if new else new
        self.changed_since_survey.add(index)
        try:
            self._map.update_all({RETAINED_NODE.pack(index, node): _PRESENT for node in granted})
        except FairleadError as error:
            # Some may have been added. The change must not fail because of this: a dead node could
            # not be removed then.
            log.warning("the kernel has no room for more retained nodes", problem=str(error))
            self._map.delete_all([RETAINED_NODE.pack(index, node) for node in granted])
            granted = []
        self._note(index, namespace, held | frozenset(granted))
        return nodes & self._held(index)

    def only(self, index: int, nodes: Set[int]) -> None:
        """None but these keep their flows any more."""
        namespace, held = self._of.get(index, ("", _NONE))
        self.changed_since_survey.add(index)
        self._map.delete_all([RETAINED_NODE.pack(index, node) for node in held - nodes])
        self._note(index, namespace, held & nodes)

    def _held(self, index: int) -> frozenset[int]:
        return self._of[index][1] if index in self._of else _NONE

    def _note(self, index: int, namespace: str, nodes: frozenset[int]) -> None:
        before = self._of.pop(index, None)
        if nodes:
            self._of[index] = namespace, nodes
        self._quota.change(
            (before[0], len(before[1])) if before else NO_USE, (namespace, len(nodes))
        )
