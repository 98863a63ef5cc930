"""Every node is a gateway. With policy Local, a packet that enters at any node reaches a pod and
keeps its source address. Three nodes share a link, and the fourth is behind the router, so that
packets between nodes use both the link and the tunnel."""

import asyncio
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.crowd import Crowd, Shop, check_unharmed
from tests.e2e.load import NAME, addresses_of, output, until
from tests.e2e.scenes import PROXY_NAME_LABEL
from tests.e2e.test_shares import SOURCES

from fairlead.errors import Unavailable
from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

TABLE = 7471100
"""The routing table of blackhole routes."""
PLACES = ("node1", "node1", "node4")
"""The nodes with pods."""
CALLS = 40
STATE_COMMANDS = {
    "nft list ruleset": "fairlead",
    "tc filter show dev eth0 ingress": "fairlead",
    "ip -4 rule": f"lookup {TABLE}",
    "ip -6 rule": f"lookup {TABLE}",
    "ip -4 route show table all": "blackhole",
    "ip -6 route show table all": "blackhole",
}
"""The commands that show the state of roles in the kernel, and the text by which each test
recognizes it."""
ROWS = {
    "ipip": Transport(tunnel="ipip"),
    "vxlan everywhere": Transport(tunnel="vxlan", forwarding="vxlan"),
}


class NodesShop(Shop):
    """A Shop whose gateways are the nodes, which show their state at the gateway's port."""

    async def members(self, gateway: str = "node1") -> dict[str, tuple[int, str]]:
        view = json.loads(
            await output(self.site, gateway, "curl", "-s", "http://127.0.0.1:9441/state")
        )
        plan = view["services"].get("default/web", {}).get("plan") or {
            "listeners": [{"members": []}]
        }
        return {
            member["node"]: (member["weight"], member["state"])
            for member in plan["listeners"][0]["members"]
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ROWS)
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[NodesShop]:
    lab = Site.create(
        f"nodes{os.getpid()}",
        nodes=3,
        far_nodes=1,
        clients=1,
        gateways_on_nodes=True,
        transport=ROWS[request.param],
    )
    async with lab as site:
        shop = NodesShop(site)
        await shop.start(PLACES)
        await shop.create()
        await shop.await_weights(PLACES)
        yield shop


async def call_by_tcp(shop: NodesShop, caller: str, address: str) -> tuple[str, str]:
    """Open a TCP connection and return (pod, peer): the pod that answers, and the client address
    that it sees."""
    reader, writer = await shop.site.connect(caller, address, 80)
    try:
        async with asyncio.timeout(5):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            return answer["pod"], answer["peer"]
    finally:
        writer.close()


async def call_by_udp(shop: NodesShop, caller: str, address: str) -> tuple[str, str]:
    """Send a UDP datagram and return (pod, peer) like `call_by_tcp`."""
    with shop.site.socket(
        caller, socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (address, 53))
        await loop.sock_sendall(sock, b"hello")
        async with asyncio.timeout(5):
            answer = json.loads(await loop.sock_recv(sock, 2000))
        return answer["pod"], answer["peer"]


@pytest.mark.parametrize("entry_node", ["node1", "node2", "node3", "node4"])
async def test_every_pod_is_reached_through_every_node(shop: NodesShop, entry_node: str) -> None:
    pods = await shop.pods()
    client = shop.site.topology.host("client1").addresses
    await shop.site.route_vips([entry_node])
    try:
        for address in shop.addresses:
            for call in (call_by_tcp, call_by_udp):
                answers = [await call(shop, "client1", address) for _ in range(CALLS)]
                assert {peer for _, peer in answers} == {client[":" in address]}
                assert {pod for pod, _ in answers} == set(pods)
    finally:
        await shop.site.route_vips([host.name for host in shop.site.topology.gateways])


async def test_clients_on_nodes_and_in_pods_are_answered(shop: NodesShop) -> None:
    (pod, *_) = await shop.pods()
    for caller in ("node1", "node2", "node4", f"default/{pod}"):
        for address in shop.addresses:
            for call in (call_by_tcp, call_by_udp):
                answered = Counter([(await call(shop, caller, address))[0] for _ in range(5)])
                assert answered.total() == 5


