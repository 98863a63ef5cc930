"""Health ports under a flood: `fairlead node` and the real kube-proxy, on two nodes of one lab.

`python -m bench.health_flood`, as root. In: optionally the types of flood. Out: a table with the
median and the worst response time of both, in milliseconds, for each type of flood (see
`bench/flooding.py`) from one source and from several, and how often two probes in sequence would
have failed at a gateway, whose timeout is 150 ms. A host that takes no part in the flood probes
both ports of a node ten times a second, on a new connection each time. Floods alternate between the
two nodes.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fairlead.errors import Unavailable
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.lab import kubeproxy
from fairlead.lab.site import Site

FLOODING = Path(__file__).with_name("flooding.py")
KINDS = ("none", "pipelined", "bursts", "many", "slow", "all")
SUBJECTS = {"fairlead": "node1", "kube-proxy": "node2"}
PROBER = "client1"
FLOODERS = ("client2", "client3", "client4")
FLOODED_S, SETTLED_S = 6.0, 1.0
EVERY_S, TIMEOUT_S, PATIENCE_S = 0.1, 0.15, 5.0
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"


class Row(NamedTuple):
    """One line of the table. `lost` is the number of pairs of consecutive probes that both exceeded
    a gateway's timeout."""

    kind: str
    sources: int
    subject: str
    answers: Sequence[float]
    lost: int

    def __str__(self) -> str:
        worst, median = max(self.answers) * 1000, statistics.median(self.answers) * 1000
        return (
            f"{self.kind:10} {self.sources:7} {self.subject:11} {len(self.answers):7} "
            f"{median:10.1f} {worst:10.1f} {self.lost:5}"
        )


HEADER = (
    f"{'FLOOD':10} {'SOURCES':>7} {'SUBJECT':11} {'ANSWERS':>7} {'MEDIAN ms':>10} "
    f"{'WORST ms':>10} {'LOST':>5}"
)


async def answered_after_s(site: Site, address: str, port: int) -> float:
    """Return how long a new connection with one request takes; PATIENCE_S if it is not answered
    with 200 within this time."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await site.connect(PROBER, address, port, timeout_s=PATIENCE_S)
            writer.write(REQUEST)
            answer = await reader.readline()
            writer.transport.abort()
    except (TimeoutError, Unavailable, OSError):
        return PATIENCE_S
    return time.monotonic() - began_s if b" 200 " in answer else PATIENCE_S


@asynccontextmanager
async def flooded(
    site: Site, kind: str, sources: int, address: str, ports: Sequence[int]
) -> AsyncIterator[None]:
    running = []
    try:
        for place in FLOODERS[:sources] if kind != "none" else ():
            argv = [sys.executable, "-P", str(FLOODING), kind, "any", address, *map(str, ports)]
            running.append(
                site.spawn(
                    place, argv, label=f"flood/{place}", log=site.directory.path / f"flood-{place}"
                )
            )
        await asyncio.sleep(SETTLED_S)
        yield
    finally:
        for each in running:
            await each.kill()


async def measure(site: Site, kind: str, sources: int, subject: str, health_port: int) -> Row:
    address = site.topology.host(SUBJECTS[subject]).addresses[0]
    ports = (kubeproxy.HEALTH_PORT, health_port)
    async with flooded(site, kind, sources, address, ports):
        answers: dict[int, list[float]] = {port: [] for port in ports}
        end_s = time.monotonic() + FLOODED_S
        while time.monotonic() < end_s:
            for port in ports:
                answers[port].append(await answered_after_s(site, address, port))
            await asyncio.sleep(EVERY_S)
    lost = sum(min(pair) > TIMEOUT_S for each in answers.values() for pair in pairwise(each))
    return Row(kind, sources, subject, [each for port in ports for each in answers[port]], lost)


async def serve(site: Site) -> int:
    """Create a Service with a pod on both nodes, and start both service proxies. Return the
    Service's healthCheckNodePort."""
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"web-{node}", "labels": {"app": "web"}},
        }
        | {"spec": {"nodeName": node, "containers": [{"name": "echo", "image": "echo"}]}}
        for node in SUBJECTS.values()
    ]
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": "web"},
        "ports": [{"port": 80, "targetPort": 8080}],
    }
    await site.apply(
        [*pods, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec}]
    )
    await site.await_pods()
    await site.start_role(SUBJECTS["fairlead"])
    await kubeproxy.start(site, SUBJECTS["kube-proxy"])
    async with site.client() as client:
        return (await client.get(SERVICES, ObjectKey("default", "web"))).spec.health_check_node_port


async def main() -> None:
    async with Site.create(
        f"floods{os.getpid()}", nodes=2, gateways=0, clients=4, roles=False
    ) as site:
        port = await serve(site)
        for node in SUBJECTS.values():
            while (
                await answered_after_s(site, site.topology.host(node).addresses[0], port)
                >= PATIENCE_S
            ):
                await asyncio.sleep(EVERY_S)
        print(HEADER)
        for kind in sys.argv[1:] or KINDS:
            for sources in (1, len(FLOODERS)) if kind != "none" else (0,):
                for subject in SUBJECTS:
                    print(await measure(site, kind, sources, subject, port), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
