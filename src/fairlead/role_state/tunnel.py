"""The part of `/state` about the node's end of the tunnels, and how it is shown. Pure."""

from collections.abc import Iterator, Mapping

from fairlead.role_state.part import Part, listed


class TunnelState(Part, frozen=True):
    """The part of `/state` about the node's end of the tunnels. `packets`: the number of packets by
    result."""

    kind: str
    packets: Mapping[str, int] = {}

    def shown(self) -> Iterator[str]:
        yield f"tunnel: {self.kind}, packets: {listed(self.packets)}"
