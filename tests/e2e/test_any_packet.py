"""Unusual packets: fragments, packets that exceed the path MTU, packets with options, packets with
a low hop limit, pings, SCTP; packets to a Service that nodes do not serve, and to a Service without
endpoints.

There is a lab for each tunnel type. Two of its four nodes share a link with the gateways and get
packets without a tunnel; the other two get them through the tunnel. The router distributes packets
over two gateways by ports and addresses, but fragments by addresses only, because only the first
fragment has ports. Each test sends to all four nodes, over both families. (test_tunnels.py tests
the sizes of segments and datagrams.)"""

import asyncio
import errno
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio
from scapy.layers.inet import IP
from scapy.layers.sctp import SCTP, SCTPChunkInit, SCTPChunkInitAck
from tests.e2e.crowd import Shop
from tests.e2e.load import CLIENT, DEADLINE_S, NAME, addresses_of, drops, fetch, output, until
from tests.e2e.scenes import PROXY_NAME_LABEL
from tests.e2e.test_shares import SOURCES

from fairlead.drivers.direct.maps.records import HOPS_LEFT
from fairlead.lab import namespace
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

TRANSPORTS = (
    Transport(tunnel="ipip", attach="tc"),
    Transport(tunnel="vxlan", attach="xdp-generic"),
)
FLOWS, ROUNDS = 24, 40
"""The number of concurrent flows. In four cases of a thousand they do not reach one of the four
nodes. Then another round follows after a second, up to ROUNDS rounds: on a busy machine, a node
that missed probes may first have to answer them for a while."""
TRIES = 10
BRANCH_MTU = 1300
SCTP_PORT = 7000
CURL_REFUSED = 7


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=TRANSPORTS, ids=[each.tunnel for each in TRANSPORTS]
)
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    lab = Site.create(
        f"any{os.getpid()}", nodes=2, far_nodes=2, gateways=2, clients=1, transport=request.param
    )
    async with lab as site:
        shop = Shop(site)
        places = [host.name for host in site.topology.of("node")]
        await shop.start(places)
        await shop.create()
        await shop.await_weights(places)
        yield shop


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def clean_route_cache(shop: Shop) -> None:
    """Delete the path MTUs that the client's kernel has learnt."""
    for family in ("-4", "-6"):
        await output(shop.site, CLIENT, "ip", family, "route", "flush", "cache")


Answer = dict[str, Any]


