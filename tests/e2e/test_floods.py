"""Floods of SYNs and of datagrams from spoofed sources: open connections stay open, and new clients
connect.

The slots are in transition, so that each packet of the flood may create a flow entry, which could
evict the entries of real flows. All memory is bounded: the tables in the kernel have a fixed size,
and the process does not receive the packets."""

import json
import os
import sys
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path

import pytest
import pytest_asyncio
from tests.e2e.crowd import Crowd, Shop, check_unharmed, summary, without_moved_flows
from tests.e2e.load import CLIENT, GATEWAY, output
from tests.e2e.test_shares import SINK, SOURCES

from fairlead.lab import process
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.net.bpf import Map

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

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
        gone = await shop.pods_of_down_nodes(since)
        check_unharmed(without_moved_flows(period, FEW, gone), gone)
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
