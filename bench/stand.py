"""The forwarder in the kernel, not attached to any interface, with the maps of a gateway for a
number of Services and nodes.

In: the type of program (tc or XDP), the number of Services and nodes. Out: a `Stand`, whose
programs BPF_PROG_TEST_RUN can repeat (see bench.bpf.c). The driver's own tables fill the maps, as
in a gateway; MAC addresses are invented.
"""

import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from struct import Struct
from typing import Literal

from bench.subject import ROOT
from hatch_build import bpf_compiler

from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.records import (
    DROPS,
    INDEX,
    IPIP,
    LINK,
    MAC,
    NODE_TRAFFIC,
    SETTINGS,
    TAG_KEY,
    VXLAN,
    NextHop,
)
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol, ListenerSpec, SetListener
from fairlead.model import ServiceKey
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import read_object
from fairlead.net.maglev import table
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, PROGRAM_TYPE_XDP, Program
from fairlead.net.transition import Slots, transition

Kind = Literal["xdp", "tc"]
PROGRAM_TYPES: Mapping[Kind, int] = {"xdp": PROGRAM_TYPE_XDP, "tc": PROGRAM_TYPE_SCHED_CLS}
PROGRAMS = ("empty", "frame", "undoing", "room", "one", "many_frame", "many_undoing", "many")

LOOPBACK, OWN_MAC = 1, bytes(6)
METHODS = {"L2": LINK, "IPIP": IPIP, "VXLAN": VXLAN}
FIRST_OTHER = IPv4Address("198.18.0.0")
PORT = 80
ENDPOINTS = 10
FLOWS = 1 << 20
ARENA = 1 << 20
"""The size of the memory of tables, for 10,000 tables."""
FLOW_TABLES = ("connections", "datagrams", "new_connections", "new_datagrams")
"""Maps with an entry for each flow. They have room for twice as many."""
ANY_NUMBER = 1 << 31
VARIATION = Struct("=5I")


