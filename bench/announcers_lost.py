"""What callers notice when the machine or the link of an announcer fails, often: `python -m
bench.announce --kills N`.

In: a lab of Fairlead with its defaults, one without peers, and one of MetalLB, at the same time;
afterwards a lab with 1,000 addresses. Out, for each event: the longest gap of a client that calls
the address of each family every 10 ms, the open connections that broke, and whether each address
had one owner at the end. Invariant: the machine that fails is the one to which the router sends
packets for the address, and a gap counts only for the addresses that this machine announced.

* *lost*: the cable of the owner is cut and its processes are killed; it boots again;
* *flap*: the owner's link is down for a second;
* *restart*: the gateways restart, one after another and then all at once;
* *beside busy loops*: nothing fails; each take-over is a mistake;
* *moved*: the machine that announces many addresses fails. The router has an entry for each, and
  the time counts until it has replaced the last one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median

import msgspec
import yaml
from bench.announcers import (
    ALONE,
    DEFAULTS,
    METALLB,
    NODES,
    POLL_S,
    SETTLED_S,
    SYSTEMS,
    System,
    answering,
    entries,
    restart_roles,
)
from bench.options import progress
from tests.e2e.load import Load, gateway_state, output
from tests.e2e.test_announce_l2 import pod, service

from fairlead.cli.output import draw
from fairlead.errors import FairleadError
from fairlead.lab import namespace
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.net.address import is_ipv6

LOST, FLAP, RESTART, BESIDE = "lost", "flap", "restart", "beside busy loops"
COLUMNS = (
    "EVENT",
    "SYSTEM",
    "TIMES",
    "IPV4 GAP MS",
    "IPV6 GAP MS",
    "FAILED CALLS",
    "BROKEN ELSEWHERE",
    "ONE OWNER",
    "TAKE-OVERS",
)
INTERVAL_S, PATIENCE_S = 0.01, 0.4
OPEN, OPEN_ELSEWHERE, PAUSE_S = 1000, 300, 3.0
"""The open connections to Fairlead, those to the other systems, and the time between two requests
on a connection. It is known which connections broke after this time and 3 s of silence."""
BEFORE_S, AFTER_S = 1.5, 1.0
"""How long a client calls before and after an event."""
DOWN_S = 1.0
BUSY_LOOPS, BUSY_S = (8, 24), 20.0
ADDRESSES = 1000
MANY, MANY_NETWORK = "10.9.0.1-10.9.3.254", "10.9.0.0/22"
LONG_LEASE_S = 120.0
"""A machine that boots gets addresses back after this time: longer than until the next failure."""
LIMITS = [Path(f"/proc/sys/net/ipv4/neigh/default/gc_thresh{number}") for number in (1, 2, 3)]
ROOM = ("4096", "8192", "16384")


class Loss(msgspec.Struct, frozen=True):
    """What was noticed of one event. `gaps_ms`: the longest gap by family. `broken`: the open
    connections that broke, of `open`, by the node of their pod. `calls`, `failed`: of clients that
    call the IPv4 address. `one_owner`: whether each address had one at the end."""

    event: str
    system: str
    round: int
    node: str
    gaps_ms: Mapping[str, int]
    broken: Mapping[str, int]
    open: int
    calls: int
    failed: int
    takeovers: int
    one_owner: bool
    loops: int = 0

    @property
    def broken_elsewhere(self) -> int:
        return sum(number for node, number in self.broken.items() if node != self.node)


class Move(msgspec.Struct, frozen=True):
    """The failure of a machine that announced `addresses`: after which times the router had
    replaced the first and the last of its entries."""

    addresses: int
    first_ms: int
    last_ms: int


class Report(msgspec.Struct, frozen=True):
    losses: tuple[Loss, ...] = ()
    moves: tuple[Move, ...] = ()


class Caller:
    """A process of the client that calls the addresses of a system."""

    def __init__(self, system: System) -> None:
        hosts = [f"[{each}]" if is_ipv6(each) else each for each in system.web.addresses]
        options = [f"--interval={INTERVAL_S}", f"--timeout={PATIENCE_S}", "--held=0", "-o", "json"]
        targets = [f"{each}:80" for each in hosts]
        with namespace.inside(system.site.namespace("client1")):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fairlead", "probe", *targets, *options],
                stdout=subprocess.PIPE,
                text=True,
            )

    async def end(self) -> Mapping[str, int]:
        """Return the longest gap of each family, in milliseconds."""
        self._process.send_signal(signal.SIGINT)
        told, _ = await asyncio.to_thread(self._process.communicate, timeout=SETTLED_S)
        reports = [each for each in map(json.loads, told.splitlines()) if "gaps" in each]
        return {
            "IPv6" if "[" in each["target"] else "IPv4": round(1000 * each["longest_gap_s"])
            for each in reports
        }

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


class Lab:
    """A system, and the clients that call it all the time, with this number of open connections."""

    def __init__(self, system: System, load: Load, connections: int) -> None:
        self.system, self._load, self._connections = system, load, connections
        self._turn = 0

    async def _observed(self, event: str, act: "Act", *, watch_s: float, loops: int = 0) -> Loss:
        """Let the event happen to the owner of an address, of each family in turn."""
        system = self.system
        self._turn += 1
        caller = Caller(system)
        try:
            await asyncio.sleep(BEFORE_S)
            owners = await system.owners(0.0)
            victim = owners[system.web.addresses[self._turn % 2]]
            takeovers = await system.takeovers() if event == BESIDE else 0
            before = await self._load.take()
            await act.begin(victim)
            await asyncio.sleep(watch_s)
            gaps = await caller.end()
        finally:
            caller.kill()
        await act.end(victim)
        one_owner = True
        try:
            await system.owners()
        except TimeoutError:
            one_owner = False
        takeovers = await system.takeovers() - takeovers if event == BESIDE else 0
        period = await self._load.take()
        families = {
            "IPv6" if is_ipv6(each) else "IPv4" for each in owners if owners[each] == victim
        }
        return Loss(
            event,
            system.name,
            self._turn,
            victim if event == LOST else "",
            {family: gap for family, gap in gaps.items() if family in families},
            dict(Counter(each.node for each in (*before.broken, *period.broken))),
            self._connections,
            period.requests,
            period.failed,
            takeovers,
            one_owner,
            loops,
        )

    async def lose(self) -> Loss:
        """Let the owner's machine fail, and boot it."""
        act = Act(self.system.site.kill_node, self.system.boot)
        watch_s = self.system.notices_s + AFTER_S
        return await self._observed(LOST, act, watch_s=watch_s)

    async def flap(self) -> Loss:
        """Let the owner's link be lost for a moment."""

        async def down(node: str) -> None:
            for state in ("down", "up"):
                await output(self.system.site, ROUTER, "ip", "link", "set", node, state)
                await asyncio.sleep(DOWN_S)

        return await self._observed(FLAP, Act(down), watch_s=AFTER_S - DOWN_S)

    async def restart(self, *nodes: str) -> Loss:
        """Restart the gateways of these nodes at the same time."""

        async def restart(_: str) -> None:
            await asyncio.gather(*map(self.system.restart, nodes))

        return await self._observed(RESTART, Act(restart), watch_s=AFTER_S)

    async def beside(self, loops: int) -> Loss:
        """Let busy loops compete with all processes."""

        async def compete(_: str) -> None:
            with busy_loops(loops):
                await asyncio.sleep(BUSY_S)

        return await self._observed(BESIDE, Act(compete), watch_s=0.0, loops=loops)


