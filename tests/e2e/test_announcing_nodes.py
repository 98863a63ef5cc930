"""Class announce: nodes announce addresses by BGP to a real router, beside a real kube-proxy in
modes nftables and iptables, and with `fairlead node`. Routes follow the pods, shares follow the
weights, and processes that are killed change nothing."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from ipaddress import ip_address

import msgspec
import pytest
import pytest_asyncio
from tests.e2e import operators
from tests.e2e.crowd import PORTS, Shop
from tests.e2e.load import CLIENT, Load, output, until
from tests.e2e.test_shares import SINK, SOURCES, received

from fairlead.kube.events import EVENTS
from fairlead.kube.objects import NODES, SERVICES, ObjectKey
from fairlead.lab import kubeproxy, process, routing
from fairlead.lab.routers import RouterKind, Routing
from fairlead.lab.rundir import NodeProxy
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.probe.steady import Period

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PLACEMENT = ("node1", "node1", "node1", "node2", "node3")
MOVED = ("node1", "node1", "node1", "node2", "node4")
ROWS: Mapping[str, tuple[NodeProxy, RouterKind]] = {
    "beside kube-proxy, to FRR": ("kube-proxy", "frr"),
    "fairlead node, to BIRD": ("fairlead", "bird"),
}
WITH_IPTABLES = "node3"
"""The node whose kube-proxy runs in mode iptables; the others run in mode nftables."""
STOP_S = 10.0
FLOWS = 40_000
"""The number of flows for each family."""
PER_SECOND = 40_000
TOLERANCE = 0.05
EXCLUDE = "node.kubernetes.io/exclude-from-external-load-balancers"
MOVED_CONNECTION = ConnectionResetError.__name__
LOST = TimeoutError.__name__
"""The failure of a connection whose first packet was lost."""


def check_served(period: Period) -> None:
    """Check that every first packet was answered, so a node with a pod and with rules got it. A
    change of routes moves connections to other nodes, which reset them: the class cannot avoid
    this, also for a connection whose handshake the client has not finished. The answer to a first
    packet is never a reset, but a refusal."""
    assert period.requests > 0
    assert period.failures.keys() <= {MOVED_CONNECTION}, period


async def unharmed(load: Load) -> bool:
    """Return whether no call fails for longer than a call waits for its answer, so that no call
    from before is unanswered either."""
    period = await load.counts_during(asyncio.sleep(0), watch_s=1.5)
    return period.requests > 0 and period.failed == 0


class NodesShop(Shop):
    """A Shop whose addresses are announced by nodes. `placement`: the nodes of its pods between two
    tests, which are in the order of the fewest changes."""

    placement: tuple[str, ...] = PLACEMENT

    async def await_weights(self, nodes: Collection[str]) -> None:
        wanted = normalized(Counter(nodes))

        async def as_wanted() -> bool:
            found = await routes(self.site)
            return all(normalized(found.get(each, {})) == wanted for each in self.addresses)

        try:
            await until(as_wanted, "the routes")
        except AssertionError as late:
            raise AssertionError(f"{await routes(self.site)}, expected {wanted}") from late

    async def await_nodes(self, *nodes: str) -> None:
        """Wait until these nodes announce all addresses, with any weights."""

        async def as_wanted() -> bool:
            found = await routes(self.site)
            return all(set(found.get(each, {})) == set(nodes) for each in self.addresses)

        await until(as_wanted, f"routes to {nodes}")


async def routes(site: Site) -> Mapping[str, Mapping[str, int]]:
    """Return the weights of the nodes in the router's kernel, by address."""
    names = {
        each: host.name
        for host in site.topology.of("node")
        for each in (*host.addresses, *(link_local(port.mac) for port in host.ports))
    }
    found: dict[str, dict[str, int]] = {}
    for reach in (await routing.view(site)).reach:
        for hop in reach.via:
            gateway, _, weight = hop.partition(" weight ")
            found.setdefault(reach.destination, {})[names.get(gateway, gateway)] = int(weight or 1)
    return found


def link_local(mac: str) -> str:
    """Return the link-local address of an interface (RFC 4291, appendix A), which is the next hop
    of IPv6 routes."""
    octets = bytes.fromhex(mac.replace(":", ""))
    number = bytes([octets[0] ^ 2, *octets[1:3], 0xFF, 0xFE, *octets[3:]])
    return str(ip_address(b"\xfe\x80" + bytes(6) + number))


