"""IPIP: the program that takes packets out of their envelopes, at the ingress of the node's
interfaces.

In: the gateways whose envelopes to open, the published addresses, and the ports that answer
gateways' probes. Out: the program of bpf/node.bpf.c on its own maps, attached. Nothing is pinned:
the attached program keeps its maps. A start fills new maps first and then puts its program in the
place of its predecessor's, in one step of the kernel: no packet is lost, and whatever a kill left
half done was never attached."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from struct import Struct
from typing import Self

from fairlead.drivers.tunnel.rules import Opening, apart
from fairlead.net import tc
from fairlead.net.address import pack_address
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program

OBJECT = Path(__file__).resolve().parents[2] / "objects" / "node_tc.o"
FILTER = "fairlead_node"
PRIORITY = 50
"""Before a gateway's filter (100): what comes out of an envelope has been through a gateway
already."""
OUTCOMES = ("taken_out", "stranger", "not_published", "congested", "not_taken_out")
"""In the order of `enum outcome`."""

_INDEX = Struct("=I")
_RANGE = Struct("=I16s")
_COUNTER = Struct("=Q")
_PRESENT = _INDEX.pack(1)


class Envelopes:
    """The program and its maps. Close it; what is attached stays."""

    def __init__(self, maps: Mapping[str, Map], program: Program) -> None:
        self._maps = maps
        self.program = program

    @classmethod
    def load(cls, gateways: Iterable[str]) -> Self:
        """Have the kernel take the program, attached nowhere. `gateways`: CIDRs of those whose
        envelopes are opened. Raises Refused where the kernel or the rights do not allow it."""
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
        """The node's addresses: envelopes to others are left alone."""
        self._change("own_addresses", addresses)

    def set_published(self, openings: Collection[Opening]) -> None:
        """Set the destinations that packets in envelopes may have."""
        addresses, ports = apart(openings)
        self._change("published", addresses)
        wanted = {_INDEX.pack(port) for port in ports}
        there = {key for key, _ in self._maps["health_ports"].items()}
        self._maps["health_ports"].update_all(dict.fromkeys(wanted - there, _PRESENT))
        self._maps["health_ports"].delete_all(list(there - wanted))

    def publish(self, added: Iterable[Opening], removed: Iterable[Opening]) -> None:
        """A change of these."""
        (new_addresses, new_ports), (old_addresses, old_ports) = apart(added), apart(removed)
        self._maps["published"].update_all({pack_address(each): _PRESENT for each in new_addresses})
        self._maps["published"].delete_all([pack_address(each) for each in old_addresses])
        self._maps["health_ports"].update_all({_INDEX.pack(each): _PRESENT for each in new_ports})
        self._maps["health_ports"].delete_all([_INDEX.pack(each) for each in old_ports])

    def counters(self) -> dict[str, int]:
        """Packets by what became of them, since this process started."""
        rows = (
            self._maps["outcomes"].per_cpu(_INDEX.pack(number)) for number in range(len(OUTCOMES))
        )
        return {
            name: sum(_COUNTER.unpack(each)[0] for each in row)
            for name, row in zip(OUTCOMES, rows, strict=True)
        }

    async def attach(self, interfaces: Sequence[int]) -> None:
        """Have the program on these interfaces, by index, and on no other."""
        for index in interfaces:
            await tc.attach(index, self.program.descriptor, name=FILTER, priority=PRIORITY)
        await detach(interfaces)

    def close(self) -> None:
        """Let go."""
        self.program.close()
        for each in self._maps.values():
            each.close()

    def _change(self, name: str, addresses: Collection[str]) -> None:
        wanted = {pack_address(each) for each in addresses}
        there = {key for key, _ in self._maps[name].items()}
        self._maps[name].update_all(dict.fromkeys(wanted - there, _PRESENT))
        self._maps[name].delete_all(list(there - wanted))


async def attached() -> set[int]:
    """The interfaces at which a program of this kind is."""
    return {found.interface for found in await tc.filters(FILTER)}


async def detach(but: Collection[int] = ()) -> list[int]:
    """Take the program off all interfaces but these; the others where it was."""
    found = [
        each
        for each in await tc.filters(FILTER)
        if each.interface not in but or each.priority != PRIORITY
    ]
    for each in found:
        await tc.detach(each)
    return [each.interface for each in found]
