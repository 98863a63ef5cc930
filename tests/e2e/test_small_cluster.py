"""What the gateways of a small cluster cost, where they run on every node, and how soon a new
Service answers: the table of docs/performance.md, section "A small cluster". `pytest -s` shows it.
"""

import asyncio
import os
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
from bench.rig import kernel_mib, with_children
from tests.e2e.load import addresses_of, output
from tests.e2e.test_announce_l2 import NODES, pod, service

from fairlead.cli.output import draw
from fairlead.lab import process
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.asyncio]

SERVICES = 10
IDLE_S = 60.0
MAX_MIB = 100
"""Of one gateway, with its maps and its prober."""


async def test_gateways_on_every_node_of_a_small_cluster_take_little_memory() -> None:
    lab = Site.create(f"few{os.getpid()}", nodes=3, gateways_on_nodes=True, announce="l2")
    async with lab as site:
        await site.apply([pod(node) for node in NODES])
        await site.await_pods()
        answered_s = [await answered(site, f"web{number}") for number in range(SERVICES)]
        gateways = [process.one(site.name, f"{node}/gateway").pid for node in NODES]
        processes = {node: with_children(pid) for node, pid in zip(NODES, gateways, strict=True)}
        before_s = {pid: own_cpu_s(pid) for pids in processes.values() for pid in pids}
        await asyncio.sleep(IDLE_S)
        rows, sums = [], []
        for node, pids in processes.items():
            kernel = sum(map(kernel_mib, pids))
            sizes = [own_mib(pid) for pid in pids]
            sums.append(kernel + sum(size["Pss"] for size in sizes))
            rows.append(
                (
                    node,
                    f"{kernel:.1f} MiB",
                    " + ".join(f"{size['Rss']:.1f}" for size in sizes) + " MiB",
                    " + ".join(f"{size['Pss']:.1f}" for size in sizes) + " MiB",
                    f"{sums[-1]:.1f} MiB",
                    " + ".join(f"{(own_cpu_s(pid) - before_s[pid]) / IDLE_S:.2%}" for pid in pids),
                )
            )
    draw(("NODE", "MAPS", "RSS", "PSS", "SUM", "IDLE CPU"), rows)
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


def own_mib(pid: int) -> dict[str, float]:
    """Return the sums of the fields of smaps (proc(5)), in MiB, without the maps of the kernel that
    the process has mapped: `kernel_mib` contains them."""
    sizes, counts = defaultdict[str, float](float), True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            counts = not line.endswith("anon_inode:bpf-map")
        elif counts and values[-1] == "kB":
            sizes[name.removesuffix(":")] += int(values[0]) / 1024
    return sizes


def own_cpu_s(pid: int) -> float:
    """Return user and system time of the process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