def normalized(weights: Mapping[str, int]) -> Mapping[str, float]:
    """Return the share of each node: daemons scale weights in different ways."""
    total = sum(weights.values())
    return {name: round(weight / total, 1) for name, weight in weights.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ROWS)
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[NodesShop]:
    proxy, daemon = ROWS[request.param]
    if proxy == "kube-proxy":
        request.getfixturevalue("kube_proxy")
    async with Site.create(
        f"class{os.getpid()}",
        nodes=4,
        gateways=0,
        clients=1,
        node_proxy=proxy,
        announce="bgp",
        default_class="announce",
        routing=Routing(daemon=daemon),
    ) as site:
        if proxy == "kube-proxy":
            await process.one(site.name, f"{WITH_IPTABLES}/kube-proxy").stop(STOP_S)
            await kubeproxy.start(site, WITH_IPTABLES, {"mode": "iptables"})
        shop = NodesShop(site)
        await shop.start(PLACEMENT)
        await shop.create()
        await shop.await_weights(PLACEMENT)
        yield shop


@pytest_asyncio.fixture(loop_scope="module")
async def shop(lab: NodesShop) -> NodesShop:
    """Return the Service in a known state, whatever state the previous test left."""
    await lab.place(lab.placement)
    return lab


only_beside_kube_proxy = pytest.mark.parametrize("lab", [next(iter(ROWS))], indirect=True)
"""For tests of the plan, which does not depend on the service proxy."""


async def check_shares(shop: NodesShop) -> None:
    """Check that each pod gets its share. Every flow is a real packet. A rule in the pods counts
    and drops it."""
    pods = await shop.pods()
    for pod in pods:
        await output(shop.site, f"default/{pod}", "nft", SINK)
    kind, port, _ = PORTS[0]
    for address in shop.addresses:
        source = SOURCES[ip_address(address).version]
        argv = [sys.executable, "-m", "fairlead.probe", "flood", kind, source, address, str(port)]
        argv += ["--count", str(FLOWS), "--per-second", str(PER_SECOND)]
        code, sent, errors = await shop.site.exec(CLIENT, argv, timeout_s=120)
        assert (code, sent.strip()) == (0, str(FLOWS)), errors
    counts: dict[str, int] = {}

    async def all_received() -> bool:
        counts.update({pod: await received(shop.site, pod) for pod in pods})
        return sum(counts.values()) == len(shop.addresses) * FLOWS

    await until(all_received, "the arrival of all flows at pods")
    for pod in pods:
        await output(shop.site, f"default/{pod}", "nft", "delete", "table", "inet", "sink")
    fair = sum(counts.values()) / len(pods)
    assert max(counts.values()) / fair <= 1 + TOLERANCE, counts
    assert min(counts.values()) / fair >= 1 - TOLERANCE, counts


async def test_each_pod_gets_its_share(shop: NodesShop) -> None:
    await check_shares(shop)


async def test_each_pod_gets_its_share_by_next_hops_instead_of_weights(shop: NodesShop) -> None:
    """Each node has three addresses for this, of each family, and announces as many of them as it
    has pods (ADD-PATH). The router divides equally."""
    site = shop.site
    nodes = [host.name for host in site.topology.of("node")]
    hops: dict[str, str] = {}
    for number, node in enumerate(nodes):
        for place in range(3):
            for address in (f"192.0.2.{200 + 8 * number + place}", f"2001:db8:1::c{number}{place}"):
                hops[address] = node
                length = "64" if ":" in address else "24"
                options = ["nodad"] if ":" in address else []
                await output(
                    site, node, "ip", "addr", "add", f"{address}/{length}", "dev", "eth0", *options
                )
    before = {node: site.directory.config_of(node).read_text() for node in nodes}
    for node, text in before.items():
        config = msgspec.yaml.decode(text)
        for each in config["announce"]["bgp"]["peers"]:
            each["nextHops"] = ["192.0.2.192/26", "2001:db8:1::c00/120"]
        site.directory.write_config_of(node, msgspec.yaml.encode(config).decode())
    await restart(site, nodes)
    wanted = Counter({("node1", 1): 3, ("node2", 1): 1, ("node3", 1): 1})

    async def by_next_hops() -> bool:
        found = await routes(site)
        shown = [
            Counter((hops.get(hop, hop), weight) for hop, weight in found.get(each, {}).items())
            for each in shop.addresses
        ]
        return all(each == wanted for each in shown)

    try:
        await until(by_next_hops, "a route for each next hop")
        await check_shares(shop)
    finally:
        for node, text in before.items():
            site.directory.write_config_of(node, text)
        await restart(site, nodes)
    await shop.await_weights(PLACEMENT)


async def restart(site: Site, nodes: Collection[str]) -> None:
    """Restart the role on all these nodes."""
    await asyncio.gather(*(site.stop_role(node) for node in nodes))
    await asyncio.gather(*(site.start_role(node) for node in nodes))