class UdpFlow:
    """A UDP flow of the client to one of the VIPs."""

    def __init__(self, shop: Shop, address: str) -> None:
        self.six = ":" in address
        self.socket = shop.site.socket(
            CLIENT, socket.AF_INET6 if self.six else socket.AF_INET, socket.SOCK_DGRAM
        )
        self.socket.setblocking(False)
        self.socket.connect((address, 53))

    def set(self, four: int, six: int, value: int | bytes) -> None:
        """Set the socket option of the address's family to a value."""
        self.socket.setsockopt(
            *((socket.IPPROTO_IPV6, six) if self.six else (socket.IPPROTO_IP, four)), value
        )

    async def request(self, data: bytes, *, tries: int = 1) -> Answer | None:
        """Return the answer, or None if there is none within a second. More than one try lets the
        sender learn a smaller path MTU first."""
        loop = asyncio.get_running_loop()
        for _ in range(tries):
            try:
                await loop.sock_sendall(self.socket, data)
                async with asyncio.timeout(1.0):
                    answer: Answer = json.loads(await loop.sock_recv(self.socket, 65535))
                    return answer
            except (TimeoutError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in (None, errno.EMSGSIZE):
                    raise
        return None


async def at_every_node(shop: Shop, each: Callable[[str], Awaitable[str]]) -> None:
    """Call the function with flows to each VIP until the pods of all nodes have answered. The
    function returns the pod that answered."""
    pods = set(await shop.pods())
    for address in shop.addresses:
        reached: set[str] = set()
        for _ in range(ROUNDS):
            reached.update(await asyncio.gather(*(each(address) for _ in range(FLOWS))))
            if reached >= pods:
                break
            await asyncio.sleep(1.0)
        assert reached == pods, address


@pytest.mark.parametrize("size", [3_000, 60_000])
async def test_all_fragments_of_a_datagram_reach_one_node(shop: Shop, size: int) -> None:
    """All flows send at the same time, so that fragments of many datagrams arrive interleaved."""

    async def each(address: str) -> str:
        flow = UdpFlow(shop, address)
        reached = set()
        for turn in range(3):
            # The first datagram for a node behind the tunnel is answered by an ICMP error with the
            # smaller MTU.
            answer = await flow.request(bytes([65 + turn]) * size, tries=TRIES)
            assert answer, f"no answer to {size} bytes from {address}"
            assert answer["length"] == size
            reached.add(answer["pod"])
        (pod,) = reached
        return str(pod)

    await at_every_node(shop, each)


async def test_a_smaller_path_mtu_to_the_client_is_reported_to_the_pod(shop: Shop) -> None:
    """The router sends its "packet too big" error to the VIP, because the pod's packets come from
    the VIP. The gateway forwards the error to the node of the connection."""
    client = shop.site.topology.host(CLIENT)
    for family, address in zip(("-4", "-6"), client.addresses, strict=True):
        whole = f"{address}/{128 if family == '-6' else 32}"
        await output(
            shop.site,
            ROUTER,
            "ip",
            family,
            "route",
            "add",
            whole,
            "dev",
            "wan",
            "mtu",
            "lock",
            str(BRANCH_MTU),
        )
    path = b"x" * 60_000

    async def each(address: str) -> str:
        reader, writer = await shop.site.connect(CLIENT, address, 80)
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET /" + path + b" HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200")
        answer: Answer = json.loads(body)
        assert len(answer["path"]) == len(path) + 1
        return str(answer["pod"])

    try:
        await at_every_node(shop, each)
    finally:
        for family, address in zip(("-4", "-6"), client.addresses, strict=True):
            whole = f"{address}/{128 if family == '-6' else 32}"
            await output(shop.site, ROUTER, "ip", family, "route", "del", whole, "dev", "wan")


async def test_packets_with_ip_options_and_extension_headers_are_answered(shop: Shop) -> None:
    async def each(address: str) -> str:
        flow = UdpFlow(shop, address)
        flow.set(
            socket.IP_OPTIONS, socket.IPV6_HOPOPTS, b"\0\0\1\4\0\0\0\0" if flow.six else b"\1\1\1\0"
        )
        if flow.six:
            flow.set(0, socket.IPV6_DSTOPTS, b"\0\0\1\4\0\0\0\0")
        answer = await flow.request(b"who?")
        assert answer, f"no answer from {address} to a packet with options"
        return str(answer["pod"])

    await at_every_node(shop, each)


async def test_packets_with_too_few_hops_are_dropped_and_counted(shop: Shop) -> None:
    """The router decrements the hop limit. A packet that reaches the gateway without a hop left is
    dropped there and counted; so is a packet whose hop limit is as low as after a gateway."""
    site = shop.site

    async def dropped(reason: str) -> int:
        return sum([(await drops(site, gateway))[reason] for gateway in shop.gateways])

    before = {reason: await dropped(reason) for reason in ("hop_limit", "returned")}
    for address in shop.addresses:
        flow = UdpFlow(shop, address)
        for hops in (2, 1 + HOPS_LEFT):
            flow.set(socket.IP_TTL, socket.IPV6_UNICAST_HOPS, hops)
            assert await flow.request(b"who?") is None
        flow.set(socket.IP_TTL, socket.IPV6_UNICAST_HOPS, 2 + HOPS_LEFT)
        assert await flow.request(b"who?") is not None

    async def counted() -> bool:
        return {reason: await dropped(reason) for reason in before} == {
            reason: count + 2 for reason, count in before.items()
        }

    await until(counted, "two drops for each of the two reasons")


async def test_load_balancer_addresses_answer_pings(shop: Shop) -> None:
    loop = asyncio.get_running_loop()
    for address in shop.addresses:
        six = ":" in address
        family, protocol = (
            (socket.AF_INET6, socket.IPPROTO_ICMPV6)
            if six
            else (socket.AF_INET, socket.IPPROTO_ICMP)
        )
        with namespace.make_socket(
            shop.site.namespace(CLIENT), family, socket.SOCK_RAW, protocol
        ) as sock:
            sock.setblocking(False)
            sock.connect((address, 0))
            body = struct.pack("!HH", 7, 1) + bytes(range(40))
            echo, reply = (128, 129) if six else (8, 0)
            # The kernel computes the checksum for ICMPv6, but not for ICMP.
            checksum = 0 if six else ~_folded(struct.pack("!BBH", echo, 0, 0) + body) & 0xFFFF
            await loop.sock_sendall(sock, struct.pack("!BBH", echo, 0, checksum) + body)
            async with asyncio.timeout(DEADLINE_S):
                while (found := (await loop.sock_recv(sock, 2048))[0 if six else 20 :])[0] != reply:
                    pass
            assert found[4:] == body


def _folded(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(total)


async def test_packets_for_an_unused_port_do_not_loop(shop: Shop) -> None:
    """No Service has this port of the VIP: the gateway's blackhole route drops the packet, and the
    router sees it once."""
    rule = "meta l4proto udp th dport 9 counter name met"
    await output(
        shop.site,
        ROUTER,
        "nft",
        f"table inet circles {{ counter met {{}}; chain through {{ type filter hook forward "
        f"priority 0; {rule}; }}; }}",
    )
    for address in shop.addresses:
        with shop.site.socket(
            CLIENT, socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
        ) as sock:
            for _ in range(50):
                sock.sendto(b"request", (address, 9))
    await asyncio.sleep(0.5)  # a looping packet returns within microseconds
    listed = json.loads(
        await output(shop.site, ROUTER, "nft", "-j", "list", "counter", "inet", "circles", "met")
    )
    assert listed["nftables"][1]["counter"]["packets"] == 50 * len(shop.addresses)


async def make(
    shop: Shop, name: str, ports: Mapping[str, int], selector: str = NAME, **labels: str
) -> tuple[str, ...]:
    """Create or change a Service with these ports (http, dns), wait until all gateways serve it,
    and return its addresses."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "type": "LoadBalancer",
            "selector": {"app": selector},
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [
                {
                    "name": kind,
                    "port": port,
                    "targetPort": kind,
                    "protocol": "UDP" if kind == "dns" else "TCP",
                }
                for kind, port in ports.items()
            ],
        },
    }
    await shop.site.apply([service])
    addresses = await addresses_of(shop.site, name)

    async def served() -> bool:
        found = [await service_at(shop, gateway, name) for gateway in shop.gateways]
        plans = [each.get("plan") or {"listeners": []} for each in found]
        return all(
            len(plan["listeners"]) == 2 * len(ports)
            and each["outcome"]["state"] == "done"
            and all(
                listener.get("has_endpoints", True) == (selector == NAME)
                for listener in plan["listeners"]
            )
            for plan, each in zip(plans, found, strict=True)
        )

    await until(served, f"service of {name} by all gateways")
    return addresses


async def service_at(shop: Shop, gateway: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await fetch(shop.site, gateway, "/state"))["services"].get(
        f"default/{name}", {}
    )
    return found


async def test_a_packet_passes_a_gateway_only_once(shop: Shop) -> None:
    """Nodes leave the Service to another service proxy, which does not exist: nodes on the
    gateways' link send its packets to the router, which sends them to a gateway again. Nodes do not
    accept packets from a tunnel for addresses that they do not serve."""
    site, sent = shop.site, 100
    addresses = await make(
        shop, "aside", {"http": 9080, "dns": 9053}, **{PROXY_NAME_LABEL: "other"}
    )
    for address in addresses:
        for kind, port in (("tcp", 9080), ("udp", 9053)):
            options = ("--count", str(sent), "--per-second", "2000")
            source = SOURCES[6 if ":" in address else 4]
            argv = [
                sys.executable,
                "-m",
                "fairlead.probe",
                "flood",
                kind,
                source,
                address,
                str(port),
                *options,
            ]
            code, said, errors = await site.exec(CLIENT, argv)
            assert (code, said.strip()) == (0, str(sent)), errors
    everything = sent * 4

    async def counted() -> tuple[int, int]:
        traffic = [(await fetch(site, gateway, "/state"))["traffic"] for gateway in shop.gateways]
        ours = [each["services"]["default/aside"] for each in traffic]
        returned = sum(each["drops"].get("returned", 0) for each in ours)
        assert (
            sum(node["returned"] for each in traffic for node in each["nodes"].values()) >= returned
        )
        return sum(each["packets"] for each in ours), returned

    async def all_passed() -> bool:
        return (await counted())[0] >= everything

    await until(all_passed, "forwarding of all packets by the gateways")
    await asyncio.sleep(0.5)  # a looping packet returns within microseconds
    passed, returned = await counted()
    assert passed == everything
    assert 0 < returned < everything, "some packets must return: two of four nodes are on the link"


async def refused(shop: Shop, address: str, tcp: int, udp: int) -> tuple[bool, bool]:
    """Return whether the client is refused at once, for a connection and for a datagram."""
    host = f"[{address}]" if ":" in address else address
    code, _, _ = await shop.site.exec(CLIENT, ["curl", "-sS", "-m", "5", f"http://{host}:{tcp}/"])
    loop = asyncio.get_running_loop()
    with shop.site.socket(
        CLIENT, socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as sock:
        sock.setblocking(False)
        sock.connect((address, udp))
        await loop.sock_sendall(sock, b"request")
        try:
            async with asyncio.timeout(5):
                await loop.sock_recv(sock, 2000)
        except ConnectionRefusedError:
            return code == CURL_REFUSED, True
        except TimeoutError:
            pass
    return code == CURL_REFUSED, False


async def test_a_service_without_endpoints_refuses_clients(shop: Shop) -> None:
    addresses = await make(shop, "empty", {"http": 80, "dns": 53}, selector="nobody")
    for address in addresses:
        assert await refused(shop, address, 80, 53) == (True, True)
    await make(shop, "empty", {"http": 80, "dns": 53})

    async def answered() -> bool:
        return not any([any(await refused(shop, address, 80, 53)) for address in addresses])

    await until(answered, "an answer of the pods")
    await make(shop, "empty", {"http": 80, "dns": 53}, selector="nobody")
    for address in addresses:
        assert await refused(shop, address, 80, 53) == (True, True)
    messages = [
        (await fetch(shop.site, gateway, "/state"))["traffic"]["messages"]
        for gateway in shop.gateways
    ]
    assert sum(each["refusal"] for each in messages) >= 8


async def test_sctp_reaches_pods_with_the_client_address(shop: Shop) -> None:
    """The kernel may have no SCTP of its own, so the test opens the association with its own
    packets at both ends. Gateways and nodes handle these packets as usual: the pod sees the
    client's address, and the client receives an answer from the VIP."""
    site = shop.site
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "calls", "namespace": "default"},
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "selector": {"app": "web"},
            "ports": [{"port": SCTP_PORT, "targetPort": SCTP_PORT, "protocol": "SCTP"}],
        },
    }
    await site.apply([service])
    loop = asyncio.get_running_loop()
    pods = {
        pod: namespace.make_socket(
            site.namespace(f"default/{pod}"), socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_SCTP
        )
        for pod in await shop.pods()
    }
    reached: set[str] = set()

    async def serve(pod: str, sock: socket.socket) -> None:
        while True:
            packet = IP(await loop.sock_recv(sock, 2048))
            if SCTPChunkInit in packet:
                assert packet.src == site.topology.host(CLIENT).addresses[0]
                reached.add(pod)
                answer = SCTP(
                    sport=SCTP_PORT, dport=packet[SCTP].sport, tag=packet[SCTPChunkInit].init_tag
                )
                await loop.sock_sendto(
                    sock,
                    bytes(answer / SCTPChunkInitAck(init_tag=7, a_rwnd=65536)),
                    (packet.src, 0),
                )

    (address,) = await addresses_of(site, "calls")
    client = namespace.make_socket(
        site.namespace(CLIENT), socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_SCTP
    )
    for sock in (client, *pods.values()):
        sock.setblocking(False)
    answered: set[int] = set()

    async def read_answers() -> None:
        while True:
            packet = IP(await loop.sock_recv(client, 2048))
            if SCTPChunkInitAck in packet and packet.src == address:
                answered.add(packet[SCTP].dport)

    tasks = [asyncio.ensure_future(serve(pod, sock)) for pod, sock in pods.items()] + [
        asyncio.ensure_future(read_answers())
    ]
    ports = range(20_000, 20_000 + 4 * FLOWS)
    try:

        async def all_answered() -> bool:
            for port in set(ports) - answered:
                opening = SCTP(sport=port, dport=SCTP_PORT, tag=0) / SCTPChunkInit(
                    init_tag=port, a_rwnd=65536
                )
                await loop.sock_sendto(client, bytes(opening), (address, 0))
            await asyncio.sleep(0.2)
            return answered == set(ports)

        await until(all_answered, "an answer to each INIT")
        assert reached == pods.keys()
    finally:
        for task in tasks:
            task.cancel()
        for sock in (client, *pods.values()):
            sock.close()