class Act:
    """What happens to a node, and what ends it."""

    def __init__(
        self,
        begin: Callable[[str], Awaitable[object]],
        end: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        self.begin, self._end = begin, end

    async def end(self, node: str) -> None:
        if self._end is not None:
            await self._end(node)


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


async def measure(
    kills: int,
    others: int,
    *,
    systems: Sequence[str] = (DEFAULTS, ALONE, METALLB),
    kept: Path | None = None,
) -> Report:
    """Let machines of Fairlead fail this often, and those of the other systems less often, in turn;
    then its links; then restart its gateways, and let busy loops compete with them; then let a
    machine with 1,000 addresses fail. `kept`: a file that has the results so far at any time."""
    losses: list[Loss] = []
    moves: list[Move] = []

    def keep() -> Report:
        found = Report(tuple(losses), tuple(moves))
        if kept is not None:
            kept.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        return found

    async def add(event: Awaitable[Loss]) -> None:
        try:
            losses.append(await event)
        except (FairleadError, TimeoutError, AssertionError) as error:
            # It would discard all other results.
            progress(f"an event is left out: {error!r}")
            return
        progress(str(losses[-1]))
        keep()

    async with AsyncExitStack() as stack:
        labs: dict[str, Lab] = {}
        for place, name in enumerate(systems if others else systems[:1]):
            progress(f"a lab with {name}")
            system = await stack.enter_async_context(
                SYSTEMS[name](name, f"al{os.getpid()}x{place}")
            )
            connections = OPEN if name == DEFAULTS else OPEN_ELSEWHERE
            load = Load(
                system.site,
                system.web.address,
                timeout_s=PATIENCE_S,
                open_connections=connections,
                open_pause_s=PAUSE_S,
            )
            labs[name] = Lab(system, await stack.enter_async_context(load), connections)
        for number in range(kills):
            await add(labs[DEFAULTS].lose())
            # Spread evenly over the rounds.
            if (number + 1) * others // kills > number * others // kills:
                for name in systems[1:]:
                    await add(labs[name].lose())
        for _ in range(kills):
            await add(labs[DEFAULTS].flap())
        for nodes in (*((each,) for each in NODES), NODES):
            await add(labs[DEFAULTS].restart(*nodes))
        for loops in BUSY_LOOPS:
            await add(labs[DEFAULTS].beside(loops))
    try:
        async for move in moved():
            progress(str(move))
            moves.append(move)
            keep()
    except (FairleadError, TimeoutError, AssertionError) as error:
        progress(f"moves are left out: {error!r}")
    return keep()


@asynccontextmanager
async def room_for_neighbors() -> AsyncIterator[None]:
    """Let the kernel keep an entry for each address. The limits hold for all network namespaces
    together."""
    before = [each.read_text() for each in LIMITS]
    try:
        for limit, value in zip(LIMITS, ROOM, strict=True):
            limit.write_text(value)
        yield
    finally:
        for limit, text in zip(LIMITS, before, strict=True):
            limit.write_text(text)


async def moved() -> AsyncIterator[Move]:
    """Yield what happens when a machine with half of 1,000 addresses fails, and then one with all
    of them."""
    progress(f"a lab with {ADDRESSES} addresses")
    lab = Site.create(f"al{os.getpid()}m", nodes=2, gateways_on_nodes=True, announce="l2")
    async with room_for_neighbors(), lab as site:
        configuration = yaml.safe_load(site.directory.config.read_text())
        configuration["pools"][0]["addresses"] = [MANY]
        configuration["announce"]["l2"]["networks"] = [MANY_NETWORK]
        configuration["presence"]["leaseDurationS"] = LONG_LEASE_S
        # One namespace may have half of the table.
        configuration["gateway"]["tableMemoryMiB"] = 32
        site.directory.config.write_text(yaml.safe_dump(configuration))
        await restart_roles(site)
        await output(site, ROUTER, "ip", "route", "add", MANY_NETWORK, "dev", "lan")
        await site.apply([pod(node) for node in NODES[:2]])
        await site.await_pods()
        await site.apply([service(f"web{number}") for number in range(ADDRESSES)])
        for _ in range(2):
            addresses = await _all_answered(site)
            owned = Counter(addresses.values())
            victim = owned.most_common(1)[0][0]
            progress(f"{owned[victim]} addresses are at {victim}")
            yield await _fail(site, victim, owned[victim])
            await site.revive_node(victim)


async def _all_answered(site: Site) -> Mapping[str, str]:
    """Wait until both gateways serve all Services, and the router has an entry for each address.
    Return the node of each."""
    progress("waiting until all addresses are served")
    async with asyncio.timeout(5 * SETTLED_S):
        while True:
            states = [await gateway_state(site, node) for node in NODES[:2]]
            served = [
                {key: each.plan for key, each in state.services.items() if each.plan is not None}
                for state in states
                if state is not None
            ]
            if len(served) == 2 and all(len(each) == ADDRESSES for each in served):
                addresses = [each.addresses[0] for each in served[0].values()]
                answers = await asyncio.to_thread(answering, site, addresses)
                if all(len(each) == 1 for each in answers.values()):
                    break
            await asyncio.sleep(POLL_S)
        while True:
            ask = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM)\n"
            ask += "for each in sys.argv[1:]: s.sendto(b'', (each, 9))"
            await output(site, ROUTER, sys.executable, "-c", ask, *addresses)
            known = await entries(site, addresses)
            if len(known) == ADDRESSES and all(known.values()):
                return known
            await asyncio.sleep(POLL_S)


