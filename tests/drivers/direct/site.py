"""A network of namespaces, for tests that send real packets through a real gateway process.

client 198.51.100.7 -- router -- fabric 192.0.2.0/24 -- gateway .10, nodes .21 to .23

Each node translates (DNAT) the VIP to its pod. The router sends packets for the VIP to the gateway,
and nodes send replies to the router directly. The kernel of the gateway forwards no packets
(ip_forward is 0, rp_filter is strict), so only the eBPF program can forward them. IPv6 is set up in
the same way."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.drivers.direct.gateway import Options

from fairlead.drivers.direct import remove_pins
from fairlead.lab import namespace
from fairlead.model import Family, Listener, LoadBalancer, Member, MemberState, Protocol, ServiceKey
from fairlead.net import bpffs

SITE = f"flt-{os.getpid()}-"
VIP: dict[int, str] = {socket.AF_INET: "203.0.113.10", socket.AF_INET6: "2001:db8:f00::10"}
CLIENT: dict[int, str] = {socket.AF_INET: "198.51.100.7", socket.AF_INET6: "2001:db8:c::7"}
NODES = ("node1", "node2", "node3")
PINS = bpffs.ROOT / f"flt-{os.getpid()}"
GATEWAY = Path(__file__).with_name("gateway.py")
DEADLINE_S = 60
DEFAULTS = Options()


def node_address(node: str, family: int) -> str:
    number = 20 + int(node[-1])
    return f"192.0.2.{number}" if family == socket.AF_INET else f"2001:db8::{number}"


def pod_address(node: str, family: int) -> str:
    return f"10.92.{node[-1]}.2" if family == socket.AF_INET else f"fd92::{node[-1]}:2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=DEADLINE_S)


def connect(host: str, addresses: tuple[str, ...], port: str, *, to_fabric: bool) -> None:
    """Connect the host to the router by a veth: to the bridge (`to_fabric`), or by a link of its
    own."""
    ip(
        "link",
        "add",
        port,
        "netns",
        SITE + "router",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        SITE + host,
    )
    for address in addresses:
        ip(
            "-n",
            SITE + host,
            "address",
            "add",
            address,
            "dev",
            "eth0",
            *(["nodad"] if ":" in address else []),
        )
    ip("-n", SITE + host, "link", "set", "eth0", "up")
    ip("-n", SITE + host, "link", "set", "lo", "up")
    if to_fabric:
        ip("-n", SITE + "router", "link", "set", port, "master", "fabric")
    ip("-n", SITE + "router", "link", "set", port, "up")


def build_router() -> None:
    ip("-n", SITE + "router", "link", "add", "fabric", "type", "bridge", "mcast_snooping", "0")
    ip("-n", SITE + "router", "link", "set", "fabric", "up")
    connect("client", ("198.51.100.7/24", "2001:db8:c::7/64"), "client", to_fabric=False)
    for device, address in (
        ("fabric", "192.0.2.254/24"),
        ("fabric", "2001:db8::254/64"),
        ("client", "198.51.100.1/24"),
        ("client", "2001:db8:c::1/64"),
    ):
        ip(
            "-n",
            SITE + "router",
            "address",
            "add",
            address,
            "dev",
            device,
            *(["nodad"] if ":" in address else []),
        )
    namespace.set_sysctls(
        SITE + "router", {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1}
    )
    ip("-n", SITE + "client", "route", "add", "default", "via", "198.51.100.1")
    ip("-n", SITE + "client", "-6", "route", "add", "default", "via", "2001:db8:c::1")


def build_node(node: str) -> None:
    connect(
        node,
        tuple(
            f"{node_address(node, f)}/{m}" for f, m in ((socket.AF_INET, 24), (socket.AF_INET6, 64))
        ),
        node,
        to_fabric=True,
    )
    ip("-n", SITE + node, "route", "add", "default", "via", "192.0.2.254")
    ip("-n", SITE + node, "-6", "route", "add", "default", "via", "2001:db8::254")
    for family, length in ((socket.AF_INET, 32), (socket.AF_INET6, 128)):
        address = f"{pod_address(node, family)}/{length}"
        ip(
            "-n",
            SITE + node,
            "address",
            "add",
            address,
            "dev",
            "lo",
            *(["nodad"] if length == 128 else []),
        )
    rules = "\n".join(
        f"{head} daddr {VIP[family]} {protocol} dport 80 dnat {head} to {host}:8080"
        for family, head, host in (
            (socket.AF_INET, "ip", pod_address(node, socket.AF_INET)),
            (socket.AF_INET6, "ip6", f"[{pod_address(node, socket.AF_INET6)}]"),
        )
        for protocol in ("tcp", "udp")
    )
    text = (
        f"table inet flt {{\n chain pre {{ type nat hook prerouting priority "
        f"dstnat;\n{rules}\n }}\n}}\n"
    )
    subprocess.run(
        ["ip", "netns", "exec", SITE + node, "nft", "-f", "-"],
        input=text,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture(name="site")
def made_site() -> Iterator[None]:
    hosts = ("router", "client", "gateway", *NODES)
    try:
        for host in hosts:
            namespace.create(SITE + host)
        build_router()
        connect("gateway", ("192.0.2.10/24", "2001:db8::10/64"), "gateway", to_fabric=True)
        strict = {"net/ipv4/conf/all/rp_filter": 1, "net/ipv4/conf/eth0/rp_filter": 1}
        namespace.set_sysctls(SITE + "gateway", strict)
        for node in NODES:
            build_node(node)
        ip("-n", SITE + "router", "route", "add", VIP[socket.AF_INET], "via", "192.0.2.10")
        ip("-n", SITE + "router", "-6", "route", "add", VIP[socket.AF_INET6], "via", "2001:db8::10")
        yield
    finally:
        for host in hosts:
            namespace.delete(SITE + host)
        if PINS.exists():
            asyncio.run(remove_pins(PINS))


class Gateway:
    """A running gateway process; see gateway.py."""

    def __init__(self, options: Options) -> None:
        given = msgspec.json.encode(options).decode()
        command = [sys.executable, str(GATEWAY), SITE + "gateway", str(PINS), given]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def send(self, line: str) -> Any:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return msgspec.json.decode(await self.answer())

    async def answer(self) -> str:
        assert self.process.stdout
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), DEADLINE_S)
        assert line, "the gateway ended"
        return line

    async def serve(
        self, weights: dict[str, int], states: dict[str, MemberState] | None = None
    ) -> Any:
        """Apply a load balancer with TCP and UDP on port 80 of both addresses. Return the answer of
        the process."""
        return await self.send(msgspec.json.encode(load_balancer(weights, states or {})).decode())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@asynccontextmanager
async def running_gateway(options: Options = DEFAULTS) -> AsyncIterator[Gateway]:
    gateway = Gateway(options)
    try:
        assert await gateway.answer() == "open\n"
        yield gateway
    finally:
        for pipe in (gateway.process.stdin, gateway.process.stdout):
            if pipe and gateway.process.poll() is not None:
                pipe.close()
        if gateway.process.poll() is None:
            gateway.kill()


FAMILY: dict[socket.AddressFamily, Family] = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}


def load_balancer(weights: dict[str, int], states: dict[str, MemberState]) -> LoadBalancer:
    protocols: tuple[Protocol, ...] = ("TCP", "UDP")
    listeners = tuple(
        Listener(
            FAMILY[family],
            80,
            protocol,
            "Local",
            30080,
            tuple(
                Member(n, node_address(n, family), w, states.get(n, "active"))
                for n, w in sorted(weights.items())
            ),
        )
        for family in (socket.AF_INET, socket.AF_INET6)
        for protocol in protocols
    )
    return LoadBalancer(
        ServiceKey("default", "web"),
        "uid-web",
        "fairlead.io/direct",
        tuple(VIP.values()),
        listeners,
    )


def shown_filters() -> str:
    """Return what tc(8) shows at the ingress of the gateway's interface."""
    command = ["tc", "-n", SITE + "gateway", "filter", "show", "dev", "eth0", "ingress"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=DEADLINE_S
    ).stdout


