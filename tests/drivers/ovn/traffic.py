"""A driver connected to a real OVN, and connections of clients through it."""

import asyncio
import json
import math
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from tests.drivers.ovn.rows import WEB, intent

from fairlead.drivers.ovn.driver import OvnDriver
from fairlead.drivers.ovn.spec import Site
from fairlead.errors import Conflict, Unavailable
from fairlead.lab import namespace
from fairlead.lab.ovn.central import Central
from fairlead.lab.ovn.layout import PODS, ROUTER
from fairlead.lab.ovn.site import OvnSite
from fairlead.model import LoadBalancer, Outcome, ServiceKey

DEADLINE_S = 60.0
CONNECTIONS = 800
MARKED = "fairlead.io/cluster"
AGAIN_S = 1.0
"""On a busy machine, chassis may miss each other's messages, and the gateway port then moves. TCP
repeats what is lost meanwhile; a datagram is repeated after this time."""
LINGER = struct.pack("ii", 1, 0)
"""Close a connection without waiting, so that the client does not run out of ports."""


@asynccontextmanager
async def running(
    site: OvnSite | Central, own: Site | None = None, **given: Any
) -> AsyncIterator[OvnDriver]:
    """Run a driver for this cluster during the block."""
    central = site.central if isinstance(site, OvnSite) else site
    driver = OvnDriver(
        own or Site("c1", ROUTER, (PODS,)),
        [central.remote("nb")],
        southbound=[central.remote("sb")],
        **given,
    )
    task = asyncio.create_task(driver.run())
    try:
        await driver.wait_synced(DEADLINE_S)
        yield driver
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run_pass(
    driver: OvnDriver, *intents: LoadBalancer, keys: Sequence[ServiceKey] = (WEB,)
) -> Mapping[ServiceKey, Outcome]:
    """Make one pass for these Services, as the loop does."""
    desired = driver.render({each.service: each for each in intents})
    changes = driver.diff(desired, await driver.read(keys))
    try:
        return await driver.apply(changes) if changes else {}
    except Conflict:
        return dict.fromkeys(keys, Outcome("waiting"))
    except Unavailable as error:
        return dict.fromkeys(keys, Outcome("unavailable", str(error)))


async def settle(
    driver: OvnDriver, *intents: LoadBalancer, keys: Sequence[ServiceKey] = (WEB,)
) -> list[Outcome]:
    """Make passes until nothing is left to do. Return the outcomes of all passes."""
    found: list[Outcome] = []
    async with asyncio.timeout(DEADLINE_S):
        while True:
            desired = driver.render({each.service: each for each in intents})
            if not driver.diff(desired, await driver.read(keys)):
                return found
            found += (await run_pass(driver, *intents, keys=keys)).values()
            await asyncio.sleep(0.02)


class Answer(NamedTuple):
    """What a pod has seen: its name, the address of the client, and its own address."""

    pod: str
    peer: str
    local: str = ""


async def connect(inside: str, address: str, port: int = 80) -> socket.socket:
    """Return a connection from the namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = namespace.make_socket(inside, family)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


async def ask(connection: socket.socket) -> Answer:
    """Ask the pod at the other end what it sees."""
    loop = asyncio.get_running_loop()
    received = b""
    async with asyncio.timeout(DEADLINE_S):
        await loop.sock_sendall(connection, b"who\n")
        while not received.endswith(b"\n"):
            received += (part := await loop.sock_recv(connection, 4096))
            if not part:
                raise ConnectionResetError("the pod has closed the connection")
    found = json.loads(received)
    return Answer(found["pod"], found["peer"], found["local"])


async def call(inside: str, address: str, port: int = 80) -> Answer:
    """Return the answer over a new connection."""
    with await connect(inside, address, port) as connection:
        return await ask(connection)


async def calls(inside: str, address: str, count: int) -> tuple[Counter[str], set[str]]:
    """Return how often each pod answered, and the client addresses that pods saw."""
    pods: Counter[str] = Counter()
    peers: set[str] = set()
    for _ in range(count):
        answer = await call(inside, address)
        pods[answer.pod] += 1
        peers.add(answer.peer)
    return pods, peers


async def call_udp(inside: str, address: str, port: int = 80) -> Answer:
    """Return the answer to a datagram from a new port."""
    loop = asyncio.get_running_loop()
    with namespace.make_socket(inside, socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setblocking(False)
        await loop.sock_connect(client, (address, port))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await loop.sock_sendall(client, b"who\n")
                with suppress(TimeoutError):
                    received = await asyncio.wait_for(loop.sock_recv(client, 4096), AGAIN_S)
                    break
    found = json.loads(received)
    return Answer(found["pod"], found["peer"])


def served(site: OvnSite, *names: str, **fields: Any) -> LoadBalancer:
    """Return Service web with these pods; without names, with all pods."""
    chosen = [pod for pod in site.pods if not names or pod.name in names]
    nodes = {each: pod.chassis for pod in chosen for each in (pod.address, pod.address_v6)}
    return intent(list(nodes), nodes=nodes, **fields)


async def applied(site: OvnSite, driver: OvnDriver, *intents: LoadBalancer) -> None:
    """Make passes until nothing is left to do, and wait until packets are handled accordingly."""
    await settle(driver, *intents)
    await site.central.synchronize()


async def removed(site: OvnSite) -> None:
    """Remove all rows of the tests, so that each test begins without any."""
    rows = await site.central.rows("Load_Balancer")
    for row in rows:
        await site.central.control("nb", "lb-del", row["_uuid"])
    await site.central.synchronize()


async def foreign_dump(site: OvnSite) -> Mapping[str, Mapping[str, Any]]:
    """Return all rows of others, and the routers and switches without rows of Fairlead, by their
    UUIDs. Columns are left out in which northd reports the state of hypervisors."""
    rows = [*await site.central.rows("Load_Balancer")]
    ours = {row["_uuid"] for row in rows if row["external_ids"].get(MARKED) == "c1"}
    found: list[Mapping[str, Any]] = [row for row in rows if row["_uuid"] not in ours]
    for table in ("Logical_Router", "Logical_Switch"):
        for row in await site.central.rows(table):
            attached = row["load_balancer"]
            uuids = {attached} if isinstance(attached, str) else set(attached)
            found.append({**row, "load_balancer": sorted(uuids - ours)})
    for table in ("Logical_Router_Port", "Logical_Switch_Port", "NAT"):
        found += await site.central.rows(table)
    reported = ("up", "status")
    return {
        row["_uuid"]: {name: value for name, value in row.items() if name not in reported}
        for row in found
    }


async def until_answered(inside: str, address: str, port: int = 80) -> Answer:
    """Return the first answer. Connections fail before the flows are in place."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await call(inside, address, port)
            except OSError:
                await asyncio.sleep(0.05)


def shared(pods: Counter[str], weights: Mapping[str, int], deviations: int = 4) -> None:
    """Check that the connections of each pod are within so many standard deviations of its
    weight, and that no other pod has any."""
    assert pods.keys() <= weights.keys(), pods
    total = pods.total()
    for name, weight in weights.items():
        part = weight / sum(weights.values())
        deviation = math.sqrt(total * part * (1 - part))
        assert abs(pods[name] - total * part) < deviations * deviation, pods
