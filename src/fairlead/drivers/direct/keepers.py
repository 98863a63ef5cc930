"""Which nodes keep the flows that they have, for each listener: the map `keepers`.

In: the place that a listener counts at, numbers of nodes. Out: the same in the kernel. The program follows the entry of a flow
as long as its node is one of these: so a node whose time to keep connections is over loses those with entries too.
Invariant: what this mirrors is in the map. A node is added before slots name it, and taken out after they have ceased to.
"""

from collections.abc import Collection, Iterator, Mapping, Set

from fairlead.drivers.direct.layout import INDEX, KEEPER
from fairlead.net.bpf import Map

_PRESENT = INDEX.pack(1)


class Keepers:
    """The map, mirrored: numbers of nodes by the index that a listener counts at."""

    def __init__(self, keepers: Map) -> None:
        self._map = keepers
        self._of: dict[int, frozenset[int]] = {}
        self.touched: set[int] = set()
        """Indexes whose nodes were changed since whoever surveys has emptied it."""

    def survey(self) -> Iterator[tuple[int, int]]:
        """What is in the map, an index and a node at a time; changes nothing."""
        return (KEEPER.unpack(key) for key, _ in self._map.items())

    def adopt(self, found: Mapping[int, Set[int]], counting: Collection[int]) -> None:
        """Have the mirror be what was found, but for what was changed since; what belongs to no listener goes."""
        known = self._of
        self._of = {index: frozenset(nodes) for index, nodes in found.items() if index not in self.touched}
        self._of |= {index: known[index] for index in self.touched if index in known}
        for index in self._of.keys() - set(counting):
            self.only(index, frozenset())

    def add(self, index: int, nodes: Set[int]) -> None:
        """These keep their flows, beside those that do already."""
        held = self._of.get(index, frozenset())
        self.touched.add(index)
        self._map.update_all({KEEPER.pack(index, node): _PRESENT for node in nodes - held})
        self._of[index] = held | nodes

    def only(self, index: int, nodes: Set[int]) -> None:
        """None but these keep their flows any more."""
        held = self._of.pop(index, frozenset())
        self.touched.add(index)
        self._map.delete_all([KEEPER.pack(index, node) for node in held - nodes])
        if left := held & nodes:
            self._of[index] = left
