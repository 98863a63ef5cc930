"""Two environments for the tests of the data plane.

`forwarder`: the programs in the kernel, attached to no interface. Tests pass packets through them
with BPF_PROG_TEST_RUN and read the verdicts. `run`: a network namespace with a real interface, in
which a test runs a scenario with drivers."""

import os
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw
from tests.drivers.direct.applying import set_listener
from tests.drivers.inside import Scenario, run_inside

from fairlead.config import AttachKind
from fairlead.drivers.direct import DirectDriver, Sizes
from fairlead.drivers.direct.maps.listener_maps import ListenerMaps
from fairlead.drivers.direct.maps.pins import OBJECT, OBJECTS
from fairlead.drivers.direct.maps.records import (
    FRACTION,
    INDEX,
    LINK,
    LOCAL,
    SETTINGS,
    NextHop,
)
from fairlead.drivers.direct.spec import ListenerKey, ListenerProtocol, ListenerSpec, SetListener
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
"""The offsets of `cb[0]` and `gso_size` in struct __sk_buff. The program writes the number of the
chosen node plus 1 to `cb[0]`."""

OWN_MAC = b"\x02\0\0\0\0\xff"
VXLAN_PORT = 4789
FLOW_TABLES = (
    "connections",
    "datagrams",
    "new_connections",
    "new_datagrams",
    "closing_connections",
    "excess_flows",
)
FLOWS = 4096
LISTENERS, NODES = 1024, 256
SIZES = {
    "arena": 65536,
    **dict.fromkeys(FLOW_TABLES, FLOWS),
    **dict.fromkeys(("listeners", "owners", "addresses", "statistics"), LISTENERS),
    **dict.fromkeys(("node_names", "node_statistics"), NODES),
    "next_hops": 2 * NODES,
    "retained_nodes": 16384,
    "ranges": 16384,
    "shares": 16,
    "namespace_allowances": 16,
}
"""Map sizes for tests. Creating and reading maps of the size of a gateway takes longer than most
tests."""
ARRAYS, RINGBUF, MMAPABLE = (2, 6), 27, 1 << 10
"""Map types (BPF_MAP_TYPE_*), and the flag BPF_F_MMAPABLE, of linux/bpf.h."""

VIP4, VIP6 = "203.0.113.10", "2001:db8:f00::10"
CLIENT4, CLIENT6 = "198.51.100.7", "2001:db8:c::7"
SERVICE = ServiceKey("default", "web")


class Answer(NamedTuple):
    """The result of one packet: the verdict as a code of tc, the node if the packet was forwarded,
    and the bytes of the packet after the program."""

    verdict: int
    node: str
    packet: bytes


