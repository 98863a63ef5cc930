"""A test site: nodes that answer at 127.0.1.x, a client, and LoadBalancers of class proxy for the
nodes."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec

from fairlead.drivers import Requeue, no_requeue
from fairlead.drivers.proxy import ProxyDriver, runtime
from fairlead.drivers.proxy.render import section_name
from fairlead.drivers.proxy.shares import NO_SHARES, Shares
from fairlead.drivers.proxy.spec import ProxyKey
from fairlead.model import (
    Listener,
    LoadBalancer,
    Member,
    MemberState,
    Outcome,
    ProxySettings,
    ServiceKey,
)

WEB = ServiceKey("default", "web")
VIP, VIP6 = "203.0.113.7", "2001:db8:f::7"
NODE_PORT = 30080
V2 = b"\r\n\r\n\x00\r\nQUIT\n"


def balancer(
    weights: Mapping[str, int],
    *,
    key: ServiceKey = WEB,
    addresses: Sequence[str] = (VIP,),
    port: int = 80,
    states: Mapping[str, MemberState] | None = None,
    settings: ProxySettings | None = None,
    ranges: tuple[str, ...] = (),
) -> LoadBalancer:
    """Return a LoadBalancer. `weights`: the number of pods by node; node N has the address
    127.0.1.N."""
    members = tuple(
        sorted(
            Member(
                node,
                address_of(node),
                weight,
                (states or {}).get(node, "active" if weight else "draining"),
            )
            for node, weight in weights.items()
        )
    )
    families = sorted({"IPv6" if ":" in each else "IPv4" for each in addresses})
    listeners = tuple(
        Listener("IPv6" if family == "IPv6" else "IPv4", port, "TCP", "Local", NODE_PORT, members)
        for family in families
    )
    return LoadBalancer(
        key,
        f"uid-{key.name}",
        "fairlead.io/proxy",
        tuple(addresses),
        listeners,
        source_ranges=ranges,
        settings=settings or ProxySettings(),
    )


def address_of(node: str) -> str:
    return f"127.0.1.{node.removeprefix('node')}"


async def reconcile(
    driver: ProxyDriver, *balancers: LoadBalancer, gone: Sequence[ServiceKey] = ()
) -> Mapping[ServiceKey, Outcome]:
    """Reconcile these Services like the loop. Wait and repeat if the driver reports that it
    waits."""
    intents = {each.service: each for each in balancers}
    while True:
        changes = driver.diff(driver.render(intents), await driver.read([*intents, *gone]))
        outcomes = await driver.apply(changes) if changes else {}
        waiting = [outcome.again_s for outcome in outcomes.values() if outcome.state == "waiting"]
        if not waiting:
            return outcomes
        await asyncio.sleep(max(waiting))


async def counted(
    driver: ProxyDriver, column: str, key: ServiceKey = WEB, port: int = 80
) -> dict[str, str]:
    """Return this column of `show stat` of the current worker, by node; FRONTEND stands for the
    listener itself."""
    section = section_name(key, ProxyKey(VIP, port))
    rows = await runtime.statistics(driver.haproxy.worker)
    return {
        row["svname"]: row[column]
        for row in rows
        if row["pxname"] == section and row["svname"] != "BACKEND"
    }


async def connections(driver: ProxyDriver, column: str = "stot") -> dict[str, int]:
    """Return the number of connections that the current worker passed to each node; with `scur`,
    the number of open ones."""
    return {
        node: int(count)
        for node, count in (await counted(driver, column)).items()
        if node != "FRONTEND"
    }


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds. Raise TimeoutError if it never does."""
    async with asyncio.timeout(20):
        while not await holds():
            await asyncio.sleep(0.01)


async def remaining(driver: ProxyDriver, *balancers: LoadBalancer) -> Sequence[object]:
    """Return the changes that an audit would make."""
    return driver.diff(
        driver.render({each.service: each for each in balancers}), await driver.read(None)
    )


@asynccontextmanager
async def nodes(*names: str) -> AsyncIterator[None]:
    """Run line servers. Each answers a line with its node, the content of the PROXY header, and the
    line."""
    servers = [
        await asyncio.start_server(_answerer(name), address_of(name), NODE_PORT) for name in names
    ]
    try:
        yield
    finally:
        for server in servers:
            server.close()


def _answerer(node: str):  # type: ignore[no-untyped-def]
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            start = await reader.readexactly(1)
            header = "-"
            if start == b"\r":
                start += await reader.readexactly(15)
                family, length = struct.unpack_from("!xBH", start, 12)
                body = await reader.readexactly(length)
                header = f"v2:{'.'.join(map(str, body[:4])) if family == 0x11 else body[:16].hex()}"
                start = b""
            line = start + await reader.readline()
            if line.startswith(b"PROXY "):
                header, line = f"v1:{line.split()[2].decode()}", await reader.readline()
            while line:
                if line.startswith(
                    (b"GET", b"X-Forwarded-For", b"Host", b"\r\n", b"x-forwarded-for", b"host")
                ):
                    header = (
                        line.split()[1].decode()
                        if line.lower().startswith(b"x-forwarded-for")
                        else header
                    )
                    if line == b"\r\n":
                        body = f"{node} {header}".encode()
                        writer.write(
                            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                        )
                else:
                    writer.write(f"{node} {header} {line.decode().strip()}\n".encode())
                line = await reader.readline()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return answer


class ClientConnection(msgspec.Struct):
    """A client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, address: str = VIP, port: int = 80, source: str = "127.0.0.1") -> Self:
        local = ("::1" if ":" in address else source, 0)
        return cls(
            *await asyncio.wait_for(asyncio.open_connection(address, port, local_addr=local), 5)
        )

    async def request(self, line: str = "x") -> list[str]:
        """Return the words of the answer; none if the connection is closed."""
        self.writer.write(f"{line}\n".encode())
        return (await asyncio.wait_for(self.reader.readline(), 10)).decode().split()

    def end(self) -> None:
        self.writer.close()


async def new_answers(
    times: int = 1, address: str = VIP, port: int = 80, source: str = "127.0.0.1"
) -> list[list[str]]:
    """Return the answers over new connections; an empty list for a refused connection."""
    answers = []
    for _ in range(times):
        try:
            talk = await ClientConnection.start(address, port, source)
            answers.append(await talk.request())
            talk.end()
        except ConnectionResetError:
            answers.append([])
    return answers


@asynccontextmanager
async def opened(
    folder: Path,
    old_workers: int = 0,
    requeue: Requeue = no_requeue,
    shares: Shares = NO_SHARES,
) -> AsyncIterator[ProxyDriver]:
    """Run a driver that has read the present state. Remove everything at the end."""
    driver = ProxyDriver(
        folder, reload_pause_s=0.1, old_workers=old_workers, requeue=requeue, shares=shares
    )
    await driver.read(None)
    try:
        yield driver
    finally:
        await driver.remove()
