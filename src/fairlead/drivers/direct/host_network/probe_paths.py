"""Send the gateway's probes of a node through the same tunnel as forwarded packets.

In: the addresses of probed nodes, the kernel's routes and events. Out: the program of
bpf/probe.bpf.c at the egress of each interface through which a tunnel leaves, with its own maps,
which contain the next hop of each node. The program encapsulates packets of marked sockets
(`net.httpprobe.PROBE_MARK`) in the same way as clients' packets. If a node is on a link with the
gateway, or is this host, probes take the path of forwarded packets without the program, because
`find_next_hops` takes interface and next hop from the host's route: such a node has no map entry,
and its probes pass the program unchanged.

Nothing is pinned, because the attached program keeps its maps. A start fills new maps, and the
kernel replaces the program of the previous process in one step. A program that a killed gateway
leaves does no harm, because no other process sets this mark.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import structlog

from fairlead.drivers import Component
from fairlead.drivers.direct.host_network.host_network import HostNetwork
from fairlead.drivers.direct.host_network.next_hops import METHOD_NAMES, Rules
from fairlead.drivers.direct.maps.pins import OBJECTS
from fairlead.drivers.direct.maps.records import (
    INDEX,
    IPIP,
    SETTINGS,
    VXLAN,
    NextHop,
    pack_next_hop,
)
from fairlead.errors import FairleadError, Unavailable
from fairlead.net import tc
from fairlead.net.address import pack_address
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import read_object
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, Program

log = structlog.get_logger()

OBJECT = OBJECTS / "probe_tc.o"
FOLLOW_PAUSE_S = 0.5
"""Time to wait after a change of the networks, so that changes that follow are handled together
with it."""
AUDIT_S = 60.0
"""Period after which programs that another process has detached are attached again."""


class ProbePaths(Component):
    """The paths of probes. Call `open` first and `close` last, in the gateway's network namespace.
    Without a tunnel in `rules` it does nothing.

    `pin_path`, `priority`: of the gateway's own filters, from which these filters take their name
    and priority. `on_change`: called with the kind of tunnel of each probed node, by address, when
    it changes.
    """

    name = "probe paths"

    def __init__(
        self,
        rules: Rules,
        pin_path: Path,
        on_change: Callable[[Mapping[str, str]], None],
        *,
        priority: int = 100,
    ) -> None:
        self.needed = rules.forwarding in ("ipip", "vxlan") or (
            rules.forwarding == "auto" and rules.tunnel != "none"
        )
        """Whether any node may be behind a tunnel."""
        self._rules = rules
        self._filter_name, self._priority = filter_name(pin_path), priority
        self._on_change = on_change
        self._probed: set[str] = set()
        self._hops: dict[str, NextHop] = {}
        self._host_network: HostNetwork | None = None
        self._maps: dict[str, Map] = {}
        self.program: Program | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Load the program into the kernel, but do not attach it. Raise Refused if the kernel or
        missing privileges prevent it."""
        if not self.needed:
            await detach(self._filter_name)
            return
        object_file = await asyncio.to_thread(read_object, OBJECT)
        code = object_file.programs["probe"]
        used = {name for _, name in code.map_references}
        self._maps = create_maps([spec for name, spec in object_file.maps.items() if name in used])
        self._maps["settings"].update(
            INDEX.pack(0),
            SETTINGS.pack(*(0,) * 4, self._rules.vxlan_port.to_bytes(2, "big"), *(0,) * 5),
        )
        self.program = await asyncio.to_thread(
            Program.load,
            code,
            self._maps,
            program_type=PROGRAM_TYPE_SCHED_CLS,
            license_name=object_file.license,
        )
        self._host_network = HostNetwork(self._rules)

    async def close(self) -> None:
        """Release the maps and the program; attached programs stay attached."""
        for each in (self._host_network, self.program, *self._maps.values()):
            if each is not None:
                each.close()
        self._host_network, self.program, self._maps = None, None, {}

    async def add(self, addresses: Collection[str]) -> None:
        """From now on, send probes of these nodes on the path of forwarded packets.

        Probes of a node without a next hop follow the host's routes. The driver that forwards
        reports what is wrong.
        """
        if self._host_network is None or self._probed.issuperset(addresses):
            return
        async with self._lock:
            new = set(addresses) - self._probed
            self._probed |= new
            await self._update(new)

    async def remove(self) -> list[str]:
        return await detach(self._filter_name)

    async def run(self) -> None:
        """Update the next hops after changes of the host's networks, until cancelled."""
        if self._host_network is None:
            return
        while True:
            try:
                async with asyncio.timeout(AUDIT_S):
                    while True:
                        changes = await self._host_network.next_changes()
                        if changes.networks or (changes.hooks and await self._has_lost_program()):
                            break
            except TimeoutError:
                pass
            try:
                await self.refresh()
            except FairleadError as problem:
                log.warning(
                    "probes keep their previous paths: reading the host's networks failed",
                    problem=str(problem),
                )
            await asyncio.sleep(FOLLOW_PAUSE_S)

    async def refresh(self) -> None:
        """Bring the next hops of all nodes to the present state, and attach programs again that
        another process has detached."""
        if self._host_network is None:
            return
        async with self._lock:
            self._host_network.refresh()
            await self._update(self._probed)

    async def _update(self, addresses: Collection[str]) -> None:
        """Update the next hops of these nodes, and attach the program to the interfaces through
        which they leave."""
        assert self._host_network is not None
        found = await asyncio.to_thread(
            self._host_network.find_next_hops, [(address, address) for address in addresses]
        )
        tunnels = {
            node[1]: hop
            for node, hop in found.items()
            if isinstance(hop, NextHop) and hop.kind in (IPIP, VXLAN)
        }
        before = dict(self._hops)
        self._hops = {
            address: hop for address, hop in before.items() if address not in addresses
        } | tunnels
        hops = self._maps["probe_paths"]
        hops.update_all(
            {pack_address(address): pack_next_hop(hop) for address, hop in tunnels.items()}
        )
        hops.delete_all([pack_address(address) for address in before.keys() - self._hops.keys()])
        await self._attach()
        if self._hops != before:
            self._on_change(
                {address: METHOD_NAMES[hop.kind] for address, hop in self._hops.items()}
            )

    async def _has_lost_program(self) -> bool:
        """Return whether another process has detached the program from an interface."""
        interfaces = {hop.interface for hop in self._hops.values()}
        found = await tc.filters(self._filter_name, interfaces, egress=True)
        return {each.interface for each in found} != interfaces

    async def _attach(self) -> None:
        """Attach the program to every interface through which a tunnel leaves, and to no other."""
        assert self.program is not None
        interfaces = {hop.interface for hop in self._hops.values()}
        for interface in sorted(interfaces):
            # The interface was just removed: an event of the kernel follows.
            try:
                await tc.attach(
                    interface,
                    self.program.descriptor,
                    name=self._filter_name,
                    priority=self._priority,
                    egress=True,
                )
            except Unavailable as problem:
                log.warning(
                    "probes do not go through the tunnel yet",
                    interface=interface,
                    problem=str(problem),
                )
        await detach(self._filter_name, but=interfaces)


def filter_name(pin_path: Path) -> str:
    """Return the name of our filters: two gateways on one host have different pin paths."""
    return f"fairlead-probe:{pin_path.absolute()}"


async def detach(name: str, *, but: Collection[int] = ()) -> list[str]:
    """Detach the program with this name from all interfaces except `but`. Return a description of
    each."""
    found = [each for each in await tc.filters(name, egress=True) if each.interface not in but]
    for each in found:
        await tc.detach(each)
    return [f"probe program at interface {each.interface}" for each in found]
