"""A Service with TCP, UDP and QUIC over both families, and many flows to it from a lab's client.

In: a running lab. Out: `Shop`, the Service and its pods; `Crowd`, which counts the failures of
thousands of open flows and of new flows at a steady rate during an event; `check_unharmed`, which
checks that there were none. Datagrams are counted as strictly as connections: each request of an
open flow must be answered, and always by the same pod."""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, Self

import msgspec
from tests.e2e.load import CLIENT, Web, until
from tests.e2e.logs import lines_of

from fairlead.drivers.direct.maps.records import INDEX, unpack_text
from fairlead.lab.objects import PODS
from fairlead.lab.piped import Piped
from fairlead.lab.site import Site
from fairlead.net.address import pack_address
from fairlead.net.bpf import Map
from fairlead.probe.crowd import Break, Count

OPENING_S = 60.0
INTERVAL_S = 2.0
"""The default interval between two requests of an open flow."""
GRACE_INTERVALS = 1.5
"""The termination grace period of a pod, as a number of request intervals: each open connection
sends another request within one interval."""
PORTS = (("tcp", 80, "http"), ("udp", 53, "dns"), ("quic", 443, "quic"))

LATE, LATE_OF = 2, 200
"""LATE new flows, and one in LATE_OF more, may have to send their first packet twice, because an
overloaded machine sometimes loses a packet. Systematic losses are more frequent."""
RESET = ConnectionResetError.__name__
ALLOWED_RESETS = 3
"""The number of new connections that may be reset while flows move from one gateway to another and
slots are in transition: the first packet of each went through one gateway, and the next packet
through the other, which has no flow entry yet."""

Period = Mapping[str, Count]


