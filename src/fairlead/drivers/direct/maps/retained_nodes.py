"""The nodes that keep their open flows, for each listener: the map `retained_nodes`.

In: the index of a listener's counters, numbers of nodes. Out: the same in the kernel, as far as
there is room. The program follows the flow entry of a flow only while the entry's node is one of
these nodes. So a node whose drain time is over also loses connections that have flow entries.
Invariant: the map contains what is mirrored here. A node is added before slots name it, and removed
after no slot names it any more.
"""

from collections.abc import Iterator, Mapping, Set

import structlog

from fairlead.drivers.direct.maps.quota import NO_USAGE, Quota
from fairlead.drivers.direct.maps.records import INDEX, RETAINED_NODE
from fairlead.errors import FairleadError
from fairlead.net.bpf import Map

log = structlog.get_logger()

_PRESENT = INDEX.pack(1)
_NONE = frozenset[int]()


class RetainedNodes:
    """The map, mirrored: for each index of a listener, the listener's namespace and numbers of
    nodes."""

    def __init__(self, retained_nodes: Map, quota: Quota) -> None:
        self._map = retained_nodes
        self._quota = quota
        self._of: dict[int, tuple[str, frozenset[int]]] = {}
        self.changed_since_survey: set[int] = set()
        """Indexes whose nodes were changed since the last survey began."""

    def survey(self) -> Iterator[tuple[int, int]]:
        """Yield each index and node of the map. Nothing is changed."""
        return (RETAINED_NODE.unpack(key) for key, _ in self._map.items())

    def adopt(self, found: Mapping[int, Set[int]], namespaces: Mapping[int, str]) -> None:
        """Set the mirror to what was found, except for indexes that have changed since the survey
        began, and remove the nodes of indexes without a listener.

        `namespaces`: the namespaces of listeners, by index.
        """
        for index in (found.keys() | self._of.keys()) - self.changed_since_survey:
            namespace, nodes = namespaces.get(index, ""), found.get(index, _NONE)
            if self._of.get(index) != (namespace, nodes):
                self._note(index, namespace, frozenset(nodes))
        for index in self._of.keys() - namespaces.keys():
            self.only(index, _NONE)

    def add(self, index: int, nodes: Set[int], namespace: str, *, changing: bool) -> Set[int]:
        """Let these nodes keep their flows, in addition to the nodes that already do, as far as the
        quota of the namespace and the kernel permit. Return the nodes of `nodes` that keep their
        flows.

        `changing`: whether the listener exists already, see `Quota.available`.
        """
        held = self._held(index)
        new = sorted(nodes - held)
        granted = new[: self._quota.available(namespace, changing=changing)] if new else new
        self.changed_since_survey.add(index)
        try:
            self._map.update_all({RETAINED_NODE.pack(index, node): _PRESENT for node in granted})
        except FairleadError as error:
            # Some nodes may have been added. The change must not fail because of this error:
            # otherwise a dead node could not be removed from the listener.
            log.warning("the kernel cannot store more retained nodes", problem=str(error))
            self._map.delete_all([RETAINED_NODE.pack(index, node) for node in granted])
            granted = []
        self._note(index, namespace, held | frozenset(granted))
        return nodes & self._held(index)

    def only(self, index: int, nodes: Set[int]) -> None:
        """Remove all nodes of the listener except these."""
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
            (before[0], len(before[1])) if before else NO_USAGE, (namespace, len(nodes))
        )
