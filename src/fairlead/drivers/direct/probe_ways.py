"""Send the gateway's probes of a node through the same tunnel as forwarded packets.

In: the addresses of the nodes that are probed, the kernel's routes and events. Out: the program of bpf/probe.bpf.c at the
egress of the interfaces by which tunnels leave, with its own maps, which hold the way to each of these nodes. The program puts
packets of marked sockets (`net.httpprobe.PROBE_MARK`) into the same envelopes as clients' packets.
If a node is on a link with the gateway, or is this host, probes take the path of forwarded packets without the program, because
`ways` takes interface and next hop from the host's route: such a node has no entry, and its probes pass the program untouched.
Nothing is pinned: the attached program keeps its maps. A start fills new maps and replaces its predecessor's program
in one step of the kernel. What a killed gateway leaves does no harm: no other process sets this mark.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import structlog

from fairlead.drivers.direct.layout import INDEX, IPIP, SETTINGS, VXLAN, Way, pack_address, pack_way
from fairlead.drivers.direct.neighbours import Surroundings
from fairlead.drivers.direct.pins import OBJECTS
from fairlead.drivers.direct.ways import WAY_NAMES, Rules
from fairlead.errors import FairleadError, Unavailable
from fairlead.net import tc
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program

log = structlog.get_logger()

OBJECT = OBJECTS / "probe_tc.o"
FOLLOW_PAUSE_S = 0.5
"""Time to wait after a change of the networks, so that changes that follow are handled together with it."""
AUDIT_S = 60.0
"""Period after which programs that others detached are attached again."""


class ProbeWays:
    """Call `open` first and `close` last, in the gateway's network namespace. Without a tunnel in `rules` it does nothing.

    pin_path, priority: of the gateway's own filters, whose name and priority these filters share. tell: called with the kind of
    the tunnel that each node is asked through, by address, when that changes.
    """

    def __init__(self, rules: Rules, pin_path: Path, tell: Callable[[Mapping[str, str]], None], *, priority: int = 100) -> None:
        self.needed = rules.way in ("ipip", "vxlan") or (rules.way == "auto" and rules.tunnel != "none")
        """Whether any node may be behind a tunnel."""
        self._rules = rules
        self._name, self._priority = filter_name(pin_path), priority
        self._tell = tell
        self._asked: set[str] = set()
        self._ways: dict[str, Way] = {}
        self._surroundings: Surroundings | None = None
        self._maps: dict[str, Map] = {}
        self.program: Program | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Load the program into the kernel, but do not attach it. Raises Refused if the kernel or the rights forbid it."""
        if not self.needed:
            await detach(self._name)
            return
        object_file = await asyncio.to_thread(read_object, OBJECT)
        code = object_file.programs["probe"]
        used = {name for _, name in code.map_references}
        self._maps = create_maps([spec for name, spec in object_file.maps.items() if name in used])
        self._maps["settings"].update(INDEX.pack(0), SETTINGS.pack(0, 0, 0, 0, self._rules.vxlan_port.to_bytes(2, "big"), 0))
        self.program = await asyncio.to_thread(
            Program.load, code, self._maps, program_type=PROGRAM_TYPE_SCHED_CLS, license_name=object_file.license
        )
        self._surroundings = Surroundings(self._rules)

    def close(self) -> None:
        """Release the maps and the program; what is attached stays."""
        for each in (self._surroundings, self.program, *self._maps.values()):
            if each is not None:
                each.close()
        self._surroundings, self.program, self._maps = None, None, {}

    async def have(self, addresses: Collection[str]) -> None:
        """From now on probes of these nodes take the path of forwarded packets. Probes of a node without a way follow the
        host's routes: the driver that forwards says what is wrong."""
        if self._surroundings is None or self._asked.issuperset(addresses):
            return
        async with self._turn:
            new = set(addresses) - self._asked
            self._asked |= new
            await self._find(new)

    async def follow(self) -> None:
        """Update the ways after changes of the host's networks, until cancelled."""
        if self._surroundings is None:
            return
        while True:
            try:
                async with asyncio.timeout(AUDIT_S):
                    while not (await self._surroundings.news()).networks:
                        pass
            except TimeoutError:
                pass
            try:
                await self.look()
            except FairleadError as problem:
                log.warning("probes keep their previous paths: reading the host's networks failed", problem=str(problem))
            await asyncio.sleep(FOLLOW_PAUSE_S)

    async def look(self) -> None:
        """Update the ways to all nodes from the host's present networks, and attach again what others detached."""
        if self._surroundings is None:
            return
        async with self._turn:
            self._surroundings.renew()
            await self._find(self._asked)

    async def _find(self, addresses: Collection[str]) -> None:
        """Update the ways to these nodes, and attach the program at the interfaces by which they leave."""
        assert self._surroundings is not None
        found = await asyncio.to_thread(self._surroundings.ways, [(address, address) for address in addresses])
        tunnels = {node[1]: way for node, way in found.items() if isinstance(way, Way) and way.kind in (IPIP, VXLAN)}
        before = dict(self._ways)
        self._ways = {address: way for address, way in before.items() if address not in addresses} | tunnels
        ways = self._maps["probe_ways"]
        ways.update_all({pack_address(address): pack_way(way) for address, way in tunnels.items()})
        ways.delete_all([pack_address(address) for address in before.keys() - self._ways.keys()])
        await self._attach()
        if self._ways != before:
            self._tell({address: WAY_NAMES[way.kind] for address, way in self._ways.items()})

    async def _attach(self) -> None:
        """Attach the program at every interface by which a tunnel leaves, and at no other."""
        assert self.program is not None
        interfaces = {way.interface for way in self._ways.values()}
        for interface in sorted(interfaces):
            try:
                await tc.attach(interface, self.program.descriptor, name=self._name, priority=self._priority, egress=True)
            except Unavailable as problem:  # the interface was just removed: an event of the kernel follows
                log.warning("probes do not go through the tunnel yet", interface=interface, problem=str(problem))
        await detach(self._name, but=interfaces)


def filter_name(pin_path: Path) -> str:
    """The name of our filters: two gateways on one host have different pin paths."""
    return f"fairlead-probe:{pin_path.absolute()}"


async def detach(name: str, *, but: Collection[int] = ()) -> list[str]:
    """Take the program of this name off all interfaces but these. Returns what was detached, in words."""
    found = [each for each in await tc.filters(name, egress=True) if each.interface not in but]
    for each in found:
        await tc.detach(each)
    return [f"probes' program at interface {each.interface}" for each in found]