class Datagrams(asyncio.DatagramProtocol):
    """A UDP server that answers each datagram with the node's name and the sender's address."""

    def __init__(self, node: str) -> None:
        self.node = node

    def connection_made(
        self,
        transport: asyncio.DatagramTransport,  # type: ignore[override]
    ) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self.transport.sendto(f"{self.node} {addr[0]}".encode(), addr)


@asynccontextmanager
async def pods() -> AsyncIterator[None]:
    """Run TCP and UDP servers on each node, for each address family. They answer with the node's
    name and the peer's address."""

    async def answer(node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readline():
                writer.write(f"{node} {writer.get_extra_info('peername')[0]}\n".encode())
        finally:
            writer.close()  # also after a caller has disappeared without closing the connection

    async with AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        for node in NODES:
            for family in VIP:
                stream = namespace.make_socket(SITE + node, family)
                stream.bind((pod_address(node, family), 8080))
                server = await asyncio.start_server(partial(answer, node), sock=stream)
                stack.callback(server.close)
                datagram = namespace.make_socket(SITE + node, family, socket.SOCK_DGRAM)
                datagram.bind((pod_address(node, family), 8080))
                transport, _ = await loop.create_datagram_endpoint(
                    partial(Datagrams, node), sock=datagram
                )
                stack.callback(transport.close)
        yield


class Conversation:
    """A TCP connection from the client to the VIP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def start(cls, family: int) -> "Conversation":
        made = namespace.make_socket(SITE + "client", family)
        made.setblocking(False)
        await asyncio.wait_for(
            asyncio.get_running_loop().sock_connect(made, (VIP[family], 80)), DEADLINE_S
        )
        return cls(*await asyncio.open_connection(sock=made))

    async def ask(self) -> tuple[str, str]:
        """Return the node that answers, and the client address that its pod sees."""
        self.writer.write(b"who\n")
        node, peer = (await asyncio.wait_for(self.reader.readline(), DEADLINE_S)).decode().split()
        return node, peer


async def request_by_udp(family: int) -> tuple[str, str]:
    loop = asyncio.get_running_loop()
    with namespace.make_socket(SITE + "client", family, socket.SOCK_DGRAM) as made:
        made.setblocking(False)
        await loop.sock_connect(made, (VIP[family], 80))
        await loop.sock_sendall(made, b"who")
        node, peer = (
            (await asyncio.wait_for(loop.sock_recv(made, 100), DEADLINE_S)).decode().split()
        )
    return node, peer
