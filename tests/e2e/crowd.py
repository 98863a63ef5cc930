"""A Service with TCP, UDP and QUIC over both families, and a crowd of flows to it from a lab's
client.

In: a lab that is up. Out: `Shop`, the Service and its pods; `Crowd`, which counts what thousands of
open flows and steady new ones go through while something happens; `unharmed`, which says whether
that was nothing. Datagrams are counted as strictly as connections: each open flow must be answered
each time, and always by the same pod."""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, Self

import msgspec
from tests.e2e.load import CLIENT, Web, until

from fairlead.lab.objects import PODS
from fairlead.lab.piped import Piped
from fairlead.lab.site import Site
from fairlead.probe.crowd import Count

OPENING_S = 60.0
TURN_S = 2.0
"""Each open flow asks so often, if nothing else is said."""
FAREWELL_TURNS = 1.5
"""So many turns a pod has to end: each open connection asks once more within one."""
PORTS = (("tcp", 80, "http"), ("udp", 53, "dns"), ("quic", 443, "quic"))

LATE, LATE_OF = 2, 200
"""LATE new flows, and one in LATE_OF more, may have had to send their first packet twice: a machine
that is too busy loses a packet now and then. What is lost for a reason is lost more often."""
RESET = ConnectionResetError.__name__
PASSED_ON = 3
"""So many new connections, all in all, may be reset while flows pass from one gateway to another
and slots are in transition: those whose first packet the one has seen, and the next one the other,
which cannot know of them yet."""

Period = Mapping[str, Count]


class Shop(Web):
    """The Service and its pods. All gateways of the lab must know of a change before it counts as
    done.

    A pod that ends has more than a turn to see every open connection ask again, and to answer with
    its farewell. Datagrams have no farewell: flows that are open find another pod after that."""

    def __init__(self, site: Site, *, turn_s: float = TURN_S) -> None:
        super().__init__(site)
        self.gateways = [host.name for host in site.topology.gateways]
        self.turn_s = turn_s
        self.pod_fields = {"terminationGracePeriodSeconds": math.ceil(FAREWELL_TURNS * turn_s)}

    async def create(self, **fields: Any) -> None:
        ports = [
            {
                "name": name,
                "port": port,
                "targetPort": name,
                "protocol": "TCP" if kind == "tcp" else "UDP",
            }
            for kind, port, name in PORTS
        ]
        both = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}
        await super().create(ports=ports, **both, **fields)

    async def place(self, nodes: Sequence[str]) -> None:
        """Works as for any Service. When this returns, the ending pods are gone, so that they do
        not affect the next event."""
        await super().place(nodes)
        await until(self._all_ended, "pods that end")

    async def _all_ended(self) -> bool:
        async with self.site.client() as client:
            return not any(pod.metadata.deletion_timestamp for pod in await client.list(PODS))

    def deaths(self) -> Counter[str]:
        """How often each node has seemed dead to a gateway. A small machine keeps nodes from
        answering probes in time."""
        found: Counter[str] = Counter()
        for gateway in self.site.topology.gateways:
            log = self.site.directory.log(f"{gateway.name}/gateway").read_text()
            targets = [
                json.loads(line)["target"]
                for line in log.splitlines()
                if '"verdict": "down"' in line
            ]
            for node in self.site.topology.of("node"):
                ours = (f"/{node.addresses[0]}:", f"/[{node.addresses[1]}]:")
                found[node.name] += sum(any(each in target for each in ours) for target in targets)
        return found

    async def excused(self, since: Counter[str]) -> set[str]:
        """The pods whose datagrams were rightly sent elsewhere, because their nodes have seemed
        dead since then."""
        silent = self.deaths() - since
        return {pod for pod, node in (await self.pods()).items() if node in silent}


