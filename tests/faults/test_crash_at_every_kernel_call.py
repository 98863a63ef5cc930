"""A gateway and a node are killed at the calls by which they change the kernel, and the next start
completes the change.

A run without kills records the calls of each change and the resulting state of the kernel. Then the
change is repeated; each time the role is killed at another of its calls, and finally after all of
them. Among calls of one type (the pins of all maps) it is killed at the first and at another one,
which FAIRLEAD_SEED chooses. It is killed before the kernel receives the call, which also tests the
state after the previous call. After each kill the role starts again. Packets must then reach the
pods that the rules require, and the kernel must contain the same pins, entries and rules as in the
run without kills."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from tests.e2e.load import GATEWAY, NAME, Web, fetch, until
from tests.e2e.oracle import Target
from tests.e2e.packets import Probe, Prober, read_cluster, sources_of
from tests.faults.traced import Traced

from fairlead.kube.answers import NotFound
from fairlead.kube.objects import SERVICES
from fairlead.lab.site import Site

pytestmark = [
    pytest.mark.long,
    pytest.mark.random,
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
]

SEED = int(os.environ.get("FAIRLEAD_SEED") or 77)
NODE = "node1"
PLACEMENT = (NODE, "node2")
DEADLINE_S = 60.0
POOL_FIRST = "203.0.113.10"
"""The address that the lab's only Service gets."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web() -> AsyncIterator[Web]:
    async with Site.create(f"calls{os.getpid()}", nodes=2, gateways=1, clients=1) as site:
        web = Web(site, [POOL_FIRST])
        await create(web)
        await web.place(PLACEMENT)
        yield web


async def check_packets(web: Web) -> None:
    """Check connections from outside and from the nodes to the Service's address."""
    async with web.site.client() as client:
        cluster = await read_cluster(client)
        sources = [
            source for source in sources_of(web.site, cluster) if source.kind in ("client", "node")
        ]
        probes = [Probe(source, Target(web.address, 80, "TCP"), 4) for source in sources]
        await Prober(web.site, lambda: read_cluster(client)).agree(probes, deadline_s=DEADLINE_S)


async def until_kernel_state(traced: Traced, wanted: Any, when: str) -> None:
    """Wait until the kernel contains the expected state."""
    seen: list[Any] = [None]

    async def equal() -> bool:
        seen[0] = await traced.left()
        return bool(seen[0] == wanted)

    try:
        await until(equal, when)
    except AssertionError:
        raise AssertionError(
            f"{traced.host}, {when}: the kernel contains\n{seen[0]}\ninstead of\n{wanted}"
        ) from None


def kill_points(calls: Sequence[str]) -> list[int]:
    """Return the calls at which to kill, counted from 1; the last number means after all of
    them."""
    chance = random.Random(f"{SEED} {len(calls)}")
    alike: dict[str, list[int]] = {}
    for number, call in enumerate(calls, 1):
        alike.setdefault(kind_of(call), []).append(number)
    others = [chance.choice(rest) for _, *rest in alike.values() if rest]
    return sorted([first for first, *_ in alike.values()] + others + [len(calls) + 1])


def kind_of(call: str) -> str:
    """Return the type of a call, in which all paths are equal."""
    return call.partition(" /")[0]


async def through(web: Web, victims: Sequence[Traced], come: Awaitable[object]) -> dict[str, str]:
    """Wait until the change is complete, and restart roles that are killed at their call. Return
    the call at which each role was killed. Roles that did not make such a call are killed after
    their last one."""
    async with asyncio.TaskGroup() as group:
        reviving = {victim: group.create_task(victim.restart_after_kill()) for victim in victims}
        await come
        for victim, task in reviving.items():
            await victim.quiet()
            if not victim.killed:
                task.cancel()
    for victim, task in reviving.items():
        if task.cancelled():
            await restart_clean(victim)
    return {victim.host: task.result() for victim, task in reviving.items() if not task.cancelled()}


async def restart_clean(victim: Traced) -> None:
    await victim.release()
    await victim.site.start_role(victim.host)


async def served(web: Web, host: str) -> None:
    """Wait until this host's role is ready, and the Service served."""

    async def ready() -> bool:
        return bool((await fetch(web.site, host, "/state")).get("ready"))

    await until(ready, f"readiness of {host}")
    await web.await_weights(PLACEMENT)
    await check_packets(web)


