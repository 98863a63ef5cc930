"""The parts of `bench.announce` without steady callers: the time to a first answer, the shares of
pods, a thousand addresses, and the cost of an idle system.

In: a `Subject`. Out: values of `announced`. Each function restores the lab.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from bench.announced import Idle, Many, Share
from bench.announcers import PLACEMENT, Subject, answer, until
from bench.arp import asked
from bench.callers import CLIENT
from bench.paths import must

from fairlead.errors import Unavailable
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES
from fairlead.lab import process
from fairlead.lab.topology import ROUTER
from fairlead.probe.burst import Tally

ATTEMPT_EVERY_S, ATTEMPT_S = 0.005, 1.0
MANY_WITHIN_S = 300.0
AT_ONCE = 16
SETTLE = 6
"""A system is idle after this multiple of the time for which its cost is measured."""


async def first_answer_ms(subject: Subject, way: str, number: int) -> float:
    """Create a Service with an address of its own. Return the time from the creation to the first
    answer. A new connection is attempted each `ATTEMPT_EVERY_S`, whether or not earlier ones have
    been answered."""
    address, manifest = subject.another_service(way, number)
    async with subject.site.client() as client:
        begun_s = time.monotonic()
        await client.create(SERVICES, manifest)
        pending: set[asyncio.Task[bool]] = set()
        try:
            while time.monotonic() - begun_s < MANY_WITHIN_S:
                attempt = answer(subject.site, address, timeout_s=ATTEMPT_S)
                pending.add(asyncio.ensure_future(attempt))
                done, pending = await asyncio.wait(pending, timeout=ATTEMPT_EVERY_S)
                if any(each.result() for each in done):
                    return (time.monotonic() - begun_s) * 1000
                await asyncio.sleep(0 if not done else ATTEMPT_EVERY_S)
            raise Unavailable(f"{address} ({way}) did not answer within {MANY_WITHIN_S:.0f} s")
        finally:
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await client.delete(SERVICES, ("default", manifest["metadata"]["name"]))


async def share(subject: Subject, way: str, connections: int) -> Share:
    """Return how this number of connections is distributed over the pods."""
    argv = [sys.executable, "-m", "fairlead.probe", "burst", subject.addresses[way][0], "80"]
    argv += ["--connections", str(connections), "--concurrency", "32"]
    code, output, errors = await subject.site.exec(CLIENT, argv, timeout_s=300)
    if code:
        raise Unavailable(f"the burst of connections to {way} ended with {code}: {errors}")
    tally = msgspec.json.decode(output, type=Tally)
    return Share(tally.answered, tally.failed, tally.by_pod, len(PLACEMENT))


async def many(subject: Subject, way: str, addresses: int, idle_s: float) -> Many:
    """Create this number of Services with an address of their own each. Return how long it takes
    until all addresses are reached: until the router's kernel has a route to each, or each answers
    ARP on the router's link. Also return the cost of the system when nothing happens any more."""
    prefix = await subject.add_pool(way)
    manifests = [subject.service_of_pool(way, number) for number in range(addresses)]
    site = subject.site

    async def routed() -> bool:
        text = await must(site, ROUTER, f"ip -json route show root {prefix}")
        return len(json.loads(text or "[]")) >= addresses

    async with AsyncExitStack() as stack:
        reached = routed
        if way.endswith(" l2"):
            reached = (await stack.enter_async_context(asked(site, prefix, addresses))).all_answered
        client = await stack.enter_async_context(site.client())
        begun_s = time.monotonic()
        await _all(client, manifests)
        created_s = time.monotonic() - begun_s
        try:
            await until(reached, f"{addresses} addresses of {way}", within_s=MANY_WITHIN_S)
            reached_s = time.monotonic() - begun_s
            # Events, conditions and reports are still written for a while.
            await asyncio.sleep(SETTLE * idle_s)
            return Many(addresses, created_s, reached_s, await idle(subject, idle_s))
        finally:
            await _all(client, manifests, delete=True)


async def _all(
    client: Client, manifests: Sequence[dict[str, object]], *, delete: bool = False
) -> None:
    """Create or delete Services, a few at a time."""
    waiting = list(reversed(manifests))

    async def work() -> None:
        while waiting:
            manifest = waiting.pop()
            if delete:
                metadata = manifest["metadata"]
                assert isinstance(metadata, dict)
                await client.delete(SERVICES, ("default", metadata["name"]))
            else:
                await client.create(SERVICES, manifest)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


async def idle(subject: Subject, seconds: float) -> Idle:
    """Return the cost of all processes of the system while nothing happens."""
    pids = [
        each.pid
        for each in process.find(subject.site.name)
        if each.label.partition("/")[2] in subject.programs
        and each.label.partition("/")[0] != ROUTER
    ]
    before_s, begun_s = sum(map(_cpu_s, pids)), time.monotonic()
    await asyncio.sleep(seconds)
    used_s, took_s = sum(map(_cpu_s, pids)) - before_s, time.monotonic() - begun_s
    return Idle(len(pids), used_s / took_s, sum(map(resident_mib, pids)))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20