class Forwarder:
    """The loaded programs and their maps. Next hops are on the link of the loopback interface.

    fast: run the XDP program first, and the tc program only on packets that the XDP program passes,
    as on an interface. False: run the tc program alone."""

    def __init__(
        self, maps: dict[str, Map], tc: Program, xdp: Program, *, fast: bool, share: float = 1.0
    ) -> None:
        self.maps, self.tc, self.xdp, self.fast = maps, tc, xdp, fast
        self.tables = ListenerMaps(maps, share=share)
        self.passed_on = 0
        """The number of packets that the XDP program passed to the tc program."""
        self.allow_inserts(1_000_000)
        self.maps["tags"].update(struct.pack("=II", 1, 0), bytes(8))

    def allow_inserts(self, per_s: int) -> None:
        self.set_settings(per_s=per_s)

    def set_settings(
        self,
        *,
        per_s: int = 1_000_000,
        messages_per_s: int = 1000,
        flags: int = 0,
        copying_until: int = 0,
        usable: tuple[int, int, int] = (0, 0, 0),
        share: float = 1.0,
    ) -> None:
        """`usable`: the limits of `connections`, `datagrams` and `closing_connections`; 0: none.
        `share`: the fraction that a namespace may have of what others leave."""
        port = VXLAN_PORT.to_bytes(2, "big")
        limits = (*usable, int(share * FRACTION))
        record = SETTINGS.pack(per_s, per_s, messages_per_s, flags, port, copying_until, *limits)
        self.maps["settings"].update(INDEX.pack(0), record)

    def add_node(self, name: str, *addresses: str, here: bool = False) -> None:
        for address in addresses:
            next_hop = NextHop(
                LOCAL if here else LINK, 1, address, mac=mac_of(name), own_mac=OWN_MAC
            )
            self.tables.nodes.set_next_hop(name, next_hop, ipv6=":" in address)

    def serve(
        self,
        weights: dict[str, int],
        retained_nodes: set[str] | None = None,
        *,
        address: str = VIP4,
        port: int = 80,
        protocol: ListenerProtocol = "TCP",
        by_source: bool = False,
        refuses: bool = False,
        restricted: bool = False,
        service: ServiceKey = SERVICE,
    ) -> Slots:
        """Set the weights of the listener. `retained_nodes`: the nodes that keep their connections;
        by default the nodes with a weight."""
        key = ListenerKey(address, port, protocol)
        installed = self.tables.installed(key)
        retained = frozenset(weights if retained_nodes is None else retained_nodes)
        shares = tuple(sorted(weights.items()))
        after = transition(
            installed.slots if installed else Slots(), table(shares), retained, by_source=by_source
        )
        listener = ListenerSpec(
            key, by_source, shares, tuple(sorted(retained)), refuses=refuses, restricted=restricted
        )
        set_listener(self.tables, SetListener(service, "uid", listener, after))
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
            given,
            context=struct.pack("=II", 0, gso_size).rjust(_GSO_SIZE + 4, b"\0")
            if gso_size
            else b"",
        )
        (number,) = struct.unpack_from("<I", trial.context, _SCRATCH)
        node = self.tables.nodes.names().get(number - 1, "") if trial.verdict == REDIRECT else ""
        return Answer(trial.verdict, node, trial.packet)

    def event(self, number: int) -> int:
        return sum(
            int.from_bytes(row, "little") for row in self.maps["events"].per_cpu(INDEX.pack(number))
        )


class Programs(NamedTuple):
    """The loaded programs and their maps.

    One test after the other uses them: the kernel needs a third of a second to load them, and a few
    milliseconds to empty the maps."""

    maps: dict[str, Map]
    tc: Program
    xdp: Program

    @classmethod
    def load(cls) -> Self:
        objects = read_object(OBJECT), read_object(OBJECTS / "direct_xdp.o")
        specs = [
            spec._replace(max_entries=SIZES.get(spec.name, spec.max_entries))
            for spec in objects[0].maps.values()
        ]
        maps = create_maps(specs)
        tc = Program.load(objects[0].programs["direct"], maps, program_type=PROGRAM_TYPE_SCHED_CLS)
        xdp = Program.load(objects[1].programs["direct"], maps, program_type=PROGRAM_TYPE_XDP)
        return cls(maps, tc, xdp)

    def empty(self) -> None:
        """Empty the maps, except the CPUs' caches of listeners: cached listeners of earlier tests
        are no longer valid."""
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
"""Programs that no test uses at the moment."""


@contextmanager
def a_forwarder(*, fast: bool, share: float = 1.0) -> Iterator[Forwarder]:
    """A forwarder with empty maps and the nodes node1 to node3. `share`: the fraction that a
    namespace may have of what others leave."""
    programs = _idle.pop() if _idle else Programs.load()
    made = Forwarder(*programs, fast=fast, share=share)
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
    """Return the MAC address of a node in these tests."""
    return b"\x02\0" + zlib.crc32(node.encode()).to_bytes(4, "big")


def to_us() -> Packet:
    """Return an Ethernet header that the loopback interface accepts as addressed to itself."""
    return Ether(dst="00:00:00:00:00:00", src="02:00:00:00:00:01")


def tcp(
    flags: str = "S",
    port: int = 40000,
    *,
    ipv6: bool = False,
    client: str = "",
    hops: int = 64,
    seq: int = 0,
) -> Packet:
    """Return a TCP segment from a client to the listener."""
    if ipv6:
        head: Packet = IPv6(src=client or CLIENT6, dst=VIP6, hlim=hops)
    else:
        head = IP(src=client or CLIENT4, dst=VIP4, ttl=hops)
    return to_us() / head / TCP(sport=port, dport=80, flags=flags, seq=seq) / Raw(b"x" * 20)


