"""Blackhole routes: packets for an address without a matching listener end at the gateway. Other
packets, and routes of other programs, are not affected."""

import asyncio
import socket
import subprocess
import time

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.packet import Packet
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

from fairlead.drivers.direct import remove_pins
from fairlead.drivers.direct.driver import UNSERVED_TIMEOUT_S
from fairlead.drivers.direct.host_network.blackhole import BlackholeRoutes
from fairlead.model import Listener, LoadBalancer, Member, ServiceKey
from fairlead.net.blackhole import Blackholes, Rule

pytestmark = pytest.mark.root

VIP, VIP6, CLIENT, ROUTER_MAC = (
    "203.0.113.10",
    "2001:db8:f00::10",
    "198.51.100.7",
    "02:00:00:00:00:fe",
)
TABLE = 7471100
SILENCE_S = 0.3
THIS_HOST = Member("this", "192.0.2.10", 1)


def kernel() -> tuple[set[str], set[Rule]]:
    """Return the addresses with blackhole routes, and the rules, in the namespace of this
    thread."""
    found = Blackholes(TABLE, 171)
    try:
        return found.routes(), found.rules()
    finally:
        found.close()


def nft(text: str) -> None:
    subprocess.run(
        ["ip", "netns", "exec", NAME, "nft", "-f", "-"],
        input=text,
        text=True,
        check=True,
        timeout=20,
    )


def route_back() -> None:
    """Make the gateway a router with a default route to the router that sends it packets."""
    ip("neighbour", "replace", "192.0.2.1", "lladdr", ROUTER_MAC, "dev", "eth0")
    ip("route", "replace", "default", "via", "192.0.2.1")
    subprocess.run(
        ["ip", "netns", "exec", NAME, "sysctl", "-qw", "net.ipv4.ip_forward=1"],
        check=True,
        timeout=20,
    )


def mac_of(device: str) -> str:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as probe:
        probe.bind((device, 0))
        return str(bytes(probe.getsockname()[4]).hex(":"))