async def test_killed_processes_change_no_route(shop: NodesShop) -> None:
    """The kernel of the router tells each change of a route. The role is killed and started again,
    and so is kube-proxy, whose rules stay in the kernel."""
    site = shop.site
    changes = site.spawn(ROUTER, ["ip", "monitor", "route"], label=f"{ROUTER}/monitor")
    before = await routes(site)
    async with operators.load(shop) as load:
        await load.take()
        await site.kill_role("node1")
        if site.size.node_proxy == "kube-proxy":
            await process.one(site.name, "node2/kube-proxy").kill()
            await kubeproxy.start(site, "node2")
        await site.start_role("node1")
        period = await load.counts_during(asyncio.sleep(0))
    assert await routes(site) == before
    changes.send(signal.SIGTERM)
    text = site.directory.log(f"{ROUTER}/monitor").read_text()
    assert not [each for each in shop.addresses if each in text], text
    assert (period.failed, period.broken) == (0, []), period


@only_beside_kube_proxy
async def test_the_owner_is_told_what_the_class_cannot_do(shop: NodesShop) -> None:
    async def reasons() -> set[str]:
        async with shop.site.client() as client:
            events = await client.list(EVENTS, namespace="default")
        return {each.reason for each in events}

    wanted = {"ConnectionsNotKept", "SharesByNode", "AddressAnnounced"}

    async def told() -> bool:
        return await reasons() >= wanted

    await until(told, f"Events {wanted}")
    state = json.loads(await output(shop.site, "node1", "curl", "-s", "127.0.0.1:9442/state"))
    assert state["services"]["default/web"]["plan"]["announcements"][0]["weight"] == 3


@only_beside_kube_proxy
async def test_a_node_joins_and_the_last_pod_of_a_node_leaves_without_failed_connections(
    shop: NodesShop,
) -> None:
    """A node is withdrawn before its pod stops answering, and joins after its rules are there."""

    async def move() -> None:
        shop.placement = MOVED
        await shop.place(MOVED)

    async with operators.load(shop) as load:

        async def all_answer() -> bool:
            return (await load.take()).nodes.keys() == set(PLACEMENT)

        await until(all_answer, "answers of all nodes with pods")
        period = await load.counts_during(move())
    check_served(period)
    assert "node4" in period.nodes, period


@only_beside_kube_proxy
async def test_a_node_that_is_excluded_or_shuts_down_announces_nothing(shop: NodesShop) -> None:
    async def label(value: str | None) -> None:
        async with shop.site.client() as client:
            body = {"metadata": {"labels": {EXCLUDE: value}}}
            await client.patch(NODES, ObjectKey("", "node1"), body)

    async def report(*conditions: Mapping[str, str]) -> None:
        """Report the node as its kubelet does."""
        async with shop.site.client() as client:
            body = {"status": {"conditions": conditions}}
            await client.patch(NODES, ObjectKey("", "node1"), body, subresource="status")

    shop.placement = MOVED
    await shop.place(MOVED)
    await label("")
    await shop.await_nodes("node2", "node4")
    await label(None)
    await shop.await_weights(MOVED)
    await report({"type": "Ready", "status": "False", "message": "node is shutting down"})
    await shop.await_nodes("node2", "node4")
    await report()
    await shop.await_weights(MOVED)


async def test_policy_cluster_and_back_to_policy_local(shop: NodesShop) -> None:
    """With policy Cluster all nodes announce, with equal weights. If this role is the service
    proxy, a node without pods still serves after its withdrawal, so no connection is lost."""

    async def flip(policy: str) -> None:
        async with shop.site.client() as client:
            body = {"spec": {"externalTrafficPolicy": policy}}
            await client.patch(SERVICES, ObjectKey("default", "web"), body)

    async with operators.load(shop) as load:
        await load.take()
        await flip("Cluster")
        await shop.await_weights(("node1", "node2", "node3", "node4"))
        period = await load.take()
        check_served(period)
        await flip("Local")
        await shop.await_nodes(*set(shop.placement))
        period = await load.take()
        if shop.site.size.node_proxy == "fairlead":
            check_served(period)
        else:
            # kube-proxy applies policy Local while routers remove the routes, so first packets to
            # nodes without pods may be lost meanwhile. Nothing is refused.
            assert period.failures.keys() <= {MOVED_CONNECTION, LOST}, period
            assert period.unconnected >= period.failures.get(LOST, 0), period
        await until(lambda: unharmed(load), "answers to all clients")
        period = await load.counts_during(asyncio.sleep(0))
    check_served(period)
    assert set(period.clients) == {shop.site.topology.host(CLIENT).addresses[0]}, period


@only_beside_kube_proxy
async def test_without_a_ready_pod_the_address_is_withdrawn_everywhere(shop: NodesShop) -> None:
    await shop.end(await shop.pods())
    await shop.await_nodes()
    await shop.start(["node2"])
    await shop.await_nodes("node2")
