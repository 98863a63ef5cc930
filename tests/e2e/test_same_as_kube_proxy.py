"""`fairlead node` and the real kube-proxy, each on all nodes of its own lab, handle every packet
equally.

First come the cases of kube-proxy's own packet tests, from every source to every target, in two
configurations; then packets that are dropped or refused although they are for no Service, and
packets of open flows; then random Services and slices, created and changed. FAIRLEAD_SEED repeats a
run, FAIRLEAD_SERVICES sets its length."""

import asyncio
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
import yaml
from tests.e2e.load import output, until
from tests.e2e.oracle import Target
from tests.e2e.scenes import (
    CALLERS,
    INSIDE,
    NODES,
    OUTSIDE,
    PODS,
    RandomServices,
    Scene,
    ServiceFactory,
    endpoint,
    rows,
    slices_of,
)
from tests.e2e.twins import Probe, Twin, Twins

from fairlead.doctor.examine import examine
from fairlead.doctor.gather import Request
from fairlead.kube.objects import PODS as POD_OBJECTS
from fairlead.kube.objects import SERVICES as SERVICE_OBJECTS
from fairlead.lab import kubeproxy, namespace
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.model import ServiceKey

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SERVICES = int(os.environ.get("FAIRLEAD_SERVICES") or 40)
"""The number of random Services; each is created, and changed once."""
SEED = int(os.environ.get("FAIRLEAD_SEED") or 20)
BATCH = 40
ASKS = 5
"""The number of probes of a random Service at each step."""
SOURCES = (
    "client1",
    "client2",
    "node1",
    "node2",
    "default/a1",
    "default/caller1",
    "default/caller3",
)
POD_INTERFACES = "pod"
"""The prefix of the names of a lab's pod interfaces on nodes."""
CLUSTER_IPS = {"-4": "10.96.0.0/16", "-6": "2001:db8:96::/112"}


