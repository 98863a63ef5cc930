"""Two stands for tests. A forwarder in the kernel that is attached nowhere: packets go in through BPF_PROG_TEST_RUN, verdicts
come out. And drivers on real interfaces: scenarios that run in a network namespace of their own."""

import os
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw
from tests.drivers.inside import Scenario, run_inside

from fairlead.config import AttachKind
from fairlead.drivers.direct import DirectDriver, Sizes
from fairlead.drivers.direct.layout import HERE, INDEX, LINK, SETTINGS, Way
from fairlead.drivers.direct.pins import OBJECT, OBJECTS
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol, ListenerSpec, SetListener
from fairlead.drivers.direct.tables import Tables
from fairlead.lab import namespace
from fairlead.model import Listener, LoadBalancer, Member, ServiceKey
from fairlead.net import bpffs
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import read_object
from fairlead.net.maglev import table
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, PROGRAM_TYPE_XDP, Program
from fairlead.net.ringbuf import RingBuffer
from fairlead.net.transition import Slots, transition

REDIRECT, DROP, NOT_OURS = 7, 2, 0xFFFFFFFF
XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT = 1, 2, 3, 4
_SCRATCH, _GSO_SIZE = 48, 176
"""Where `cb[0]` and `gso_size` are in struct __sk_buff. The program leaves the number of its node there, plus 1."""

OWN_MAC = b"\x02\0\0\0\0\xff"
VXLAN_PORT = 4789
FLOW_TABLES = ("connections", "datagrams", "new_connections", "new_datagrams", "closing_connections")
FLOWS = 4096
LISTENERS, NODES = 1024, 256
SIZES = {
    "arena": 65536,
    **dict.fromkeys(FLOW_TABLES, FLOWS),
    **dict.fromkeys(("listeners", "owners", "addresses", "statistics"), LISTENERS),
    **dict.fromkeys(("node_names", "node_statistics"), NODES),
    "ways": 2 * NODES,
    "keepers": 16384,
    "ranges": 16384,
}
"""What tests need. Maps of the size that gateways have take longer to make and to read than most tests."""
ARRAYS, RINGBUF, MMAPABLE = (2, 6), 27, 1 << 10
"""Types and a flag of maps in linux/bpf.h."""

VIP4, VIP6 = "203.0.113.10", "2001:db8:f00::10"
CLIENT4, CLIENT6 = "198.51.100.7", "2001:db8:c::7"
SERVICE = ServiceKey("default", "web")


class Answer(NamedTuple):
    """What became of a packet: the verdict in the terms of tc, the node if it was forwarded, and the bytes."""

    verdict: int
    node: str
    packet: bytes