@pytest.mark.parametrize("host", [pytest.param(GATEWAY, marks=pytest.mark.soak), NODE])
async def test_the_next_start_completes_the_work_after_a_kill_during_the_first_start(
    web: Web, host: str
) -> None:
    traced = Traced(web.site, host)
    await traced.release()
    await traced.clean()
    await traced.start()
    await served(web, host)
    wanted, calls = await traced.left(), await traced.quiet()
    deaths: list[str] = []
    for number in kill_points(calls):
        await traced.release()
        await traced.clean()
        await traced.start(number)
        died = await through(web, [traced], served(web, host))
        await until_kernel_state(traced, wanted, f"killed at call {number}: {died}")
        deaths += died.values()
    print(f"{host} died at {len(deaths)} of {len(calls)} calls: {deaths}")
    assert len(deaths) >= (15 if host == GATEWAY else 2)


class Change(NamedTuple):
    """A change of the Service, and the pods that serve afterwards."""

    name: str
    act: Callable[[Web], Awaitable[object]]
    placement: tuple[str, ...]
    there: bool = True


async def set_ready(web: Web, ready: bool) -> None:
    """Set the readiness of the pod on the second node."""
    name = next(name for name, node in (await web.pods()).items() if node == "node2")
    await web.set_ready(name, ready=ready)


async def create(web: Web) -> None:
    """Create the Service, always with the same addresses and ports, so that rules can be
    compared."""
    port = {"port": 80, "targetPort": "http", "nodePort": 31080}
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": NAME},
        "ports": [port],
    }
    fixed = {"clusterIP": "10.96.7.7", "healthCheckNodePort": 31081}
    metadata = {"name": NAME, "namespace": "default"}
    await web.site.apply(
        [{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec | fixed}]
    )


async def delete(web: Web) -> None:
    async with web.site.client() as client:
        await client.delete(SERVICES, ("default", NAME))


CHANGES = (
    Change("a pod turns unready", lambda web: set_ready(web, False), (NODE,)),
    Change("the pod turns ready", lambda web: set_ready(web, True), PLACEMENT),
    Change("the Service is deleted", delete, (), there=False),
    Change("the Service is created", create, PLACEMENT),
)


async def await_change(web: Web, change: Change) -> None:
    """Wait until the Service is changed and served accordingly."""
    if change.there:
        await web.await_weights(change.placement)
        await check_packets(web)
        return

    async def gone() -> bool:
        async with web.site.client() as client:
            try:
                await client.get(SERVICES, ("default", NAME))
            except NotFound:
                return not await web.members()
        return False

    await until(gone, "the removal of the Service")


@pytest.mark.soak
async def test_the_next_start_completes_a_change_after_a_kill_during_it(web: Web) -> None:
    """Gateway and node are killed in the same change, each at its own call."""
    both = [Traced(web.site, host) for host in (GATEWAY, NODE)]
    wanted: dict[tuple[str, str], Any] = {}
    calls: dict[tuple[str, str], list[str]] = {}
    # The retained state of a listener depends on whether it was used.
    await check_packets(web)
    for change in CHANGES:
        for each in both:
            await each.follow()
        await change.act(web)
        await await_change(web, change)
        calls |= {(change.name, each.host): await each.quiet() for each in both}
        wanted |= {(change.name, each.host): await each.left() for each in both}
        for each in both:
            await restart_clean(each)
    numbers = {who: kill_points(made) for who, made in calls.items()}
    deaths: dict[tuple[str, str], list[str]] = {who: [] for who in calls}
    for turn in range(max(map(len, numbers.values()))):
        for change in CHANGES:
            victims = [each for each in both if numbers[change.name, each.host][turn:]]
            for victim in victims:
                await victim.follow(numbers[change.name, victim.host][turn])
            await change.act(web)
            died = await through(web, victims, await_change(web, change))
            for host, call in died.items():
                deaths[change.name, host].append(call)
            for each in both:
                await until_kernel_state(
                    each,
                    wanted[change.name, each.host],
                    f"{change.name}, turn {turn}, died: {died}",
                )
    for who, died_at in deaths.items():
        print(f"{who}: {len(died_at)} deaths in {len(calls[who])} calls: {died_at}")
    assert all(deaths.values())
