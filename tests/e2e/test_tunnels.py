"""Nodes behind a router get their packets through a tunnel, which causes neither fragmentation nor
lost packets. Each lab has a node on the gateways' link and two behind the router, with a path MTU
of 1500 bytes everywhere."""

import asyncio
import errno
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.load import CLIENT, DEADLINE_S, GATEWAY, addresses_of, fetch, output, until
from tests.e2e.test_shares import SINK, SOURCES, TIMEOUTS, received

from fairlead.drivers.tunnel.rules import segment_sizes
from fairlead.kube.events import EVENTS
from fairlead.lab import namespace
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site
from fairlead.plan.members import HEALTH_CHECKS_FAILING, NODE_NOT_ANSWERING
from fairlead.role_state import NodeState, decode

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

UPLOAD = 8 << 20
FEWEST, MOST = 3, 60
"""The initial number of uploads, and the maximum if a pod has not been reached. With the maximum,
fewer than one run in a thousand million misses one of three pods."""
MTU = 1500
WEB, HOST, PROXIED = "web", "host", "proxied"
CALLS = 60
"""The number of connections of each family. With two of three nodes dead, all connections through a
gateway that did not notice would succeed only once in 10^28 runs."""
FLOWS, TOLERANCE = 30_000, 0.05
"""The number of packets of a flood over each family. A pod should get a third; one standard
deviation of its share is about one per cent, and a difference of five per cent is not random."""
OPEN = 12
TCP_MAXSEG, IP_MTU, IPV6_MTU = 2, 14, 24
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, DO = 10, 23, 2
ROWS = {
    "ipip": Transport(tunnel="ipip", forwarding="auto", attach="tc"),
    "vxlan": Transport(tunnel="vxlan", forwarding="auto", attach="tc"),
    "ipip-xdp": Transport(tunnel="ipip", forwarding="ipip", attach="xdp-generic"),
    "vxlan-xdp": Transport(tunnel="vxlan", forwarding="vxlan", attach="xdp-generic"),
}
PORTS = [
    {"name": "web", "containerPort": 8080},
    {"name": "dns", "containerPort": 5353, "protocol": "UDP"},
]