class Forwarder:
    """The programs on maps of their own. Nodes have an address of each family on the loopback's link, by default.

    fast: packets meet the program at XDP first, and the one at tc only where that passes them on; as they do on an interface.
    """

    def __init__(self, maps: dict[str, Map], tc: Program, xdp: Program, *, fast: bool) -> None:
        self.maps, self.tc, self.xdp, self.fast = maps, tc, xdp, fast
        self.tables = Tables(maps)
        self.passed_on = 0
        """Packets that the program at XDP left to the one at tc."""
        self.allow_inserts(1_000_000)
        self.maps["tags"].update(struct.pack("=II", 1, 0), bytes(8))

    def allow_inserts(self, per_s: int) -> None:
        self.set_settings(per_s=per_s)

    def set_settings(
        self, *, per_s: int = 1_000_000, messages_per_s: int = 1000, flags: int = 0, copying_until: int = 0
    ) -> None:
        port = VXLAN_PORT.to_bytes(2, "big")
        record = SETTINGS.pack(per_s, per_s, messages_per_s, flags, port, copying_until)
        self.maps["settings"].update(INDEX.pack(0), record)

    def add_node(self, name: str, *addresses: str, here: bool = False) -> None:
        for address in addresses:
            way = Way(HERE if here else LINK, 1, address, mac=mac_of(name), own_mac=OWN_MAC)
            self.tables.nodes.set_way(name, way, ipv6=":" in address)

    def serve(
        self,
        weights: dict[str, int],
        keepers: set[str] | None = None,
        *,
        address: str = VIP4,
        port: int = 80,
        protocol: ListenerProtocol = "TCP",
        by_source: bool = False,
        refuses: bool = False,
        restricted: bool = False,
    ) -> Slots:
        """Make the listener have these weights; by default the nodes with a weight keep their connections."""
        key = ListenerKey(address, port, protocol)
        installed = self.tables.installed(key)
        keeping = frozenset(weights if keepers is None else keepers)
        shares = tuple(sorted(weights.items()))
        after = transition(installed.slots if installed else Slots(), table(shares), keeping, by_source=by_source)
        listener = ListenerSpec(key, by_source, shares, tuple(sorted(keeping)), refuses=refuses, restricted=restricted)
        self.tables.set_listener(SetListener(SERVICE, "uid", listener, after))
        return after

    def run(self, packet: Packet | bytes, *, gso_size: int = 0) -> Answer:
        given = bytes(packet)
        if self.fast:
            trial = self.xdp.test_run(given, with_context=False)
            if trial.verdict != XDP_PASS:
                names = {mac_of(name): name for name in self.tables.nodes.names().values()}
                if trial.verdict in (XDP_TX, XDP_REDIRECT):
                    return Answer(REDIRECT, names[trial.packet[:6]], trial.packet)
                assert trial.verdict == XDP_DROP
                return Answer(DROP, "", trial.packet)
            assert trial.packet == given
            self.passed_on += 1
        trial = self.tc.test_run(
            given, context=struct.pack("=II", 0, gso_size).rjust(_GSO_SIZE + 4, b"\0") if gso_size else b""
        )
        (number,) = struct.unpack_from("<I", trial.context, _SCRATCH)
        node = self.tables.nodes.names().get(number - 1, "") if trial.verdict == REDIRECT else ""
        return Answer(trial.verdict, node, trial.packet)

    def event(self, number: int) -> int:
        return sum(int.from_bytes(row, "little") for row in self.maps["events"].per_cpu(INDEX.pack(number)))


class Programs(NamedTuple):
    """The programs, on maps that are theirs. To load them takes the kernel a third of a second, to empty the maps a few ms."""

    maps: dict[str, Map]
    tc: Program
    xdp: Program

    @classmethod
    def load(cls) -> Self:
        objects = read_object(OBJECT), read_object(OBJECTS / "direct_xdp.o")
        specs = [spec._replace(max_entries=SIZES.get(spec.name, spec.max_entries)) for spec in objects[0].maps.values()]
        maps = create_maps(specs)
        tc = Program.load(objects[0].programs["direct"], maps, program_type=PROGRAM_TYPE_SCHED_CLS)
        xdp = Program.load(objects[1].programs["direct"], maps, program_type=PROGRAM_TYPE_XDP)
        return cls(maps, tc, xdp)

    def empty(self) -> None:
        """Make the maps what new ones are, but for what CPUs keep of listeners that have been: that counts no more."""
        for name, each in self.maps.items():
            if name in ("listener_cache", "generation"):
                continue
            if each.spec.flags & MMAPABLE:
                memory = each.memory()
                memory[:] = bytes(len(memory))
                memory.close()
            elif each.spec.type == RINGBUF:
                ring = RingBuffer(each)
                ring.read(each.spec.max_entries)
                ring.close()
            elif each.spec.type in ARRAYS:
                for key in [key for key, value in each.items() if value.strip(b"\0")]:
                    each.clear_values(key)
            else:
                each.delete_all([key for key, _ in each.items()])


_idle: list[Programs] = []
"""Those that no test has at the moment."""


@contextmanager
def a_forwarder(*, fast: bool) -> Iterator[Forwarder]:
    """One with maps of its own and nodes 1 to 3."""
    programs = _idle.pop() if _idle else Programs.load()
    made = Forwarder(*programs, fast=fast)
    for i in (1, 2, 3):
        made.add_node(f"node{i}", f"192.0.2.{i}", f"2001:db8::{i}")
    yield made
    made.tables.close()
    programs.empty()
    _idle.append(programs)


