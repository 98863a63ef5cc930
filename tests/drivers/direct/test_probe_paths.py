"""The gateway's own packets that are sent through a tunnel: packets of marked sockets to nodes
behind a tunnel."""

import asyncio
import socket
import struct
import subprocess
from collections.abc import Mapping

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet
from tests.drivers.direct.conftest import DEADLINE_S, NAME, PINS, Run, add_cable, ip, to_us

from fairlead.config import TunnelKind
from fairlead.drivers.direct import ProbePaths, Rules, remove_pins
from fairlead.drivers.direct.host_network.probe_paths import filter_name
from fairlead.net import tc
from fairlead.net.httpprobe import PROBE_MARK

pytestmark = pytest.mark.root

FAR4, NEAR4, OWN4 = "198.18.0.22", "192.0.2.21", "192.0.2.10"
FAR6, NEAR6, OWN6 = "2001:db8:3::16", "2001:db8:1::15", "2001:db8:1::a"
REDIRECT, UNTOUCHED = 7, 0xFFFFFFFF


def made(kind: TunnelKind, reported: dict[str, str]) -> ProbePaths:
    def report(tunnels: Mapping[str, str]) -> None:
        reported.clear()
        reported.update(tunnels)

    return ProbePaths(
        Rules(tunnel=kind, gateways=("192.0.2.0/24", "2001:db8:1::/64")), PINS, report
    )


def prepare() -> None:
    ip("address", "add", f"{OWN6}/64", "dev", "eth0", "nodad")
    ip("route", "add", "198.18.0.0/24", "via", "192.0.2.1")
    ip("route", "add", "2001:db8:3::/64", "via", "2001:db8:1::1")


def sent(probe_paths: ProbePaths, packet: Packet, mark: int) -> tuple[int, bytes]:
    """Send a packet from a socket with this mark, and return the verdict and the packet after the
    program. `mark` is the third word of __sk_buff."""
    assert probe_paths.program
    trial = probe_paths.program.test_run(
        bytes(to_us() / packet), context=struct.pack("=3I", 0, 0, mark)
    )
    return trial.verdict, trial.packet


@pytest.mark.parametrize("kind", ["ipip", "vxlan"])
@pytest.mark.parametrize(
    ("far", "near", "own"), [(FAR4, NEAR4, OWN4), (FAR6, NEAR6, OWN6)], ids=["ipv4", "ipv6"]
)
def test_probes_of_far_nodes_are_encapsulated(
    run: Run, kind: TunnelKind, far: str, near: str, own: str
) -> None:
    family = IPv6 if ":" in far else IP

    async def scenario() -> None:
        prepare()
        reported: dict[str, str] = {}
        probe_paths = made(kind, reported)
        await probe_paths.open()
        await probe_paths.add([far, near, own])
        assert reported == {far: kind}
        question = family(src=own, dst=far) / TCP(sport=40000, dport=10256, flags="S")
        # Bits of other programs do not matter, such as the bit of kube-proxy for masquerading.
        for mark in (PROBE_MARK, PROBE_MARK | 0x4000, PROBE_MARK | 0xABCD0000):
            verdict, packet = sent(probe_paths, question, mark)
            assert verdict == REDIRECT
            outer = family(packet[14:])
            assert (outer.src, outer.dst) == (own, far)
            inside = (
                outer.payload
                if kind == "ipip"
                else VXLAN(bytes(outer.payload.payload)).payload.payload
            )
            assert bytes(inside)[: len(question)] == bytes(question)
        for mark in (0, 0x4000, 0x8000, PROBE_MARK & ~0x1000, PROBE_MARK | 0x2000):
            assert sent(probe_paths, question, mark) == (UNTOUCHED, bytes(to_us() / question))
        on_link = family(src=own, dst=near) / TCP(sport=40000, dport=10256, flags="S")
        assert sent(probe_paths, on_link, PROBE_MARK) == (UNTOUCHED, bytes(to_us() / on_link))
        await probe_paths.close()
        await remove_pins(PINS)

    run(scenario)


def test_the_program_follows_the_routes_and_is_removed_by_a_cleanup(run: Run) -> None:
    async def scenario() -> None:
        prepare()
        add_cable("eth1", "192.0.2.129/25")
        reported: dict[str, str] = {}
        probe_paths, name = made("ipip", reported), filter_name(PINS)
        await probe_paths.open()
        await probe_paths.add([FAR4])

        async def until_at(*interfaces: str) -> None:
            while [each.interface for each in await tc.filters(name, egress=True)] != list(
                map(socket.if_nametoindex, interfaces)
            ):
                await asyncio.sleep(0.01)

        await until_at("eth0")
        following = asyncio.create_task(probe_paths.run())
        ip("route", "replace", "198.18.0.0/24", "via", "192.0.2.130")
        await until_at("eth1")
        ip("route", "del", "198.18.0.0/24")
        await until_at()
        assert reported == {}
        ip("route", "add", "198.18.0.0/24", "via", "192.0.2.1")
        await until_at("eth0")
        assert reported == {FAR4: "ipip"}
        # Another process removes the program, and the kernel reports only that.
        qdisc = ["tc", "-n", NAME, "qdisc", "del", "dev", "eth0", "clsact"]
        await asyncio.to_thread(subprocess.run, qdisc, check=True, timeout=DEADLINE_S)
        await until_at("eth0")
        following.cancel()
        await probe_paths.close()  # as when the process ends: the program stays
        await until_at("eth0")
        (left,) = await tc.filters(name, egress=True)
        assert await remove_pins(PINS) == [f"probe program at interface {left.interface}"]
        await until_at()

    run(scenario)


def test_a_start_without_a_tunnel_removes_the_program_of_a_start_with_a_tunnel(run: Run) -> None:
    async def scenario() -> None:
        prepare()
        before = made("ipip", {})
        await before.open()
        await before.add([FAR4])
        await before.close()
        after = made("none", {})
        await after.open()
        assert not after.needed
        assert await tc.filters(filter_name(PINS), egress=True) == ()
        await after.close()

    run(scenario)