@asynccontextmanager
async def twin_labs(
    kube_proxy: Path, name: str = "", node_ports_at: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[Twins]:
    """Return two labs. `node_ports_at`: the only addresses of nodes (0: IPv4, 1: IPv6) at which
    NodePorts answer; such nodes recognize their pods by interfaces."""
    async with AsyncExitStack() as stack:
        made = []
        for side in ("ours", "theirs"):
            site = await stack.enter_async_context(
                Site.create(f"{side}{name}{os.getpid()}", nodes=3, clients=2, roles=False)
            )
            await prepare(site)
            twin = Twin(site, await stack.enter_async_context(site.client()))
            await twin.start_pods()
            stack.enter_context(twin.answering_sctp())
            made.append(twin)
        ours, theirs = made
        fields: dict[str, object] = {}
        if node_ports_at:
            hosts = [
                ours.site.topology.host(node).addresses[family] for node, family in node_ports_at
            ]
            cidrs = [f"{address}/{128 if ':' in address else 32}" for address in hosts]
            configured = yaml.safe_load(ours.site.directory.config.read_text())
            configured["node"] = {
                "podInterfaces": [f"{POD_INTERFACES}*"],
                "nodePortAddresses": cidrs,
            }
            ours.site.directory.config.write_text(yaml.safe_dump(configured))
            fields = {
                "detectLocalMode": "InterfaceNamePrefix",
                "detectLocal": {"interfaceNamePrefix": POD_INTERFACES},
            }
            fields |= {"clusterCIDR": "", "nodePortAddresses": cidrs}
        for node in NODES:
            await ours.site.start_role(node)
        await asyncio.gather(*(kubeproxy.start(theirs.site, node, fields) for node in NODES))
        # After the start: rarely, a kube-proxy ignored for good a zone that its node had before.
        await Twins(ours, theirs).both("label", {"node1": "east", "node2": "east", "node3": "west"})
        yield Twins(ours, theirs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twins(kube_proxy: Path) -> AsyncIterator[Twins]:
    async with twin_labs(kube_proxy) as made:
        yield made


async def prepare(site: Site) -> None:
    """Prepare a lab: node1 translates packets from outside, also for ClusterIPs, and the rate of
    ICMP errors is unlimited."""
    await site.route_vips(["node1"])
    for family, (four, six) in zip(
        CLUSTER_IPS, [site.topology.host("node1").addresses] * 2, strict=True
    ):
        through = six if family == "-6" else four
        await output(
            site, ROUTER, "ip", family, "route", "add", CLUSTER_IPS[family], "via", through
        )
    for host in (*site.topology.of("node"), *site.topology.of("client")):
        limits = {"net/ipv4/icmp_ratelimit": 0, "net/ipv6/icmp/ratelimit": 0}
        namespace.set_sysctls(site.namespace(host.name), limits)


def node_addresses(twins: Twins) -> Mapping[str, tuple[str, ...]]:
    """Return the addresses of each node, which are the same in both labs."""
    return {host.name: host.addresses for host in twins.ours.site.topology.of("node")}


def unserved_probes_of(twins: Twins, scene: Scene) -> list[Probe]:
    """Return probes from every source to ports that the Service does not have at its addresses."""
    unserved_frontends = scene.unserved_frontends(node_addresses(twins))
    return [
        Probe(scene.name, source, Target(*unserved), False)
        for unserved in unserved_frontends
        for source in SOURCES
    ]


def probes_of(twins: Twins, scene: Scene) -> list[Probe]:
    """Return probes from every source to every address of the Service."""
    nodes = node_addresses(twins)
    affine = scene.service["spec"].get("sessionAffinity") == "ClientIP"
    return [
        Probe(scene.name, source, Target(*frontend), affine)
        for frontend in scene.frontends(nodes)
        for source in SOURCES
        # With session affinity, an endpoint that calls its own Service reaches itself or another
        # endpoint at random.
        if not (affine and source == "default/a1" and "a1" in scene.endpoints)
        and not bypasses_the_reverse_translation(scene, source, frontend[0], nodes)
        and not is_hairpin_without_node_name(scene, source)
    ]


def bypasses_the_reverse_translation(
    scene: Scene, source: str, address: str, nodes: Mapping[str, tuple[str, ...]]
) -> bool:
    """Return whether a pod calls the NodePort of another node, with policy Local. kube-proxy takes
    the client for a pod of that node and does not translate its address. Any endpoint that is not
    on that node then answers the client directly, from an address that the client does not know.
    `fairlead node` treats the client as external, and an endpoint of that node answers."""
    node = PODS.get(source.removeprefix("default/")) or CALLERS.get(source.removeprefix("default/"))
    local = scene.service["spec"].get("externalTrafficPolicy") == "Local"
    return (
        local
        and node is not None
        and any(address in own for name, own in nodes.items() if name != node)
    )


def is_hairpin_without_node_name(scene: Scene, source: str) -> bool:
    """Return whether a pod calls a Service of which it is an endpoint whose slice names no node.
    kube-proxy rewrites the source of a hairpin call only for endpoints that are on its node
    according to the slice, so there is no answer; `fairlead node` rewrites it for these endpoints,
    too."""
    endpoints = (endpoint for each in scene.slices for endpoint in each["endpoints"])
    return any(
        source == f"default/{endpoint['pod']}" and "nodeName" not in endpoint
        for endpoint in endpoints
    )


async def agree(twins: Twins, scenes: Sequence[Scene], probes: Sequence[Probe]) -> None:
    found = await twins.differences(probes, scenes)
    by_name = {scene.name: scene for scene in scenes}
    shown = [
        json.dumps(by_name[name])
        for name in by_name
        if any(f"'{name}'" in each or f" {name}\n" in each for each in found[:5])
    ]
    assert not found, f"{len(found)} differences of seed {SEED}:\n" + "\n".join(
        [*found[:5], *shown]
    )


async def test_the_cases_of_upstream_tables_are_equal(twins: Twins) -> None:
    scenes = rows(ServiceFactory())
    await twins.both("show", scenes)
    probes = [
        probe
        for scene in scenes
        for probe in (*probes_of(twins, scene), *unserved_probes_of(twins, scene))
    ]
    await agree(twins, scenes, probes)
    await twins.both("remove", scenes)
    print(
        f"{len(scenes)} Services, {len(probes)} cases, {twins.ours.sent} and {twins.theirs.sent} "
        "packets"
    )


@pytest.mark.soak
async def test_the_cases_of_upstream_tables_are_equal_with_restricted_node_port_addresses(
    kube_proxy: Path,
) -> None:
    async with twin_labs(kube_proxy, "other", [("node1", 0), ("node2", 1)]) as twins:
        await test_the_cases_of_upstream_tables_are_equal(twins)


async def test_drops_and_refusals_affect_only_packets_that_nothing_serves(twins: Twins) -> None:
    """Drops and refusals must not affect packets that another program serves, but must affect
    packets of a flow that was never answered."""
    ports = [
        {"name": "web", "port": 80, "protocol": "TCP"},
        {"name": "syslog", "port": 514, "protocol": "UDP"},
    ]
    service = ServiceFactory().service("filtered", "LoadBalancer", ports=ports, ipFamilies=["IPv4"])
    slices = slices_of(service, [endpoint("a1")], {"web": 8080, "syslog": 9999})
    (ip,) = service["spec"]["clusterIPs"]
    first, second = (ServiceFactory().ingress(service, number)[0] for number in (130, 131))

    async def show(*ranges: str) -> None:
        spec = {**service["spec"], "loadBalancerSourceRanges": list(ranges)}
        await twins.both("show", [Scene({**service, "spec": spec}, slices, (first, second))])

    async with AsyncExitStack() as stack:
        flows = [stack.enter_context(one_way(twin.site, first["ip"])) for twin in twins]

        async def await_passing(wanted: bool) -> None:
            for each in flows:
                await until(
                    partial(each.passes, wanted),
                    f"datagrams that {'arrive' if wanted else 'are dropped'}",
                )

        await show()
        await await_passing(True)
        await show(*OUTSIDE)
        await await_passing(False)
        await show(*INSIDE, "192.0.2.0/24")
        await await_passing(True)
    for twin in twins:
        rules = f"ip daddr {ip} tcp dport 9001 dnat ip to {twin.address('a1')}:8080"
        async with (
            with_other_translation(twin.site, rules),
            with_address(twin.site, ip),
            with_address(twin.site, second["ip"]),
        ):
            with twin.site.socket("node1", socket.AF_INET, socket.SOCK_STREAM) as server:
                server.bind((ip, 9000))
                server.listen()
                assert await connects(twin.site, "node1", first["ip"], 80, source=second["ip"])
                assert await connects(twin.site, "default/caller1", ip, 9000)
                assert await connects(twin.site, "default/caller1", ip, 9001)
                assert not await connects(twin.site, "node1", ip, 9002)
    await twins.both("remove", [Scene(service, slices)])


async def test_the_doctor_names_a_fault_where_no_fairlead_runs(twins: Twins) -> None:
    """The other lab has no process of Fairlead. Its balancer is the route to node1, and who writes
    the status."""
    site = twins.theirs.site
    maker = ServiceFactory()
    service = maker.service(
        "shown",
        "LoadBalancer",
        ports=[{"name": "web", "port": 80, "protocol": "TCP", "targetPort": "web"}],
        ipFamilies=["IPv4"],
        externalTrafficPolicy="Local",
        selector={"tier": "shown"},
    )
    (shown,) = maker.ingress(service, 140)
    scene = Scene(service, (), (shown,))
    await twins.theirs.show([scene])
    request = Request((ServiceKey("default", "shown"),), "default", grace_s=0)

    async def is_answered() -> bool:
        return await connects(site, "client1", shown["ip"], 80)

    async with site.client() as client:
        for name in ("a1", "b1", "c1"):  # one on each node
            labels = {"metadata": {"labels": {"tier": "shown"}}}
            await client.patch(POD_OBJECTS, ("default", name), labels)
        await until(is_answered, "an answer")
        assert (await examine(client, request)).findings == ()
        typo = {"spec": {"selector": {"tier": "shwon"}}}
        await client.patch(SERVICE_OBJECTS, ("default", "shown"), typo)
        await until(lambda: is_not(is_answered), "no answer")
        (found,) = (await examine(client, request)).findings
        assert found.key == ("SelectorMatchesNothing", "Service default/shown")
    await twins.theirs.remove([scene])


async def is_not(condition: Callable[[], Awaitable[bool]]) -> bool:
    return not await condition()


@pytest.mark.random
async def test_random_services_are_served_equally(twins: Twins) -> None:
    draw, maker = random.Random(SEED), ServiceFactory()
    drawer, cases = RandomServices(draw, maker), 0
    for batch in range(-(-SERVICES // BATCH)):
        await twins.both("label", drawer.zones())
        scenes = [drawer.scene(f"s{batch}-{number}", number + 10) for number in range(BATCH)]
        for showing in (scenes, [drawer.changed(scene) for scene in scenes]):
            await twins.both("show", showing)
            probes = [
                probe for scene in showing for probe in _sample(draw, probes_of(twins, scene))
            ]
            await agree(twins, showing, probes)
            cases += len(probes)
        await twins.both("remove", showing)
    print(f"{SERVICES} Services, {cases} cases, {twins.ours.sent} and {twins.theirs.sent} packets")


class OneWayFlow(NamedTuple):
    """A UDP flow to a server that never answers."""

    server: socket.socket
    caller: socket.socket

    async def passes(self, wanted: bool) -> bool:
        """Return whether three datagrams have the desired result."""
        loop = asyncio.get_running_loop()
        for _ in range(3):
            came = False
            with suppress(BlockingIOError):
                while self.server.recv(100):
                    pass
            with suppress(TimeoutError, OSError):
                await loop.sock_sendall(self.caller, b"line")
                async with asyncio.timeout(0.3):
                    came = bool(await loop.sock_recv(self.server, 100))
            if came != wanted:
                return False
        return True


@contextmanager
def one_way(site: Site, address: str) -> Iterator[OneWayFlow]:
    """Open a flow from a client to port 514 of this address."""
    with (
        site.socket("default/a1", socket.AF_INET, socket.SOCK_DGRAM) as server,
        site.socket("client1", socket.AF_INET, socket.SOCK_DGRAM) as caller,
    ):
        for each in (server, caller):
            each.setblocking(False)
        server.bind(("", 9999))
        caller.connect((address, 514))
        yield OneWayFlow(server, caller)


@asynccontextmanager
async def with_other_translation(site: Site, rules: str) -> AsyncIterator[None]:
    """Add a table on node1 with a later priority than the service proxy's."""
    chain = f"chain prerouting {{ type nat hook prerouting priority -99; {rules}; }}"
    await output(site, "node1", "nft", f"table inet elsewhere {{ {chain}; }}")
    try:
        yield
    finally:
        await output(site, "node1", "nft", "delete table inet elsewhere")


@asynccontextmanager
async def with_address(site: Site, address: str) -> AsyncIterator[None]:
    """Add an address to node1."""
    await output(site, "node1", "ip", "address", "add", f"{address}/32", "dev", "lo")
    try:
        yield
    finally:
        await output(site, "node1", "ip", "address", "del", f"{address}/32", "dev", "lo")


async def connects(site: Site, place: str, address: str, port: int, *, source: str = "") -> bool:
    """Return whether a server accepts connections at this address and port."""
    with site.socket(place, socket.AF_INET, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        caller.bind((source, 0))
        try:
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().sock_connect(caller, (address, port))
        # Also a TimeoutError.
        except OSError:
            return False
        return True


def _sample(draw: random.Random, probes: list[Probe]) -> list[Probe]:
    return draw.sample(probes, min(ASKS, len(probes)))
