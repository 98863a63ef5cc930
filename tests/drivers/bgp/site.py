"""A host that announces, and values for tests: intents, peers, a driver that is reconciled as the
loop does it."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from fairlead.announce_sections import BgpConfig, BgpPeerSpec
from fairlead.drivers import Requeue, no_requeue
from fairlead.drivers.bgp import BirdDriver, Peer, RoutesDriver
from fairlead.model import Announcement, Outcome, ServiceKey

WEB, API = ServiceKey("default", "web"), ServiceKey("default", "api")
VIP, VIP6 = "203.0.113.7", "2001:db8:f::7"
HOST, ROUTER = "198.51.100.1", "198.51.100.254"
HOST6, ROUTER6 = "2001:db8:1::1", "2001:db8:1::254"


class Intent(msgspec.Struct, frozen=True):
    """The part of a LoadBalancer or a NodeService that the driver reads."""

    announcements: tuple[Announcement, ...]


def intent(*addresses: str, **fields: Any) -> Intent:
    """Return an intent to announce the addresses by BGP."""
    return Intent((Announcement(addresses or (VIP,), "bgp", **fields),))


def peer(name: str = "tor1", address: str = ROUTER, *, password: str = "", **fields: Any) -> Peer:
    """Return a peer with the router's AS number."""
    fields = {"asn": 64512, **fields}
    if "interface" not in fields:
        fields["address"] = address
    return Peer(name, BgpPeerSpec(**fields), password)


async def reconcile(
    driver: BirdDriver | RoutesDriver,
    intents: Mapping[ServiceKey, Intent],
    *gone: ServiceKey,
) -> Mapping[ServiceKey, Outcome]:
    """Reconcile these Services once, like a pass of the loop."""
    changes = driver.diff(driver.render(intents), await driver.read([*intents, *gone]))
    return await driver.apply(changes) if changes else {}


async def announced(
    driver: BirdDriver, intents: Mapping[ServiceKey, Intent], *gone: ServiceKey
) -> None:
    """Reconcile these Services until every one is done."""

    async def done() -> bool:
        outcomes = await reconcile(driver, intents, *gone)
        if all(each.state == "done" and not each.again_s for each in outcomes.values()):
            return True
        await driver.poll()
        return False

    await until(done)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds. Raise TimeoutError if it never does."""
    async with asyncio.timeout(40):
        while not await holds():
            await asyncio.sleep(0.02)


def ip(*words: str) -> str:
    """Run ip(8) in the namespace of the calling thread. Return its output."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@contextmanager
def bird(configuration: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a BIRD that is not the driver's own, beside this configuration file."""
    control = configuration.with_suffix(".ctl")
    argv = ["/usr/sbin/bird", "-f", "-c", str(configuration), "-s", str(control), *options]
    daemon = subprocess.Popen(argv)
    try:
        yield daemon
    finally:
        daemon.terminate()
        daemon.wait()


def driver_in(
    folder: Path,
    peers: Sequence[Peer] | Callable[[], Sequence[Peer]],
    *,
    requeue: Requeue = no_requeue,
    **fields: Any,
) -> BirdDriver:
    """Return a driver that is not open yet."""
    section = BgpConfig(**{"asn": 64513, "directory": str(folder), **fields})
    source = peers if callable(peers) else lambda: peers
    return BirdDriver(section, peers=source, requeue=requeue)


@asynccontextmanager
async def running(
    folder: Path,
    peers: Sequence[Peer] | Callable[[], Sequence[Peer]],
    *,
    requeue: Requeue = no_requeue,
    **fields: Any,
) -> AsyncIterator[BirdDriver]:
    """Run a driver in the namespace of the calling thread. BIRD stays at the end."""
    driver = driver_in(folder, peers, requeue=requeue, **fields)
    await driver.open()
    task = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await driver.close()


async def established(driver: BirdDriver, *names: str) -> None:
    """Wait until the sessions with these peers are established."""

    async def holds() -> bool:
        await driver.poll()
        up = {each.peer for each in driver.status().sessions if each.state == "established"}
        return set(names) <= up

    await until(holds)