class Stand:
    """The programs and maps, created by `stand`. Nodes are called `L2-0`, `IPIP-3` and so on: four
    for each forwarding method, and those of `serve_others`."""

    def __init__(self, kind: Kind, maps: dict[str, Map], programs: Mapping[str, Program]) -> None:
        self.kind = kind
        self.programs = programs
        self._maps = maps
        self._tables = ListenerMaps(maps)
        self._draw = random.Random(2)
        maps["settings"].update(
            INDEX.pack(0),
            SETTINGS.pack(*(ANY_NUMBER,) * 3, 0, (4789).to_bytes(2, "big"), *(0,) * 4, 1 << 16),
        )
        # XDP accepts frames that are addressed to this interface; the packets of the cases are.
        maps["tags"].update(TAG_KEY.pack(LOOPBACK, 0), MAC.pack(OWN_MAC))
        for name in METHODS:
            for number in range(4):
                self._add_node(f"{name}-{number}", name, number)

    def close(self) -> None:
        self._tables.close()
        for program in self.programs.values():
            program.close()
        for each in self._maps.values():
            each.close()

    def _add_node(self, node: str, method: str, number: int) -> None:
        for ipv6, (network, outer) in enumerate(
            (("192.0.2.0", "192.0.2.250"), ("2001:db8::", "2001:db8::fa"))
        ):
            first = IPv6Address(network) if ipv6 else IPv4Address(network)
            address = str(first + number % 200 + 1)
            tunnelled = method != "L2"
            made = NextHop(
                METHODS[method],
                LOOPBACK,
                address,
                outer if tunnelled else "",
                address if tunnelled else "",
                mac=bytes((2, 0, 0, 0, number >> 8, number & 255)),
                own_mac=OWN_MAC,
                mtu=1400,
                vni=7471 if method == "VXLAN" else 0,
            )
            self._tables.nodes.set_next_hop(node, made, ipv6=bool(ipv6))

    def serve(
        self,
        address: str,
        nodes: Sequence[str],
        *,
        protocols: Sequence[ListenerProtocol] = ("TCP", "UDP"),
        retained_nodes: Sequence[str] = (),
        ranges: Sequence[str] = (),
    ) -> None:
        """Create listeners on these nodes. On a later call, connections of `retained_nodes`
        stay."""
        service = ServiceKey("bench", f"at-{address}")
        if ranges:
            self._tables.set_ranges(service, tuple(ranges))
        for protocol in protocols:
            key = ListenerKey(address, PORT, protocol)
            before = self._tables.installed(key)
            shares = tuple((node, 1) for node in sorted(nodes))
            slots = transition(
                before.slots if before else Slots(), table(shares), {*nodes, *retained_nodes}
            )
            spec = ListenerSpec(
                key,
                False,
                shares,
                tuple(sorted({*nodes, *retained_nodes})),
                restricted=bool(ranges),
            )
            change = SetListener(service, "uid", spec, slots)
            for error in self._tables.set_listeners((change,)).values():
                raise error

    def serve_others(self, services: int, nodes: int) -> None:
        """Create this number of other Services, each on ten of these nodes, or on all if there are
        fewer."""
        names = [f"L2-{number}" for number in range(nodes)]
        for number, name in enumerate(names):
            self._add_node(name, "L2", number)
        draw = random.Random(1)
        for number in range(services):
            self.serve(
                str(FIRST_OTHER + number),
                draw.sample(names, min(nodes, ENDPOINTS)),
                protocols=("TCP",),
            )

    def vary(self, sources: int, first_destination: str, destinations: int) -> None:
        """Set the flows that `many` and `many_frame` cycle through, from a random one. `sources` is
        a power of two."""
        last = int.from_bytes(
            (IPv6Address if ":" in first_destination else IPv4Address)(first_destination).packed[
                -4:
            ],
            "big",
        )
        first_source = int(IPv4Address("10.0.0.0"))
        self._maps["variations"].update(
            INDEX.pack(0),
            VARIATION.pack(sources, destinations, first_source, last, self._draw.getrandbits(32)),
        )

    def forwarded(self) -> int:
        """Return the number of packets that were forwarded to nodes so far."""
        return sum(
            NODE_TRAFFIC.unpack_from(value, at)[0]
            for _, value in self._maps["node_statistics"].items()
            if value.strip(b"\0")
            for at in range(0, len(value), NODE_TRAFFIC.size)
        )

    def dropped(self) -> int:
        """Return the number of packets that were dropped so far, for any reason."""
        reasons = (self._maps["events"].per_cpu(INDEX.pack(number)) for number in range(len(DROPS)))
        return sum(int.from_bytes(count, "little") for counts in reasons for count in counts)

    def entries(self) -> int:
        """Return the number of flow entries of connections."""
        return self._maps["connections"].count()


@contextmanager
def stand(
    kind: Kind, folder: Path, *, services: int, nodes: int, flows: int = FLOWS
) -> Iterator[Stand]:
    """Build the programs in `folder`, and load them and their maps, for this number of flows of
    each type. Remove everything at the end."""
    target = folder / f"bench_{kind}.o"
    if not target.exists():  # another stand may have built them
        define, source = ["-DXDP"] if kind == "xdp" else [], ROOT / "bench" / "bench.bpf.c"
        subprocess.run([*bpf_compiler(), *define, "-c", str(source), "-o", str(target)], check=True)
    object_file = read_object(target)
    sizes = {"arena": ARENA, **dict.fromkeys(FLOW_TABLES, 2 * flows)}
    maps = create_maps(
        [
            spec._replace(max_entries=sizes.get(spec.name, spec.max_entries))
            for spec in object_file.maps.values()
        ]
    )
    programs = {
        name: Program.load(object_file.programs[name], maps, program_type=PROGRAM_TYPES[kind])
        for name in PROGRAMS
    }
    made = Stand(kind, maps, programs)
    try:
        made.serve_others(services, nodes)
        yield made
    finally:
        made.close()
