"""IPIP: the program at the ingress of the node's interfaces that removes the outer IP header.

In: the gateways from which IPIP packets are accepted, the published addresses, and the ports that
answer gateways' probes. Out: the program of bpf/node.bpf.c with its own maps, attached. Nothing is
pinned: the attached program keeps its maps alive. A start first fills new maps, and then replaces
the previous program in one atomic step of the kernel. So no packet is lost, and what a killed
process left unfinished was never attached."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from struct import Struct
from typing import Self

from fairlead.drivers.tunnel.rules import Destination, separate
from fairlead.net import tc
from fairlead.net.address import pack_address
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program

OBJECT = Path(__file__).resolve().parents[2] / "objects" / "node_tc.o"
FILTER = "fairlead_node"
PRIORITY = 50
"""Runs before a gateway's filter (100): a decapsulated packet has passed a gateway already."""
OUTCOMES = ("decapsulated", "unknown_sender", "not_published", "congested", "not_decapsulated")
"""The names of the counters, in the order of `enum outcome` in bpf/node.bpf.c."""

_INDEX = Struct("=I")
_RANGE = Struct("=I16s")
_COUNTER = Struct("=Q")
_PRESENT = _INDEX.pack(1)


class Decapsulator:
    """The program and its maps. `close` must be called; the attached program stays in force."""

    def __init__(self, maps: Mapping[str, Map], program: Program) -> None:
        self._maps = maps
        self.program = program

    @classmethod
    def load(cls, gateways: Iterable[str]) -> Self:
        """Load the program into the kernel without attaching it. `gateways`: CIDRs of the gateways
        from which IPIP packets are accepted. Raise Refused if the kernel or missing rights do not
        allow it."""
        object_file = read_object(OBJECT)
        maps = create_maps(list(object_file.maps.values()))
        made = cls(
            maps,
            Program.load(object_file.programs["node"], maps, program_type=PROGRAM_TYPE_SCHED_CLS),
        )
        for cidr in gateways:
            network = ip_network(cidr)
            length = network.prefixlen + (96 if network.version == 4 else 0)
            maps["gateways"].update(
                _RANGE.pack(length, pack_address(str(network.network_address))), _PRESENT
            )
        return made

    def set_own(self, addresses: Collection[str]) -> None:
        """Set the node's addresses. IPIP packets to other addresses are not touched."""
        self._change("own_addresses", addresses)

    def set_published(self, destinations: Collection[Destination]) -> None:
        """Set the destinations that packets from the tunnel may have."""
        addresses, ports = separate(destinations)
        self._change("published", addresses)
        wanted = {_INDEX.pack(port) for port in ports}
        present = {key for key, _ in self._maps["health_ports"].items()}
        self._maps["health_ports"].update_all(dict.fromkeys(wanted - present, _PRESENT))
        self._maps["health_ports"].delete_all(list(present - wanted))

    def publish(self, added: Iterable[Destination], removed: Iterable[Destination]) -> None:
        """Add and remove destinations."""
        (new_addresses, new_ports), (old_addresses, old_ports) = separate(added), separate(removed)
        self._maps["published"].update_all({pack_address(each): _PRESENT for each in new_addresses})
        self._maps["published"].delete_all([pack_address(each) for each in old_addresses])
        self._maps["health_ports"].update_all({_INDEX.pack(each): _PRESENT for each in new_ports})
        self._maps["health_ports"].delete_all([_INDEX.pack(each) for each in old_ports])

    def counters(self) -> dict[str, int]:
        """Return the numbers of packets by outcome, since this process started."""
        rows = (
            self._maps["outcomes"].per_cpu(_INDEX.pack(number)) for number in range(len(OUTCOMES))
        )
        return {
            name: sum(_COUNTER.unpack(each)[0] for each in row)
            for name, row in zip(OUTCOMES, rows, strict=True)
        }

    async def attach(self, interfaces: Sequence[int]) -> None:
        """Attach the program to exactly these interfaces, given by index."""
        for index in interfaces:
            await tc.attach(index, self.program.descriptor, name=FILTER, priority=PRIORITY)
        await detach(interfaces)

    def close(self) -> None:
        """Close the file descriptors."""
        self.program.close()
        for each in self._maps.values():
            each.close()

    def _change(self, name: str, addresses: Collection[str]) -> None:
        wanted = {pack_address(each) for each in addresses}
        present = {key for key, _ in self._maps[name].items()}
        self._maps[name].update_all(dict.fromkeys(wanted - present, _PRESENT))
        self._maps[name].delete_all(list(present - wanted))


async def attached() -> set[int]:
    """Return the interfaces to which such a program is attached."""
    return {found.interface for found in await tc.filters(FILTER)}


async def detach(but: Collection[int] = ()) -> list[int]:
    """Detach the program from all interfaces except these. Return the interfaces from which it was
    detached."""
    found = [
        each
        for each in await tc.filters(FILTER)
        if each.interface not in but or each.priority != PRIORITY
    ]
    for each in found:
        await tc.detach(each)
    return [each.interface for each in found]