async def _fail(site: Site, victim: str, count: int) -> Move:
    """Let the machine fail, and wait until the router sends to no address of it."""
    addresses = [name for name, node in (await _all_answered(site)).items() if node == victim]
    await site.kill_node(victim)
    began_s = time.monotonic()
    first_ms = 0
    async with asyncio.timeout(SETTLED_S):
        while True:
            left = sum(node == victim for node in (await entries(site, addresses)).values())
            passed_ms = round(1000 * (time.monotonic() - began_s))
            if left < count and not first_ms:
                first_ms = passed_ms
            if not left:
                return Move(count, first_ms, passed_ms)


def rows_of(losses: Sequence[Loss]) -> list[tuple[str, ...]]:
    """Return a row for each event and system. Numbers are the median and the worst."""
    rows: list[tuple[str, ...]] = []
    for event, system, loops in dict.fromkeys(
        (each.event, each.system, each.loops) for each in losses
    ):
        found = [
            each
            for each in losses
            if (each.event, each.system, each.loops) == (event, system, loops)
        ]
        rows.append(
            (
                f"{event}: {loops}" if loops else event,
                system,
                str(len(found)),
                *(_gaps(found, family) for family in ("IPv4", "IPv6")),
                f"{sum(each.failed for each in found):,} of {sum(each.calls for each in found):,}",
                f"{_middle([each.broken_elsewhere for each in found])} of {found[0].open:,}",
                f"{sum(each.one_owner for each in found)} of {len(found)}",
                str(sum(each.takeovers for each in found)) if event == BESIDE else "",
            )
        )
    return rows


def _gaps(losses: Sequence[Loss], family: str) -> str:
    found = [each.gaps_ms[family] for each in losses if family in each.gaps_ms]
    return f"{_middle(found)}, n = {len(found)}" if found else ""


def _middle(values: Sequence[int]) -> str:
    return f"{median(values):,.0f} ({max(values):,})" if len(values) > 1 else f"{values[0]:,}"


def show(report: Report) -> None:
    draw(COLUMNS, rows_of(report.losses))
    for each in report.moves:
        print(
            f"{each.addresses:,} addresses moved: the router replaced its first entry after "
            f"{each.first_ms:,} ms, and the last one after {each.last_ms:,} ms."
        )
    print("Numbers: median (worst).")
