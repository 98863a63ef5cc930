"""Floods of SYNs and of datagrams from spoofed sources: open connections stay open, and new clients
connect.

The slots are in transition, so that each packet of the flood may create a flow entry, which could
evict the entries of real flows. All memory is bounded: the tables in the kernel have a fixed size,
and the process does not receive the packets."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
import pytest_asyncio
from tests.e2e.crowd import Crowd, Shop, check_unharmed, summary, without_moved_flows
from tests.e2e.load import CLIENT, GATEWAY, output, until
from tests.e2e.test_shares import SINK, SOURCES

from fairlead.errors import Unavailable
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import process
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.net.bpf import Map
from fairlead.probe.exchange import REQUEST_KEEP, parse

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

COUNT, PER_S = 100_000, 20_000
FEW = 15
"""The number of UDP flows, out of 300, of which the gateway may have seen only one packet when the
flood starts."""
MEMORY_KIB = 16 << 10
"""The permitted growth of the process's memory after a flood of 200,000 packets. A hundred bytes
for each packet, less than a table entry takes in Python, would exceed it; memory that the allocator
reserves does not."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop() -> AsyncIterator[Shop]:
    async with Site.create(f"flood{os.getpid()}", nodes=3, gateways=1, clients=1) as site:
        for sources in ("198.19.0.0/16", "2001:db8:bad::/64"):
            # The spoofed sources do not exist, so the router drops the pods' answers to them.
            await output(site, ROUTER, "ip", "route", "add", "blackhole", sources)
        shop = Shop(site)
        await shop.start(["node1", "node2"])
        await shop.create()
        await shop.await_weights(["node1", "node2"])
        yield shop


def entries(site: Site, *names: str) -> int:
    """Return the number of flow entries in these tables."""
    (layout,) = site.directory.pins(GATEWAY).glob("layout-*")
    total = 0
    for name in names:
        table = Map.open(layout / name)
        total += sum(1 for _ in table.items())
        table.close()
    return total


def memory_kib(site: Site) -> int:
    """Return the resident memory of the gateway's process."""
    status = Path(f"/proc/{process.one(site.name, f'{GATEWAY}/gateway').pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


async def flood(site: Site, kind: str, address: str, port: int) -> None:
    source = SOURCES[ip_address(address).version]
    options = ("--count", str(COUNT), "--per-second", str(PER_S))
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
    code, sent, errors = await site.exec(CLIENT, argv, timeout_s=60)
    assert (code, sent.strip()) == (0, str(COUNT)), errors


@pytest.mark.parametrize(
    ("kind", "port", "table"), [("tcp", 80, "connections"), ("udp", 53, "datagrams")]
)
async def test_a_flood_breaks_no_flow_and_evicts_no_flow_entry(
    shop: Shop, kind: str, port: int, table: str
) -> None:
    site = shop.site
    await shop.place(["node1", "node2"])
    async with Crowd(shop, tcp=500, udp=100, quic=50, new_per_s=100) as crowd:
        await shop.place(["node1", "node2", "node3", "node3"])
        if kind == "udp":
            # Pods drop the requests of the flood: its effect on pods is not tested.
            for pod in await shop.pods():
                await output(site, f"default/{pod}", "nft", SINK)
        known, before_kib = entries(site, table), memory_kib(site)

        async def both() -> None:
            for address in shop.addresses:
                await flood(site, kind, address, port)

        since = shop.down_verdicts()
        period = await crowd.counts_during(both())
        print(summary(period))
        check_unharmed(without_moved_flows(period, FEW), await shop.pods_of_down_nodes(since))
        half_known = entries(site, f"new_{table}")
        print(
            json.dumps(
                {
                    "known": known,
                    "after": entries(site, table),
                    "half known": half_known,
                    "KiB": memory_kib(site),
                }
            )
        )
        # No entry of the flood remains, and no earlier entry was evicted.
        opened = sum(count.new for count in period.values())
        assert known <= entries(site, table) <= known + opened
        assert half_known > COUNT // 10
        assert memory_kib(site) - before_kib < MEMORY_KIB


SILENT = 60
FORGED = 280_000
"""The number of forged connections, of two segments each: more than the tables can hold."""
SEGMENTS_PER_S = 48_000
"""Within the part of the rate of new entries for one of two CPUs that a namespace may use. This CPU
may get all segments."""


def greedy(name: str, node: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "greedy", "labels": {"app": "hog"}},
        "spec": {
            "nodeName": node,
            "containers": [
                {"name": "web", "image": "echo", "ports": [{"name": "http", "containerPort": 8080}]}
            ],
        },
    }


