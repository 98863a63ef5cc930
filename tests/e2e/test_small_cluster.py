"""What the gateways of a small cluster cost, where they run on every node, and how soon a new
Service answers: the table of docs/performance.md, section "A small cluster". `pytest -s` shows it.
"""

import asyncio
import os
import time
from pathlib import Path
from statistics import median

import pytest
from bench.rig import cpu_s, kernel_mib, with_children
from tests.e2e.load import addresses_of, output
from tests.e2e.test_announce_l2 import NODES, pod, service

from fairlead.cli.output import draw
from fairlead.lab import process
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.asyncio]

SERVICES = 10
IDLE_S = 60.0
MAX_MIB = 180
"""Of one gateway, with its maps and its prober."""


async def test_gateways_on_every_node_of_a_small_cluster_take_little_memory() -> None:
    lab = Site.create(f"few{os.getpid()}", nodes=3, gateways_on_nodes=True, announce="l2")
    async with lab as site:
        await site.apply([pod(node) for node in NODES])
        await site.await_pods()
        answered_s = [await answered(site, f"web{number}") for number in range(SERVICES)]
        gateways = [process.one(site.name, f"{node}/gateway").pid for node in NODES]
        before_s = [cpu_s(each) for each in gateways]
        await asyncio.sleep(IDLE_S)
        idle = [cpu_s(each) - before for each, before in zip(gateways, before_s, strict=True)]
        rows, sums = [], []
        for node, pid, used_s in zip(NODES, gateways, idle, strict=True):
            kernel = sum(map(kernel_mib, with_children(pid)))
            shares = [resident_mib(each) for each in with_children(pid)]
            sums.append(kernel + sum(share["Pss"] for share in shares))
            rows.append(
                (
                    node,
                    f"{kernel:.0f} MiB",
                    " + ".join(f"{share['Rss']:.0f}" for share in shares) + " MiB",
                    " + ".join(f"{share['Pss']:.0f}" for share in shares) + " MiB",
                    f"{used_s / IDLE_S:.1%}",
                )
            )
    draw(("NODE", "MAPS", "RSS", "PSS", "IDLE CPU"), rows)
    print(f"first answer: median {median(answered_s):.2f} s, worst {max(answered_s):.2f} s")
    assert max(sums) < MAX_MIB


async def answered(site: Site, name: str) -> float:
    """Create a Service. Return the seconds until a client outside gets an answer."""
    begun_s = time.monotonic()
    await site.apply([service(name)])
    address = (await addresses_of(site, name))[0]
    await output(
        *(site, "client1", "curl", "-s", "--retry", "100", "--retry-delay", "0"),
        *("--retry-all-errors", "--connect-timeout", "0.2", f"http://{address}/"),
    )
    return time.monotonic() - begun_s


def resident_mib(pid: int) -> dict[str, float]:
    """Return the fields of smaps_rollup (proc(5)), in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {
        name: int(value.split()[0]) / 1024
        for name, _, value in (line.partition(":") for line in lines)
    }