def pod(name: str, node: str, app: str = WEB, *, host_network: bool = False) -> dict[str, Any]:
    spec = {
        "nodeName": node,
        "hostNetwork": host_network,
        "containers": [{"name": "c", "image": "echo", "ports": PORTS}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": spec,
    }


def service(name: str) -> dict[str, Any]:
    ports = [
        {"name": "web", "port": 80, "targetPort": "web"},
        {"name": "dns", "port": 5353, "targetPort": "dns", "protocol": "UDP"},
    ]
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "ipFamilyPolicy": "PreferDualStack",
        "selector": {"app": name},
        "ports": ports,
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def proxied() -> dict[str, Any]:
    """Return a Service of class proxy. Its connections go from the gateway to node ports by the
    host's routes, and never through the tunnel."""
    spec = {
        "type": "LoadBalancer",
        "loadBalancerClass": "fairlead.io/proxy",
        "ipFamilyPolicy": "PreferDualStack",
        "selector": {"app": WEB},
        "ports": [{"name": "web", "port": 80, "targetPort": "web"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": PROXIED}, "spec": spec}


class TunnelLab:
    """A lab and the addresses of its Services, by name and family."""

    def __init__(
        self, site: Site, transport: Transport, addresses: Mapping[str, Sequence[str]]
    ) -> None:
        self.site = site
        self.transport = transport
        self.addresses = addresses


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ROWS)
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[TunnelLab]:
    transport = ROWS[request.param]
    async with Site.create(f"tun{os.getpid()}", nodes=1, far_nodes=2, transport=transport) as site:
        pods = [
            pod("a", "node1"),
            pod("b", "node2"),
            pod("c", "node3"),
            pod("h", "node3", HOST, host_network=True),
        ]
        await site.apply([*pods, service(WEB), service(HOST), proxied()])
        await site.await_pods()
        addresses = {
            name: sorted(await addresses_of(site, name), key=lambda each: ":" in each)
            for name in (WEB, HOST, PROXIED)
        }
        made = TunnelLab(site, transport, addresses)
        for family in (0, 1):
            await until_answered_by(made, WEB, family, {"a", "b", "c"})
            await until_answered_by(made, HOST, family, {"h"})
            await until_answered_by(made, PROXIED, family, {"a", "b", "c"})
        yield made


async def post(lab: TunnelLab, name: str, family: int, size: int = 0) -> tuple[dict[str, Any], int]:
    """Upload this many bytes to a Service. Return the pod's report, and the size of the segments
    that were sent."""
    reader, writer = await lab.site.connect(CLIENT, lab.addresses[name][family], 80)
    try:
        async with asyncio.timeout(DEADLINE_S):
            segment = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, TCP_MAXSEG)
            writer.write(
                f"POST / HTTP/1.0\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size)
            )
            await writer.drain()
            return json.loads((await reader.read()).partition(b"\r\n\r\n")[2]), segment
    finally:
        writer.close()


async def until_answered_by(lab: TunnelLab, name: str, family: int, pods: set[str]) -> None:
    """Return when these pods answer, in thirty calls in sequence."""
    answered: Counter[str] = Counter()
    async with asyncio.timeout(DEADLINE_S):
        while set(answered) != pods:
            answered.clear()
            try:
                for _ in range(30):
                    answered[(await post(lab, name, family))[0]["pod"]] += 1
            except Exception:  # not yet
                await asyncio.sleep(0.1)


def is_longest_segment(segment: int, longest: int) -> bool:
    """Return whether the segment size is `longest`, or twelve bytes less: TCP_MAXSEG of an open
    connection excludes the timestamp, if there is one."""
    return segment in (longest, longest - 12)


async def fragments(site: Site) -> int:
    """Return the number of fragments that were created or reassembled on any host of the lab."""
    names = (
        "IpReasmReqds",
        "IpFragCreates",
        "IpFragFails",
        "Ip6ReasmReqds",
        "Ip6FragCreates",
        "Ip6FragFails",
    )
    total = 0
    for host in ("router", *(host.name for host in site.topology.hosts)):
        _, output, _ = await site.exec(host, ["nstat", "-asz", *names])
        total += sum(
            int(line.split()[1]) for line in output.splitlines() if not line.startswith("#")
        )
    return total


@pytest.mark.parametrize("family", [0, 1])
@pytest.mark.parametrize("name", [WEB, HOST])
async def test_uploads_arrive_complete_in_segments_that_fit_the_tunnel(
    lab: TunnelLab, name: str, family: int
) -> None:
    site, kind = lab.site, lab.transport.tunnel
    assert kind != "none"
    longest = segment_sizes(kind, MTU, site.topology.host("node2").addresses)[family]
    before = await fragments(site)
    pods = {"h"} if name == HOST else {"a", "b", "c"}
    seen: set[str] = set()
    for turn in range(MOST):
        if turn >= FEWEST and seen >= pods:
            break
        said, segment = await post(lab, name, family, UPLOAD)
        assert (said["length"], said["peer"]) == (
            UPLOAD,
            site.topology.host(CLIENT).addresses[family],
        )
        assert is_longest_segment(segment, longest), (segment, longest)
        seen.add(said["pod"])
    assert seen == pods
    assert await fragments(site) == before


@pytest.mark.parametrize("family", [0, 1])
async def test_a_datagram_that_exceeds_the_path_mtu_is_reported_to_its_sender(
    lab: TunnelLab, family: int
) -> None:
    """RFC 1191, RFC 8201."""
    site, address = lab.site, lab.addresses[HOST][family]
    headers = 48 if family else 28
    level, option, discover = (
        (41, IPV6_MTU, IPV6_MTU_DISCOVER) if family else (0, IP_MTU, IP_MTU_DISCOVER)
    )
    with site.socket(
        CLIENT, socket.AF_INET6 if family else socket.AF_INET, socket.SOCK_DGRAM
    ) as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        sock.connect((address, 5353))
        sock.setsockopt(level, discover, DO)
        assert lab.transport.tunnel != "none"
        fits = segment_sizes(lab.transport.tunnel, MTU, site.topology.host("node2").addresses)[
            family
        ] + (60 if family else 40)
        async with asyncio.timeout(DEADLINE_S):
            while sock.getsockopt(level, option) == MTU:
                try:
                    sock.send(bytes(MTU - headers))
                except OSError as error:
                    if error.errno != errno.EMSGSIZE:
                        raise
                await asyncio.sleep(0.05)
            assert sock.getsockopt(level, option) == fits
            sock.getsockopt(
                socket.SOL_SOCKET,
                socket.SO_ERROR,
                # The reported MTU also makes the next call fail.
            )
            with pytest.raises(OSError, match="Message too long"):
                sock.send(bytes(MTU - headers))
            sock.send(bytes(fits - headers))
            said = json.loads(await loop.sock_recv(sock, 2000))
            assert (said["pod"], said["length"]) == ("h", fits - headers)
            # If the sender permits fragmentation, its own kernel sends longer datagrams in
            # fragments.
            sock.setsockopt(level, discover, 1)
            sock.send(bytes(4000))
            assert json.loads(await loop.sock_recv(sock, 2000))["length"] == 4000


@pytest.mark.parametrize("family", [0, 1])
@pytest.mark.soak
async def test_a_flood_is_distributed_equally_and_breaks_no_upload(
    lab: TunnelLab, family: int
) -> None:
    """The flood consists of real packets, each of another flow, while uploads to every node are in
    progress."""
    site, address, pods = (
        lab.site,
        lab.addresses[WEB][family],
        ("default/a", "default/b", "default/c"),
    )
    for host in site.topology.of(
        "node"
        # Each flow is one packet. The conntrack entries must not fill the node's table.
    ):
        namespace.set_sysctls(
            site.namespace(host.name),
            {f"net/netfilter/nf_conntrack_{name}": 1 for name in TIMEOUTS},
        )
    for pod_ in pods:
        await output(site, pod_, "nft", f"add table inet sink; delete table inet sink; {SINK}")
    uploads = [await site.connect(CLIENT, address, 80) for _ in range(OPEN)]
    try:
        for _, writer in uploads:
            writer.write(f"POST / HTTP/1.0\r\nContent-Length: {MTU}\r\n\r\n".encode())
            await writer.drain()
        argv = [
            "-m",
            "fairlead.probe",
            "flood",
            "tcp",
            SOURCES[6 if family else 4],
            address,
            "80",
            "--count",
            str(FLOWS),
        ]
        assert await output(site, CLIENT, sys.executable, *argv) == f"{FLOWS}\n"
        counts: list[int] = []

        async def all_received() -> bool:
            counts[:] = [await received(site, pod_.partition("/")[2]) for pod_ in pods]
            return sum(counts) == FLOWS

        await until(all_received, "the arrival of all flows at pods")
        assert max(abs(count * len(pods) / FLOWS - 1) for count in counts) <= TOLERANCE, counts
        for reader, writer in uploads:
            writer.write(bytes(MTU))
            async with asyncio.timeout(DEADLINE_S):
                assert json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["length"] == MTU
    finally:
        for _, writer in uploads:
            writer.close()


FAR = ("ip daddr 198.18.0.0/24", "ip6 daddr 2001:db8:3::/64")
CUT = "; ".join(
    (
        "add table inet cut; add chain inet cut forward { type filter hook forward priority 0; }",
        *(
            f"add rule inet cut forward {to} {what} drop"
            for to in FAR
            for what in ("meta l4proto { 4, 41 }", "udp dport 4789")
        ),
    )
)
"""The rules of a firewall in front of the nodes behind the router, which drops tunnels. Packets
without an outer header pass. Packets that the router only bridges also pass this hook
(br_netfilter), and must not be dropped."""


async def states(lab: TunnelLab, name: str) -> dict[str, str]:
    """Return the states of each node as a member of a Service; a single word if the state is the
    same in all listeners."""
    plan = (await fetch(lab.site, GATEWAY, "/state"))["services"].get(f"default/{name}", {}).get(
        "plan"
    ) or {"listeners": []}
    found: dict[str, set[str]] = {}
    for member in (member for listener in plan["listeners"] for member in listener["members"]):
        found.setdefault(member["node"], set()).add(member["state"])
    return {node: " ".join(sorted(known)) for node, known in found.items()}


async def until_states(lab: TunnelLab, wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Return when each Service has these members in these states."""
    seen: dict[str, dict[str, str]] = {}

    async def as_wanted() -> bool:
        seen.update({name: await states(lab, name) for name in wanted})
        return seen == wanted

    try:
        await until(as_wanted, "states")
    except AssertionError as late:
        raise AssertionError(f"the members are {seen}, wanted are {wanted}") from late


async def has_events(
    site: Site, service: str, reason: str, kind: str, nodes: Sequence[str]
) -> bool:
    """Return whether Events with this reason name the tunnel and each address of these nodes."""
    async with site.client() as client:
        events = [each for each in await client.list(EVENTS) if each.reason == reason]
    said = [each.message for each in events if each.metadata.name.startswith(f"{service}.")]
    addresses = [address for node in nodes for address in site.topology.host(node).addresses]
    return all(
        any(f"through the {kind} tunnel" in text and f"({each})" in text for text in said)
        for each in addresses
    )


async def test_nodes_behind_a_dead_tunnel_get_no_connections_although_their_health_ports_answer(
    lab: TunnelLab,
) -> None:
    site, kind, far = lab.site, lab.transport.tunnel, ("node2", "node3")
    everywhere = dict.fromkeys(("node1", *far), "active")
    await until_states(lab, {WEB: everywhere, HOST: {"node3": "active"}})
    await output(site, "router", "nft", CUT)
    try:
        # A Service whose only node is behind the tunnel is still served, according to the API.
        await until_states(
            lab, {WEB: everywhere | dict.fromkeys(far, "down"), HOST: {"node3": "active"}}
        )
        for address in (address for node in far for address in site.topology.host(node).addresses):
            host = f"[{address}]" if ":" in address else address
            assert '"currentTime"' in await output(
                site, GATEWAY, "curl", "-sf", f"http://{host}:10256/healthz"
            )
        for family in (0, 1):
            answered = [(await post(lab, WEB, family))[0]["pod"] for _ in range(CALLS)]
            assert set(answered) == {"a"}
            through = {(await post(lab, PROXIED, family))[0]["pod"] for _ in range(CALLS)}
            assert through == {"a", "b", "c"}
        assert await states(lab, PROXIED) == everywhere
        await until(
            partial(has_events, site, WEB, NODE_NOT_ANSWERING, kind, far),
            "an Event that names the nodes",
        )
        await until(
            partial(has_events, site, HOST, HEALTH_CHECKS_FAILING, kind, far[1:]),
            "an Event about the failing health checks",
        )
        rows = [
            line.split()
            for line in (await output(site, GATEWAY, "fairlead", "status")).splitlines()
        ]
        for address in site.topology.host("node2").addresses:
            assert {tuple(row[2:]) for row in rows if row[:2] == ["node2", address]} == {
                (kind, "down"),
                ("route", "up"),
            }
    finally:
        await output(site, "router", "nft", "delete table inet cut")
    await until_states(lab, {WEB: everywhere, HOST: {"node3": "active"}})
    for family in (0, 1):
        await until_answered_by(lab, WEB, family, {"a", "b", "c"})


async def test_a_node_without_a_route_gets_no_connections_and_is_reported(lab: TunnelLab) -> None:
    site, address = lab.site, lab.site.topology.host("node2").addresses[0]
    everywhere = dict.fromkeys(("node1", "node2", "node3"), "active")
    await until_states(lab, {WEB: everywhere})
    await output(site, GATEWAY, "ip", "route", "add", "unreachable", address)
    try:
        await until_states(
            lab,
            {WEB: everywhere | {"node2": "active down"}},
            # IPv6 is not affected
        )
        assert {(await post(lab, WEB, 0))[0]["pod"] for _ in range(CALLS)} == {"a", "c"}

        async def has_event() -> bool:
            async with site.client() as client:
                events = [
                    each.message
                    for each in await client.list(EVENTS)
                    if each.reason == NODE_NOT_ANSWERING
                ]
            return any(f"of node2 ({address}): no new connections" in each for each in events)

        await until(has_event, "an Event that names the node")
    finally:
        await output(site, GATEWAY, "ip", "route", "del", "unreachable", address)
    await until_states(lab, {WEB: everywhere})


async def test_the_node_counts_decapsulated_packets_and_cleanup_leaves_nothing(
    lab: TunnelLab,
) -> None:
    site, kind = lab.site, lab.transport.tunnel
    _, output, _ = await site.exec("node3", ["curl", "-s", "http://127.0.0.1:9442/state"])
    state = decode(output.encode(), "GET /state")
    assert isinstance(state, NodeState)
    assert state.tunnel is not None
    assert state.tunnel.kind == kind
    packets = state.tunnel.packets
    if kind == "ipip":
        assert packets["decapsulated"] > UPLOAD // 65536
    assert {
        name: count for name, count in packets.items() if count and name != "decapsulated"
    } == {}
    _, metrics, _ = await site.exec("node3", ["curl", "-s", "http://127.0.0.1:9442/metrics"])
    assert "fairlead_tunnel_packets_total{outcome=" in metrics
    await site.stop_role("node3")
    exit_code, output, errors = await site.exec("node3", ["fairlead", "node", "--cleanup"])
    assert (exit_code, "table inet fairlead_tunnel" in errors) == (0, True), output + errors
    _, left, _ = await site.exec(
        "node3", ["sh", "-c", "ip link; nft list ruleset; tc filter show dev eth0 ingress"]
    )
    assert "fairlead" not in left