class Shop(Web):
    """The Service and its pods. A change counts as done when all gateways of the lab know it. The
    grace period of a terminating pod exceeds one request interval, so that every open connection
    sends another request and receives the pod's end of the connection. UDP flows are not ended: an
    open flow reaches another pod afterwards."""

    def __init__(self, site: Site, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__(site)
        self.gateways = [host.name for host in site.topology.gateways]
        self.interval_s = interval_s
        self.pod_fields = {"terminationGracePeriodSeconds": math.ceil(GRACE_INTERVALS * interval_s)}

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
        """Place the pods as for any Service. When this returns, the terminating pods are gone, so
        that they do not affect the next event."""
        await super().place(nodes)
        await until(self._all_ended, "the end of terminating pods")

    async def _all_ended(self) -> bool:
        async with self.site.client() as client:
            return not any(pod.metadata.deletion_timestamp for pod in await client.list(PODS))

    def down_verdicts(self) -> Counter[str]:
        """Return, for each node, how often a gateway has given it the verdict `down`. A small
        machine delays answers to probes."""
        found: Counter[str] = Counter()
        for gateway in self.site.topology.gateways:
            lines = lines_of(self.site.directory.log(f"{gateway.name}/gateway"))
            targets = [json.loads(line)["target"] for line in lines if '"verdict": "down"' in line]
            for node in self.site.topology.of("node"):
                ours = (f"/{node.addresses[0]}:", f"/[{node.addresses[1]}]:")
                found[node.name] += sum(any(each in target for each in ours) for target in targets)
        return found

    async def pods_of_down_nodes(self, since: Counter[str]) -> set[str]:
        """Return the pods whose datagrams were correctly sent to other pods, because their nodes
        have had the verdict `down` since then."""
        silent = self.down_verdicts() - since
        return {pod for pod, node in (await self.pods()).items() if node in silent}


class Crowd:
    """Flows to a Shop, with a number for each kind and family. Use as an async context manager;
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
        self._argv += ["--interval", str(shop.interval_s)]
        for target, count in self._wanted.items():
            self._argv += ["--flows", *target.split(), str(count)]

    async def __aenter__(self) -> Self:
        self._piped = Piped(self._shop.site, self._host, self._argv)
        since = self._shop.down_verdicts()
        try:
            await until(self._all_open, "the opening of all flows", deadline_s=OPENING_S)
            check_unharmed(
                await self.counts_during(asyncio.sleep(0)),
                await self._shop.pods_of_down_nodes(since),
            )
        except BaseException:
            self._piped.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._piped.kill()

    async def take(self) -> Period:
        """Return the counts since the last call."""
        return msgspec.json.decode(await self._piped.ask(""), type=dict[str, Count])

    async def counts_during(self, event: Awaitable[object], *, intervals: float = 2) -> Period:
        """Return the counts during this event and for some request intervals after it: after one
        interval every open flow has sent a request, after two it has received the answer."""
        await self.take()
        await event
        await asyncio.sleep(intervals * self._shop.interval_s)
        return await self.take()

    async def _all_open(self) -> bool:
        period = await self.take()
        return {name: count.open for name, count in period.items()} == self._wanted


def check_unharmed(period: Period, gone: Collection[str] = ()) -> None:
    """Check that no flow failed, except for UDP flows whose pod is gone, and that there were
    flows."""
    assert sum(count.answered for count in period.values()) > 10, period
    wrong = {
        name: harm for name, count in period.items() if (harm := failures_of(name, count, gone))
    }
    assert not wrong, wrong


def without_moved_flows(period: Period, few: int) -> Period:
    """Return the counts without flows that broke because they moved to another gateway that did not
    know them yet: at most `few` UDP flows with only one packet so far, and at most
    ALLOWED_RESETS connections that were being opened."""
    broken = {name: count.broken for name, count in period.items() if not name.startswith("tcp")}
    assert sum(sum(why.values()) for each in broken.values() for why in each.values()) <= few, (
        broken
    )
    failed = {name: count.failed for name, count in period.items() if name.startswith("tcp")}
    assert sum(each.get(RESET, 0) for each in failed.values()) <= ALLOWED_RESETS, failed
    return {name: _without_moved(name, count) for name, count in period.items()}


def _without_moved(name: str, count: Count) -> Count:
    if not name.startswith("tcp"):
        return msgspec.structs.replace(count, broken={})
    return msgspec.structs.replace(
        count, failed={why: number for why, number in count.failed.items() if why != RESET}
    )


def failures_of(name: str, count: Count, gone: Collection[str]) -> Mapping[str, object]:
    """Return the failures of a target, by type. UDP flows of the pods `gone` do not count."""
    failed, late = count.failed, count.late
    if name.startswith("tcp"):
        gone = ()
    found: dict[str, object] = {
        "failed": failed,
        "late": [pod for _, pod in count.problems] if late > LATE + count.new / LATE_OF else [],
        "broken": {pod: why for pod, why in count.broken.items() if pod not in gone},
        "lost": {pod: number for pod, number in count.lost.items() if pod not in gone},
    }
    return {what: value for what, value in found.items() if value}


_PROTOCOL_NUMBERS = {"tcp": 6, "udp": 17, "quic": 17}
_FLOW_TABLES = (
    "connections",
    "new_connections",
    "closing_connections",
    "datagrams",
    "new_datagrams",
    "excess_flows",
)
SHOWN = 10


def breaks(site: Site, gateways: Sequence[str], period: Period) -> str:
    """Return a line for each of the first flows that broke, with the gateways' present entries for
    it."""
    lines = []
    for name, count in period.items():
        for each in count.breaks[:SHOWN]:
            after = f", then {each.answered_by} answered" if each.answered_by else ""
            lines.append(
                f"{name}: from [{each.client}]:{each.client_port} to {each.pod} on {each.node}: "
                f"{each.why} at {each.broken_s:.2f} s, {each.broken_s - each.begun_s:.2f} s after "
                f"it began, in request {each.requests}{after}; entries: "
                f"{_entries(site, gateways, name, each)}"
            )
    return "\n".join(lines)


def _entries(
    site: Site, gateways: Sequence[str], target: str, flow: Break
) -> dict[str, dict[str, str]]:
    """Return, for each gateway, the tables that have an entry of this flow, with its node."""
    kind, address, port = target.split()
    ports = flow.client_port.to_bytes(2, "big") + int(port).to_bytes(2, "big")
    key = (
        pack_address(flow.client)
        + pack_address(address)
        + ports
        + bytes((_PROTOCOL_NUMBERS[kind], 0, 0, 0))
    )
    found: dict[str, dict[str, str]] = {gateway: {} for gateway in gateways}
    for gateway in gateways:
        for complete in site.directory.pins(gateway).glob("layout-*/settings"):
            for table in _FLOW_TABLES:
                with (
                    Map.open(complete.with_name(table)) as entries,
                    Map.open(complete.with_name("node_names")) as names,
                ):
                    if value := entries.lookup(key):
                        found[gateway][table] = unpack_text(
                            names.lookup(value[: INDEX.size]) or b""
                        )
    return found


def summary(period: Period) -> str:
    """Return a readable line for each target."""
    return "\n".join(
        f"{name}: open {count.open} new {count.new} answered {count.answered} late {count.late} "
        f"failed {count.failed}"
        f" broken {count.broken} lost {count.lost} ended {count.ended} longest wait "
        f"{count.longest_wait_ms} ms"
        for name, count in period.items()
    )