@pytest.fixture(params=[False, True], ids=["tc", "xdp"])
def forwarder(request: pytest.FixtureRequest) -> Iterator[Forwarder]:
    with a_forwarder(fast=request.param) as made:
        yield made


def mac_of(node: str) -> bytes:
    """The hardware address that a node has in these tests."""
    return b"\x02\0" + zlib.crc32(node.encode()).to_bytes(4, "big")


def to_us() -> Packet:
    """An Ethernet header that the loopback device takes as addressed to itself."""
    return Ether(dst="00:00:00:00:00:00", src="02:00:00:00:00:01")


def tcp(flags: str = "S", port: int = 40000, *, ipv6: bool = False, client: str = "", hops: int = 64, seq: int = 0) -> Packet:
    """A segment from a client to the listener."""
    if ipv6:
        head: Packet = IPv6(src=client or CLIENT6, dst=VIP6, hlim=hops)
    else:
        head = IP(src=client or CLIENT4, dst=VIP4, ttl=hops)
    return to_us() / head / TCP(sport=port, dport=80, flags=flags, seq=seq) / Raw(b"x" * 20)


def udp(port: int = 40000, *, ipv6: bool = False, client: str = "", hops: int = 64) -> Packet:
    """A datagram from a client to the listener."""
    if ipv6:
        head: Packet = IPv6(src=client or CLIENT6, dst=VIP6, hlim=hops)
    else:
        head = IP(src=client or CLIENT4, dst=VIP4, ttl=hops)
    return to_us() / head / UDP(sport=port, dport=80) / Raw(b"x" * 20)


NAME = f"flt-{os.getpid()}-driver"
PINS = bpffs.ROOT / NAME
WEB = ServiceKey("default", "web")
DEADLINE_S = 60

Run = Callable[[Scenario], None]


def ip(*words: str) -> None:
    subprocess.run(["ip", "-n", NAME, *words], check=True, capture_output=True, timeout=DEADLINE_S)


def add_cable(device: str, address: str) -> None:
    ip("link", "add", device, "type", "veth", "peer", "name", f"{device}-end")
    ip("address", "add", address, "dev", device)
    for each in (device, f"{device}-end"):
        ip("link", "set", each, "up")


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a scenario in a namespace with one interface, eth0, on 192.0.2.0/24."""

    namespace.create(NAME)
    try:
        ip("link", "set", "lo", "up")
        add_cable("eth0", "192.0.2.10/24")
        yield partial(run_inside, NAME, deadline_s=DEADLINE_S)
    finally:
        namespace.delete(NAME)
        for path in (PINS, Path(f"{PINS}-2")):
            bpffs.remove(path)


def driver(
    pin_path: Path = PINS,
    priority: int = 100,
    arena_bytes: int = 1 << 20,
    wanted: AttachKind = "auto",
    touched: Callable[[Collection[ServiceKey]], None] = lambda _: None,
    objects: Path = OBJECTS,
    clock: Callable[[], float] = time.monotonic,
    share: float = 1.0,
    interfaces: Sequence[str] = ("eth0",),
) -> DirectDriver:
    return DirectDriver(
        interfaces,
        wanted=wanted,
        pin_path=pin_path,
        priority=priority,
        sizes=Sizes(arena_bytes, connections=1024, datagrams=1024),
        touched=touched,
        objects=objects,
        clock=clock,
        share=share,
    )


def load_balancer(*members: Member, address: str = "203.0.113.10") -> dict[ServiceKey, LoadBalancer]:
    listeners = (Listener("IPv4", 80, "TCP", "Local", 30080, members),)
    return {WEB: LoadBalancer(WEB, "uid-web", "fairlead.io/direct", (address,), listeners)}


async def bring(made: DirectDriver, intents: dict[ServiceKey, LoadBalancer]) -> list[str]:
    """Apply what differs, which must succeed; the changes."""
    changes = made.diff(made.render(intents), await made.read(None))
    assert await made.apply(changes) == {}
    return [str(change) for change in changes]


NODE1 = Member("node1", "192.0.2.21", 1)