def udp(port: int = 40000, *, ipv6: bool = False, client: str = "", hops: int = 64) -> Packet:
    """Return a UDP datagram from a client to the listener."""
    if ipv6:
        head: Packet = IPv6(src=client or CLIENT6, dst=VIP6, hlim=hops)
    else:
        head = IP(src=client or CLIENT4, dst=VIP4, ttl=hops)
    return to_us() / head / UDP(sport=port, dport=80) / Raw(b"x" * 20)


TCP_CHECKSUM, UDP_CHECKSUM = 16, 6


@lru_cache(maxsize=1024)
def _bytes_of(made: Callable[..., Packet], *flags: str, **fields: Any) -> bytes:
    return bytes(made(*flags, port=0, **fields))


def _from_port(packet: bytes, port: int, checksum_at: int) -> bytes:
    """Return the packet, which is from port 0, from another port, with the right checksum."""
    transport = 14 + (40 if packet[12:14] == b"\x86\xdd" else 20)
    total = (~int.from_bytes(packet[transport + checksum_at :][:2]) & 0xFFFF) + port
    total = (total & 0xFFFF) + (total >> 16)
    changed = bytearray(packet)
    struct.pack_into("!H", changed, transport, port)
    # In UDP, 0 would mean that there is no checksum.
    found = ~total & 0xFFFF or (0xFFFF if checksum_at == UDP_CHECKSUM else 0)
    struct.pack_into("!H", changed, transport + checksum_at, found)
    return bytes(changed)


def segment(flags: str = "S", port: int = 40000, **fields: Any) -> bytes:
    """Return the bytes of `tcp` with these arguments. Scapy builds a packet once for all ports:
    it needs a millisecond, and tests send thousands of packets."""
    return _from_port(_bytes_of(tcp, flags, **fields), port, TCP_CHECKSUM)


def datagram(port: int = 40000, **fields: Any) -> bytes:
    """Return the bytes of `udp` with these arguments, likewise."""
    return _from_port(_bytes_of(udp, **fields), port, UDP_CHECKSUM)


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
    """A function that runs a scenario in a namespace with one interface, eth0, in 192.0.2.0/24."""

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
    attach_kind: AttachKind = "auto",
    touched: Callable[[Collection[ServiceKey]], None] = lambda _: None,
    object_dir: Path = OBJECTS,
    clock: Callable[[], float] = time.monotonic,
    namespace_share: float = 1.0,
    interfaces: Sequence[str] = ("eth0",),
    entries: int = 1024,
) -> DirectDriver:
    """`entries`: of the tables of open connections and of UDP flows."""
    return DirectDriver(
        interfaces,
        attach_kind=attach_kind,
        pin_path=pin_path,
        priority=priority,
        sizes=Sizes(arena_bytes, connections=entries, datagrams=entries),
        requeue=touched,
        object_dir=object_dir,
        clock=clock,
        namespace_share=namespace_share,
    )


def load_balancer(
    *members: Member, address: str = "203.0.113.10"
) -> dict[ServiceKey, LoadBalancer]:
    listeners = (Listener("IPv4", 80, "TCP", "Local", 30080, members),)
    return {WEB: LoadBalancer(WEB, "uid-web", "fairlead.io/direct", (address,), listeners)}


async def reconcile(made: DirectDriver, intents: dict[ServiceKey, LoadBalancer]) -> list[str]:
    """Reconcile these intents, which must succeed, and return the changes."""
    changes = made.diff(made.render(intents), await made.read(None))
    assert await made.apply(changes) == {}
    return [str(change) for change in changes]


NODE1 = Member("node1", "192.0.2.21", 1)


@pytest.fixture(scope="module")
def own_loopback() -> Iterator[None]:
    """Run the tests of a module in a separate network namespace, so that no other test run and no
    gateway on this machine uses the addresses and ports of its loopback interface."""
    name = f"flt-{os.getpid()}-loopback"
    namespace.create(name)
    try:
        with namespace.inside(name):
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
    finally:
        namespace.delete(name)