async def test_a_packet_passes_two_gateways_at_most_if_no_node_serves_its_service(
    shop: NodesShop,
) -> None:
    """The first gateway may send the packet to another node, which is also a gateway and does not
    serve the Service either. No further gateway passes it on."""
    site, sent = shop.site, 100
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "aside",
            "namespace": "default",
            "labels": {PROXY_NAME_LABEL: "other"},
        },
        "spec": {
            "type": "LoadBalancer",
            "selector": {"app": NAME},
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [{"port": 9080, "targetPort": "http"}],
        },
    }
    await site.apply([service])
    addresses = await addresses_of(site, "aside")

    async def views() -> list[dict[str, Any]]:
        return [
            json.loads(await output(site, each, "curl", "-s", "http://127.0.0.1:9441/state"))
            for each in shop.gateways
        ]

    async def served() -> bool:
        plans = [
            view["services"].get("default/aside", {}).get("plan") or {"listeners": []}
            for view in await views()
        ]
        return all(
            len([each for each in plan["listeners"] if each["members"]]) == 2 for plan in plans
        )

    await until(served, "service by all gateways")
    for address in addresses:
        source = SOURCES[6 if ":" in address else 4]
        argv = [sys.executable, "-m", "fairlead.probe", "flood", "tcp", source, address, "9080"]
        code, printed, errors = await site.exec(
            "client1", [*argv, "--count", str(sent), "--per-second", "2000"]
        )
        assert (code, printed.strip()) == (0, str(sent)), errors

    async def passed() -> int:
        return sum(
            [
                view["traffic"]["services"].get("default/aside", {}).get("packets", 0)
                for view in await views()
            ]
        )

    async def all_passed() -> bool:
        return await passed() >= 2 * sent

    await until(all_passed, "forwarding of all packets by the gateways")
    await asyncio.sleep(0.5)  # a looping packet returns within microseconds
    assert await passed() == 2 * sent


@pytest.mark.soak
async def test_no_connection_fails_while_pods_are_added_and_deleted(shop: NodesShop) -> None:
    """The tables of the nodes change one after the other. Meanwhile, a connection that enters at
    one node and is passed to another stays there."""
    steps: Sequence[Sequence[str]] = (
        ("node2", "node2", "node3"),
        ("node4",),
        ("node1", "node2", "node3", "node4"),
        ("node3",),
        PLACES,
    )

    async def change() -> None:
        for places in steps:
            await shop.place(places)

    async with Crowd(shop, tcp=100, udp=0, quic=0, new_per_s=100) as crowd:
        check_unharmed(await crowd.counts_during(change()), gone=set(await shop.pods()))


@pytest.mark.soak
async def test_killing_the_roles_of_a_node_breaks_no_flow(shop: NodesShop) -> None:
    async def kill() -> None:
        for node in ("node1", "node2", "node4"):
            await shop.site.kill_role(node, "gateway")
            await asyncio.sleep(0.3)
            await shop.site.start_role(node, "gateway")
            await shop.site.kill_role(node, "node")
            await asyncio.sleep(0.3)
            await shop.site.start_role(node, "node")

    async with Crowd(shop, tcp=100, udp=20, quic=0, new_per_s=50) as crowd:
        check_unharmed(await crowd.counts_during(kill()))


async def test_cleanup_leaves_nothing_in_the_kernel(shop: NodesShop) -> None:
    site = shop.site
    for role in ("gateway", "node"):
        await site.stop_role("node2", role)
        options = ["--config", str(site.directory.config)]
        options += ["--pin-path", str(site.directory.pins("node2"))] if role == "gateway" else []
        await output(site, "node2", "fairlead", role, *options, "--cleanup")
    for look, ours in STATE_COMMANDS.items():
        assert ours in await output(site, "node1", *look.split()), look
        assert ours not in await output(site, "node2", *look.split()), look
    assert "fairlead" not in await output(site, "node2", "ip", "link")
    with pytest.raises(Unavailable):
        await site.connect("client1", site.topology.host("node2").addresses[0], 9441, timeout_s=1)