async def hog(site: Site) -> str:
    """Create a Service in another namespace, with a pod on one node, and return its address."""
    metadata = {"name": "hog", "namespace": "greedy"}
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": "hog"},
        "ports": [{"port": 80, "targetPort": "http"}],
    }
    await site.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "greedy"}}])
    await site.apply([greedy("hog1", "node1")])
    await site.apply([{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}])
    await site.await_pods()
    address = ""

    async def answers() -> bool:
        nonlocal address
        async with site.client() as client:
            service = await client.get(SERVICES, ObjectKey("greedy", "hog"))
        if not service.status.load_balancer.ingress:
            return False
        address = service.status.load_balancer.ingress[0].ip
        with suppress(Unavailable):
            _, writer = await site.connect(CLIENT, address, 80, timeout_s=1)
            writer.close()
            return True
        return False

    await until(answers, "the other Service")
    return address


async def test_forged_connections_to_one_namespace_break_no_silent_ones_of_another(
    shop: Shop,
) -> None:
    """Both Services are in transition: every new connection in a changed slot gets an entry. Six in
    seven slots of the flooded Service have changed, and half of those of the other one.
    This test is the last one of the lab, because it leaves pods in the other namespace."""
    site = shop.site
    await shop.place(["node1", "node2"])
    address = await hog(site)
    # Tables that no packet has used yet are replaced without a transition.
    _, writer = await site.connect(CLIENT, shop.address, 80)
    writer.close()
    more = {f"hog{number}": f"node{2 + number % 2}" for number in range(2, 8)}
    await site.apply([greedy(name, node) for name, node in more.items()])
    await shop.start(["node3", "node3"])  # `place` would count the pods of the other Service
    await shop.await_weights(["node1", "node2", "node3", "node3"])
    for name in ("hog1", *more):
        await output(site, f"greedy/{name}", "nft", SINK)
    silent = [await site.connect(CLIENT, shop.address, 80) for _ in range(SILENT)]

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(REQUEST_KEEP)
        received = b""
        async with asyncio.timeout(5):
            while not (answer := parse(received)):
                if not (some := await reader.read(1 << 16)):
                    raise ConnectionError("the server closed the connection")
                received += some
        return answer.pod

    # Half of them send a request first, which lets the kernel evict their entries later.
    asked = silent[: SILENT // 2]
    pods = [await ask(*each) for each in asked]
    argv = [sys.executable, "-m", "fairlead.probe", "flood", "connection", SOURCES[4], address]
    argv += ["80", "--count", str(FORGED), "--per-second", str(SEGMENTS_PER_S)]
    code, sent, errors = await site.exec(CLIENT, argv, timeout_s=120)
    assert (code, sent.strip()) == (0, str(2 * FORGED)), errors
    after = await asyncio.gather(*(ask(*each) for each in silent), return_exceptions=True)
    broken = [repr(now) for now in after if isinstance(now, BaseException)]
    for _, writer in silent:
        writer.close()
    (layout,) = site.directory.pins(GATEWAY).glob("layout-*")
    tables = [
        each.name for each in layout.iterdir() if each.name in ("connections", "excess_flows")
    ]
    print(json.dumps({"broken": len(broken), **{name: entries(site, name) for name in tables}}))
    assert not broken, broken
    assert after[: len(pods)] == pods
