"""The attachment of the programs: the choice between tc and XDP as a table, and each attachment
with real packets."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from tests.drivers.direct.conftest import (
    NAME,
    NODE1,
    PINS,
    Run,
    driver,
    ip,
    load_balancer,
    reconcile,
)
from tests.drivers.direct.gateway import Options
from tests.drivers.direct.site import (
    CLIENT,
    DEADLINE_S,
    NODES,
    SITE,
    VIP,
    Conversation,
    made_site,  # noqa: F401 - a fixture
    pods,
    request_by_udp,
    running_gateway,
)
from tests.drivers.inside import run_inside

from fairlead.config import AttachKind
from fairlead.drivers.direct.host_network.attach import accepted_frames, choose
from fairlead.drivers.direct.maps.pins import OBJECTS
from fairlead.errors import Refused
from fairlead.lab import namespace
from fairlead.net import bpffs, tc, xdp
from fairlead.net.bpf import Map, create_maps
from fairlead.net.elf import ProgramSpec, read_object
from fairlead.net.ethtool import Driver
from fairlead.net.program import PROGRAM_TYPE_SCHED_CLS, PROGRAM_TYPE_XDP, Program
from fairlead.net.routes import Interface

MAC = b"\2\0\0\0\0\1"
CARD = Interface(2, "eth0", MAC, 1500)
VETH = Interface(3, "eth1", MAC, 1500, "veth")
VLAN = Interface(4, "eth0.7", MAC, 1500, "vlan", 2, 7)
FAMILIES = (socket.AF_INET, socket.AF_INET6)
OTHER_END = bpffs.ROOT / f"{NAME}-other-end"


@pytest.mark.parametrize(
    ("wanted", "interface", "driver_of", "mode", "why"),
    [
        ("auto", CARD, Driver("ice", "0000:00:03.0"), "xdp", "it is a network card (ice)"),
        (
            "auto",
            CARD,
            Driver("virtio_net", "0000:00:03.0"),
            "tc",
            "its driver is virtio_net: XDP in it turns",
        ),
        ("auto", VETH, Driver("veth", ""), "tc", "virtual interface (veth)"),
        (
            "auto",
            VLAN,
            Driver("802.1Q VLAN Support", ""),
            "tc",
            "it is a VLAN of another interface",
        ),
        (
            "auto",
            Interface(5, "bond0", MAC, 1500, "bond"),
            Driver("bonding", ""),
            "tc",
            "virtual interface (bonding)",
        ),
        ("tc", CARD, Driver("ice", "0000:00:03.0"), "tc", "requested by gateway.attach"),
        ("xdp-generic", VETH, Driver("veth", ""), "xdp-generic", "requested by gateway.attach"),
        ("xdp", VETH, Driver("veth", ""), "xdp", "unless the other end has an XDP program"),
        ("xdp", CARD, Driver("ice", "0000:00:03.0"), "xdp", "requested by gateway.attach"),
    ],
)
def test_the_attachment_follows_from_configuration_and_driver(
    wanted: AttachKind, interface: Interface, driver_of: Driver, mode: str, why: str
) -> None:
    choice = choose(wanted, interface, driver_of)
    assert choice.mode == mode
    assert why in choice.why


def test_tags_name_the_frames_that_xdp_handles() -> None:
    other = VLAN._replace(number=5, parent=9, vlan=8)
    assert accepted_frames([CARD, VETH, VLAN, other], {CARD.number}) == {(2, 0): MAC, (2, 7): MAC}
    assert accepted_frames([CARD, VETH, VLAN, other], set()) == {}


@pytest.mark.root
@pytest.mark.parametrize("following", [False, True], ids=["audit", "event"])
def test_a_changed_mac_address_of_an_interface_is_followed(run: Run, following: bool) -> None:
    """From then on the XDP program accepts frames for the new address."""

    def taken() -> set[bytes]:
        (layout,) = PINS.glob("layout-*")
        with Map.open(layout / "tags") as tags:
            return {address[:6] for _, address in tags.items()}

    async def scenario() -> None:
        made = driver(attach_kind="xdp-generic")
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        follow = asyncio.create_task(made.run()) if following else None
        ip("link", "set", "eth0", "address", "02:00:00:00:07:07")
        if follow is None:
            await made.read(None)
        while taken() != {b"\2\0\0\0\7\7"}:
            assert follow
            await asyncio.sleep(0.01)
        if follow is not None:
            follow.cancel()
        await made.close(remove=True)

    run(scenario)


def in_site(host: str, *words: str) -> str:
    command = ["ip", "netns", "exec", SITE + host, *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout


def prepare_other_end() -> None:
    """Prepare the other end of the veth, as the warning about XDP in the driver of a veth demands:
    checksum offload off, and an XDP program, which passes everything because it has no
    listeners."""
    in_site("router", "ethtool", "-K", "gateway", "tx", "off")
    object_file = read_object(OBJECTS / "direct_xdp.o")

    async def attach_one() -> None:
        maps = create_maps(list(object_file.maps.values()))
        with Program.load(
            object_file.programs["direct"], maps, program_type=PROGRAM_TYPE_XDP
        ) as program:
            await xdp.attach(socket.if_nametoindex("gateway"), program, OTHER_END, mode=xdp.NATIVE)

    run_inside(SITE + "router", attach_one)


@pytest.fixture(autouse=True)
def _without_pins() -> Iterator[None]:
    yield
    bpffs.remove(OTHER_END)


@pytest.mark.root
@pytest.mark.parametrize("attach", ["tc", "xdp-generic", "xdp"])
async def test_each_attachment_forwards_packets(site: None, attach: AttachKind) -> None:
    if attach == "xdp":
        prepare_other_end()
    async with pods(), running_gateway(Options(attach)) as gateway:
        answer = await gateway.serve({"node1": 3, "node2": 1, "node3": 1})
        ((name, mode, why, problem),) = answer["interfaces"]
        assert (name, mode, problem) == ("eth0", attach, "")
        assert "requested by gateway.attach" in why
        for _ in range(2):
            for family in FAMILIES:
                tcp = [await (await Conversation.start(family)).ask() for _ in range(40)]
                udp = [await request_by_udp(family) for _ in range(40)]
                assert {peer for _, peer in tcp + udp} == {CLIENT[family]}
                assert Counter(node for node, _ in tcp + udp).keys() == set(NODES)
            if attach == "tc":
                break
            # Without the tc program only XDP forwards. A packet that XDP passed would end in a
            # blackhole route, and its connection would fail. The gateway would attach it again.
            gateway.process.send_signal(signal.SIGSTOP)
            in_site("gateway", "tc", "filter", "del", "dev", "eth0", "ingress")
        gateway.process.send_signal(signal.SIGCONT)
        await gateway.send("remove")


@pytest.mark.root
@pytest.mark.parametrize("attach", ["tc", "xdp-generic"])
async def test_a_frame_with_a_priority_tag_is_forwarded(site: None, attach: AttachKind) -> None:
    """VLAN 0 carries a priority and names no VLAN (802.1Q). Some network cards and switches tag
    every frame with it."""
    loop = asyncio.get_running_loop()
    async with pods(), running_gateway(Options(attach)) as gateway:
        await gateway.serve({"node1": 1})
        mac = in_site("gateway", "cat", "/sys/class/net/eth0/address").strip()
        with namespace.inside(SITE + "router"):
            wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            wire.bind(("gateway", 0))
        for family in FAMILIES:
            kind = IPv6 if family == socket.AF_INET6 else IP
            head = kind(src=CLIENT[family], dst=VIP[family])
            frame = (
                Ether(dst=mac, src="02:00:00:00:00:99")
                / Dot1Q(vlan=0, prio=5)
                / head
                / UDP(sport=40000, dport=80)
                / b"who"
            )
            with namespace.make_socket(SITE + "client", family, socket.SOCK_DGRAM) as client:
                client.setblocking(False)
                client.bind(("", 40000))
                wire.send(bytes(frame))
                answer = await asyncio.wait_for(loop.sock_recv(client, 100), DEADLINE_S)
            assert answer.decode().split() == ["node1", CLIENT[family]]
        wire.close()
        await gateway.send("remove")


@pytest.mark.root
async def test_a_node_with_another_hardware_address_is_followed_while_xdp_forwards(
    site: None,
) -> None:
    """Only events of the kernel tell the gateway: the XDP program does not look up neighbours, and
    the tc program gets no TCP."""
    async with pods(), running_gateway(Options("xdp-generic")) as gateway:
        await gateway.serve({"node1": 1})
        talks = [await Conversation.start(family) for family in FAMILIES]
        assert [(await talk.ask())[0] for talk in talks] == ["node1", "node1"]
        run_inside(SITE + "gateway", drop_tcp)
        in_site("node1", "ip", "link", "set", "eth0", "address", "02:00:00:00:77:01")
        for family in FAMILIES:  # a node that returns with another network card announces itself
            announce("node1", family)
        assert [(await asyncio.wait_for(talk.ask(), DEADLINE_S))[0] for talk in talks] == [
            "node1",
            "node1",
        ]
        await gateway.send("remove")


async def drop_tcp() -> None:
    """Drop every TCP segment before the tc program of the gateway gets it."""
    # r6 = r1; r0 = the EtherType; for IPv4 r0 = its protocol, else r0 = the next header of IPv6
    code = (
        (0xBF, 0x16, 0, 0),
        (0x28, 0, 0, 12),
        (0x15, 0, 2, 0x0800),
        (0x30, 0, 0, 20),
        (0x05, 0, 1, 0),
        (0x30, 0, 0, 23),
        (0x15, 0, 2, 6),
        (0xB7, 0, 0, -1),  # TC_ACT_UNSPEC
        (0x95, 0, 0, 0),
        (0xB7, 0, 0, 2),  # TC_ACT_SHOT
        (0x95, 0, 0, 0),
    )
    spec = ProgramSpec("drop", "tc", b"".join(struct.pack("<BBhi", *each) for each in code), ())
    with Program.load(spec, {}, program_type=PROGRAM_TYPE_SCHED_CLS) as program:
        await tc.attach(socket.if_nametoindex("eth0"), program.descriptor, name="drop", priority=1)


def announce(node: str, family: int) -> None:
    """Have the gateway learn the MAC address of the node: the node resolves the address of the
    gateway, to send it a datagram."""
    in_site(node, "ip", "neigh", "flush", "dev", "eth0")
    with namespace.make_socket(SITE + node, family, socket.SOCK_DGRAM) as made:
        made.sendto(b"", ("192.0.2.10" if family == socket.AF_INET else "2001:db8::10", 9))


@pytest.mark.root
def test_programs_of_other_owners_are_unchanged(run: Run) -> None:
    async def scenario() -> None:
        index = socket.if_nametoindex("eth0")
        foreign = create_maps(list(read_object(OBJECTS / "direct_xdp.o").maps.values()))
        for name, kind in (
            ("direct_tc.o", PROGRAM_TYPE_SCHED_CLS),
            ("direct_xdp.o", PROGRAM_TYPE_XDP),
        ):
            read = read_object(OBJECTS / name)
            with Program.load(read.programs["direct"], foreign, program_type=kind) as program:
                if kind == PROGRAM_TYPE_SCHED_CLS:
                    await tc.attach(index, program.descriptor, name="foreign", priority=7)
                else:
                    await xdp.attach(
                        index, program, PINS.with_name(f"{NAME}-foreign"), mode=xdp.GENERIC
                    )
        before = await xdp.attached(index), await tc.filters("foreign")
        assert before[0]
        try:
            for wanted in ("xdp", "xdp-generic"):
                made = driver(attach_kind=wanted)
                with pytest.raises(
                    Refused, match=r"XDP program direct \(id \d+, generic\) is already attached"
                ):
                    await made.open()
            made = driver()
            await made.open()
            await reconcile(made, load_balancer(NODE1))
            await made.close(remove=True)
            assert (await xdp.attached(index), await tc.filters("foreign")) == before
        finally:
            xdp.detach(PINS.with_name(f"{NAME}-foreign"))

    run(scenario)


@pytest.mark.root
def test_xdp_is_detached_when_it_is_no_longer_configured(run: Run) -> None:
    async def scenario() -> None:
        made = driver(attach_kind="xdp-generic")
        await made.open()
        index = socket.if_nametoindex("eth0")
        attached = await xdp.attached(index)
        assert attached
        assert attached.mode == xdp.GENERIC
        await made.close()
        assert await xdp.attached(index) == attached
        made = driver(attach_kind="tc")
        await made.open()
        assert await xdp.attached(index) is None
        assert [each for each in os.listdir(PINS) if each.startswith("xdp")] == []
        await made.close(remove=True)

    run(scenario)


@pytest.mark.root
def test_a_recreated_interface_gets_its_programs_by_event(run: Run) -> None:
    async def scenario() -> None:
        made = driver(attach_kind="xdp-generic")
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        following = asyncio.create_task(made.run())
        ip("link", "delete", "eth0")
        ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0-end")
        ip("address", "add", "192.0.2.10/24", "dev", "eth0")
        ip("link", "set", "eth0", "up")
        index = socket.if_nametoindex("eth0")
        while not (await xdp.attached(index) and await tc.filters(f"fairlead:{PINS}", [index])):
            await asyncio.sleep(0.01)
        following.cancel()
        await made.close(remove=True)
        assert await xdp.attached(index) is None

    run(scenario)
