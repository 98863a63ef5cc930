"""The cost at Octavia of changes of Services. Values of `bench.octavia`."""

import msgspec


class Size(msgspec.Struct, frozen=True):
    services: int
    ports: int
    nodes: int


class Cost(msgspec.Struct, frozen=True):
    """Seconds until every Service was as planned, and the number of API calls."""

    seconds: float
    writes: int
    reads: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.writes} writes, {self.reads} reads"


class Figures(msgspec.Struct, frozen=True):
    """One subject in one round. `node_removed_slowly` is None if it was not measured."""

    created: Cost
    node_added: Cost
    restarted: Cost
    node_removed_slowly: Cost | None = None