class Crowd:
    """Flows to a Shop, so many of each kind over each family. Use as an async context manager:
    inside, all are open."""

    def __init__(
        self, shop: Shop, *, tcp: int, udp: int, quic: int, new_per_s: float, host: str = CLIENT
    ) -> None:
        self._shop = shop
        self._host = host
        self._wanted = {
            f"{kind} {address} {port}": count
            for (kind, port, _), count in zip(PORTS, (tcp, udp, quic), strict=True)
            for address in shop.addresses
            if count
        }
        self._argv = [sys.executable, "-m", "fairlead.probe", "crowd", "--new", str(new_per_s)]
        self._argv += ["--interval", str(shop.turn_s)]
        for target, count in self._wanted.items():
            self._argv += ["--flows", *target.split(), str(count)]

    async def __aenter__(self) -> Self:
        self._piped = Piped(self._shop.site, self._host, self._argv)
        since = self._shop.deaths()
        try:
            await until(self._all_open, "the crowd did not open its flows", deadline_s=OPENING_S)
            unharmed(await self.through(asyncio.sleep(0)), await self._shop.excused(since))
        except BaseException:
            self._piped.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._piped.kill()

    async def take(self) -> Period:
        """What was seen since the last time."""
        return msgspec.json.decode(await self._piped.ask(""), type=dict[str, Count])

    async def through(self, event: Awaitable[object], *, turns: float = 2) -> Period:
        """What is seen while this happens and for so many turns after it; by one, every open flow
        has asked, by two, heard."""
        await self.take()
        await event
        await asyncio.sleep(turns * self._shop.turn_s)
        return await self.take()

    async def _all_open(self) -> bool:
        period = await self.take()
        return {name: count.open for name, count in period.items()} == self._wanted


def unharmed(period: Period, gone: Collection[str] = ()) -> None:
    """Nobody lost anything, but for UDP flows whose pod has gone; and there was somebody to lose
    it."""
    assert sum(count.answered for count in period.values()) > 10, period
    wrong = {name: harm for name, count in period.items() if (harm := harm_of(name, count, gone))}
    assert not wrong, wrong


def forgiving(period: Period, few: int) -> Period:
    """Without the flows that broke because they passed to another gateway too young to be known
    there: of datagrams those of which a single packet was seen, which must not be more than `few`,
    of connections PASSED_ON that were just being opened."""
    broken = {name: count.broken for name, count in period.items() if not name.startswith("tcp")}
    assert sum(sum(why.values()) for each in broken.values() for why in each.values()) <= few, (
        broken
    )
    failed = {name: count.failed for name, count in period.items() if name.startswith("tcp")}
    assert sum(each.get(RESET, 0) for each in failed.values()) <= PASSED_ON, failed
    return {name: _forgiven(name, count) for name, count in period.items()}


def _forgiven(name: str, count: Count) -> Count:
    if not name.startswith("tcp"):
        return msgspec.structs.replace(count, broken={})
    return msgspec.structs.replace(
        count, failed={why: number for why, number in count.failed.items() if why != RESET}
    )


def harm_of(name: str, count: Count, gone: Collection[str]) -> Mapping[str, object]:
    """What must not be."""
    failed, late = count.failed, count.late
    if name.startswith("tcp"):
        gone = ()
    found: dict[str, object] = {
        "failed": failed,
        "late": [pod for _, pod in count.trouble] if late > LATE + count.new / LATE_OF else [],
        "broken": {pod: why for pod, why in count.broken.items() if pod not in gone},
        "lost": {pod: number for pod, number in count.lost.items() if pod not in gone},
    }
    return {what: value for what, value in found.items() if value}


def summary(period: Period) -> str:
    """A line for each target, for people."""
    return "\n".join(
        f"{name}: open {count.open} new {count.new} answered {count.answered} late {count.late} "
        f"failed {count.failed}"
        f" broken {count.broken} lost {count.lost} ended {count.ended} longest wait "
        f"{count.longest_wait_ms} ms"
        for name, count in period.items()
    )
