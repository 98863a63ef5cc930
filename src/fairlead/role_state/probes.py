"""The part of `/state` about the probes of nodes, and its table. Pure."""

from collections.abc import Iterator

from msgspec.structs import astuple

from fairlead.model import Value, Verdict
from fairlead.role_state.part import Part, Table


class ProbedNode(Value, frozen=True):
    """The verdict for one path by which a node is probed. `node`: empty if the API shows no node
    with this address."""

    node: str
    address: str
    path: str
    verdict: Verdict


class ProbesState(Part, frozen=True):
    """The part of `/state` about the probes of nodes."""

    nodes: tuple[ProbedNode, ...] = ()

    def shown(self) -> Iterator[Table]:
        if self.nodes:
            yield Table(
                ("NODE", "ADDRESS", "PROBE PATH", "VERDICT"), [astuple(each) for each in self.nodes]
            )
