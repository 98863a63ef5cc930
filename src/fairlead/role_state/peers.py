"""The part of `/state` about the exchange of flow entries between gateways, and its table. Pure."""

from collections.abc import Iterator

from fairlead.model import Value
from fairlead.role_state.part import Part, Table


class PeerState(Value, frozen=True):
    """Another gateway. `problem`: why this gateway is not connected to it; empty if it is
    connected."""

    address: str
    connected: bool
    problem: str = ""


class PeersState(Part, frozen=True):
    """The part of `/state` about the exchange with other gateways. `followers`: the number of
    gateways that read the flow entries of this one."""

    gateways: tuple[PeerState, ...] = ()
    followers: int = 0

    def shown(self) -> Iterator[Table]:
        if self.gateways:
            yield Table(
                ("PEER", "FOLLOWED", "PROBLEM"),
                [
                    (each.address, "yes" if each.connected else "no", each.problem)
                    for each in self.gateways
                ],
            )
