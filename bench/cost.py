"""What changes of Services cost at Octavia. Values of `bench.octavia`."""

import msgspec


class Size(msgspec.Struct, frozen=True):
    services: int
    ports: int
    nodes: int


class Cost(msgspec.Struct, frozen=True):
    """Until every Service was as wanted, and the calls that it took."""

    seconds: float
    writes: int
    reads: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.writes} writes, {self.reads} reads"


class Figures(msgspec.Struct, frozen=True):
    """One subject in one round. `node_removed_slowly`: None: that was not asked for."""

    created: Cost
    node_added: Cost
    started_anew: Cost
    node_removed_slowly: Cost | None = None