async def answers(port: int) -> list[Packet]:
    """Send a SYN to this port of the VIP, and return the TCP packets that leave eth0."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
        wire.bind(("eth0-end", 0))
        wire.setblocking(False)
        frame = (
            Ether(src=ROUTER_MAC, dst=mac_of("eth0"))
            / IP(src=CLIENT, dst=VIP)
            / TCP(sport=40000, dport=port, flags="S")
        )
        wire.send(bytes(frame))
        seen = []
        try:
            async with asyncio.timeout(SILENCE_S):
                while True:
                    data, address = await loop.sock_recvfrom(wire, 2048)
                    packet = Ether(data)
                    if address[2] != socket.PACKET_OUTGOING and IP in packet and TCP in packet:
                        seen.append(packet[IP])
        except TimeoutError:
            return seen


def test_routes_are_created_and_removed_with_listeners(run: Run) -> None:
    async def scenario() -> None:
        ip("address", "add", "2001:db8::10/64", "dev", "eth0", "nodad")
        made = driver()
        await made.open()
        second = {ServiceKey("default", "six"): six()}
        await reconcile(made, load_balancer(NODE1) | second)
        rules = {Rule(False, "eth0"), Rule(True, "eth0")}
        assert kernel() == ({VIP, VIP6}, rules)
        await reconcile(made, second)
        assert kernel() == ({VIP6}, rules)
        await made.close()
        assert kernel() == ({VIP6}, rules), "routes stay when the process ends"
        made = driver()
        await made.open()
        ip("-6", "route", "flush", "table", str(TABLE))
        ip("route", "add", "blackhole", "203.0.113.77", "table", str(TABLE))
        ip("-6", "rule", "delete", "table", str(TABLE))
        await made.read(None)
        assert kernel() == ({VIP6}, rules), "an audit restores routes and rules"
        await reconcile(made, load_balancer(NODE1) | second)
        await made.close()
        await remove_pins(PINS)
        assert kernel() == (set(), set())

    run(scenario)


def test_audits_and_changes_run_beside_each_other(run: Run) -> None:
    async def scenario() -> None:
        routes = BlackholeRoutes(lambda: ["eth0"], 100)
        served, coming = ({f"203.0.{third}.{last}" for last in range(250)} for third in (1, 2))
        await routes.add(served)
        for _ in range(5):
            await asyncio.gather(routes.sync(served), routes.add(coming))
            assert kernel()[0] == served | coming
            await asyncio.gather(routes.sync(served), routes.remove(coming))
            assert kernel()[0] == served
            await asyncio.gather(routes.add(coming), routes.sync(served))
            assert kernel()[0] == served | coming, (
                "routes of addresses that are about to have listeners stay"
            )
            await routes.remove(coming)
        assert not routes.missing(served)
        routes.close()

    run(scenario)


def six() -> LoadBalancer:
    listeners = (Listener("IPv6", 80, "TCP", "Local", 30080, (Member("node1", "2001:db8::1", 1),)),)
    return LoadBalancer(
        ServiceKey("default", "six"), "uid-six", "fairlead.io/direct", (VIP6,), listeners
    )


def test_a_foreign_route_to_the_address_stays_and_replaces_the_blackhole_route(run: Run) -> None:
    async def scenario() -> None:
        ip(
            "route",
            "add",
            f"{VIP}/32",
            "via",
            "192.0.2.77",
            "dev",
            "eth0",
            "proto",
            "bird",
            "metric",
            "20",
        )
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        assert kernel()[0] == set()
        ip("route", "delete", f"{VIP}/32")
        await made.read(None)
        assert kernel()[0] == {VIP}
        ip("address", "add", f"{VIP}/32", "dev", "lo")
        await made.read(None)
        assert kernel()[0] == set(), "the address is this host's own"
        await made.close(remove=True)

    run(scenario)


def test_rules_and_routes_that_another_program_removes_are_restored_without_an_audit(
    run: Run,
) -> None:
    """As systemd-networkd does when it is restarted. Without them packets for a port that no
    listener has go to and fro between gateway and router."""

    async def scenario() -> None:
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        before = kernel()
        assert all(before)
        task = asyncio.create_task(made.run())
        await asyncio.sleep(0.1)
        ip("route", "flush", "table", str(TABLE))
        ip("rule", "flush", "table", str(TABLE))
        assert not any(kernel())
        async with asyncio.timeout(30):
            while kernel() != before:
                await asyncio.sleep(0.1)
        task.cancel()
        await made.close(remove=True)

    run(scenario)


def test_packets_without_a_listener_do_not_return_to_the_router(run: Run) -> None:
    async def scenario() -> None:
        route_back()
        (back,) = await answers(443)
        assert (back.src, back.dst, back.ttl) == (CLIENT, VIP, 63), (
            "without a blackhole route the packet returns to the router"
        )
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        assert await answers(443) == []
        await made.close(remove=True)
        assert len(await answers(443)) == 1

    run(scenario)


def test_packets_for_a_listener_that_did_not_fit_do_not_return_to_the_router(run: Run) -> None:
    """The address has a route although it has no listener. The route is removed some time after the
    Service is."""
    ahead_s = 0.0

    async def scenario() -> None:
        nonlocal ahead_s
        route_back()
        made = driver(namespace_share=0.1, clock=lambda: time.monotonic() + ahead_s)
        await made.open()
        ports = tuple(
            Listener("IPv4", port, "TCP", "Local", 30080, (NODE1,)) for port in range(1, 41)
        )
        hog = LoadBalancer(
            ServiceKey("default", "hog"), "uid-hog", "fairlead.io/direct", ("203.0.113.99",), ports
        )
        refused = load_balancer(NODE1)
        for wanted in ({hog.service: hog}, refused, refused):
            outcome_of = await made.apply(made.diff(made.render(wanted), await made.read(wanted)))
        assert [each.missing for each in outcome_of.values()] == [(f"{VIP}:80/TCP",)]
        assert await answers(80) == []
        await made.read(None)
        assert kernel()[0] == {VIP, "203.0.113.99"}
        ahead_s = UNSERVED_TIMEOUT_S + 1
        await made.read(None)
        assert kernel()[0] == {"203.0.113.99"}
        await made.close(remove=True)

    run(scenario)


def test_on_a_node_the_service_proxy_answers_for_callers_outside_and_on_the_node_itself(
    run: Run,
) -> None:
    async def scenario() -> None:
        route_back()
        nat = "".join(
            (
                f"chain {hook} {{ type nat hook {hook} priority -100; ip daddr {VIP} tcp dport 80 "
                f"dnat to 192.0.2.10:8080; }}\n"
            )
            for hook in ("prerouting", "output")
        )
        nft(f"table ip proxy {{\n{nat}}}\n")
        server = await asyncio.start_server(lambda _, writer: writer.close(), "192.0.2.10", 8080)
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(THIS_HOST))
        assert kernel()[0] == {VIP}
        (reply, *_) = await answers(80)
        assert (reply.src, reply.dst, str(reply[TCP].flags)) == (VIP, CLIENT, "SA")
        reader, writer = await asyncio.open_connection(VIP, 80)
        assert await reader.read() == b""
        writer.close()
        server.close()
        await made.close(remove=True)

    run(scenario)
