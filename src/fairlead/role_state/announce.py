"""The part of `/state` about the announcement of addresses on layer 2, and its table. Pure."""

from collections.abc import Iterator, Mapping

from fairlead.model import Value
from fairlead.role_state.part import Part, Table, listed


class AnnouncedAddress(Value, frozen=True):
    """An address, the gateway that announces it, and on which of its interfaces. `since_s_ago`: how
    long the present process of this gateway has announced it; None: another gateway announces it.
    """

    address: str
    owner: str
    interface: str
    since_s_ago: float | None = None


class AnnounceState(Part, frozen=True):
    """`requests`: ARP requests and neighbor solicitations by outcome: `answered`, or `dropped`
    because another gateway announces the address."""

    addresses: tuple[AnnouncedAddress, ...] = ()
    requests: Mapping[str, int] = {}

    def shown(self) -> Iterator[Table | str]:
        if self.addresses:
            yield Table(
                ("ANNOUNCED", "GATEWAY", "INTERFACE", "SINCE"),
                [
                    (
                        each.address,
                        each.owner,
                        each.interface,
                        f"{each.since_s_ago:.0f} s ago" if each.since_s_ago is not None else "-",
                    )
                    for each in self.addresses
                ],
            )
        yield f"requests of neighbors: {listed(self.requests)}"
