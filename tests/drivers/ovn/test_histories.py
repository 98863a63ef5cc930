"""Random histories of Services and faults at a real northbound database: whatever happens, the rows
are as desired at the end, no row is left over, and no row of others has changed.

Faults: the server is killed at any moment, the driver is restarted, another program deletes,
detaches or changes rows of Fairlead, or removes their marks; with topology `gateways`, the gateway
router of a node is deleted for a while. `FAIRLEAD_SEED` and `FAIRLEAD_HISTORIES` choose the
histories."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.drivers.ovn.rows import DRAIN_S, SITE, intent

from fairlead.drivers.ovn.driver import OvnDriver
from fairlead.drivers.ovn.marks import drains_of
from fairlead.drivers.ovn.northbound import UNNAMED
from fairlead.drivers.ovn.slots import assign, table_size
from fairlead.drivers.ovn.spec import Site
from fairlead.errors import Conflict, Unavailable
from fairlead.lab import process
from fairlead.lab.ovn.central import Central
from fairlead.model import LoadBalancer, ServiceKey

HISTORIES = int(os.environ.get("FAIRLEAD_HISTORIES") or 4)
SEED = int(os.environ.get("FAIRLEAD_SEED") or 0)
STEPS = 25
DEADLINE_S = 60.0
KEYS = [ServiceKey("default", f"s{number}") for number in range(5)]
FOREIGN = {"theirs": "203.0.113.200:80", "other": "203.0.113.201:80"}


GATEWAYS = Site("c1", "GR_{node}", topology="gateways")
NODES = ("n1", "n2", "n3")
FLEETING = "GR_n3"
"""The gateway router that is deleted for a while."""


@pytest.fixture
async def router(central: Central) -> Central:
    """The central part of OVN, with a gateway router for each node, and rows of others at a router
    of each topology."""
    for node in NODES:
        await central.control("nb", "lr-add", GATEWAYS.router_of(node))
    for row, vip in FOREIGN.items():
        await central.control("nb", "lb-add", row, vip, "10.244.9.9:80")
        for name in (SITE.router, GATEWAYS.router_of("n1")):
            await central.control("nb", "lr-lb-add", name, row)
    return central


def node_of(pod: str) -> str:
    """Return the node of a pod with this address."""
    return NODES[int(pod.rpartition(".")[2]) % len(NODES)]


class History:
    """One history: the desired Services, and a clock that the history moves."""

    def __init__(self, central: Central, site: Site, seed: int) -> None:
        self.central = central
        self.site = site
        self.random = random.Random(seed)
        self.wanted: dict[ServiceKey, LoadBalancer] = {}
        self.offset_s = 0.0
        self.stack = AsyncExitStack()
        self.driver: OvnDriver | None = None

    async def restart(self) -> None:
        """Replace the driver by one without memory."""
        await self.stop()
        driver = OvnDriver(
            self.site,
            [self.central.remote("nb")],
            drain_timeout_s=DRAIN_S,
            claimed=lambda key: key in KEYS,
            clock=lambda: 1e9 + self.offset_s,
        )
        task = asyncio.create_task(driver.run())
        self.driver = driver
        self.stack = AsyncExitStack()
        self.stack.callback(task.cancel)

    async def stop(self) -> None:
        await self.stack.aclose()

    def change(self) -> None:
        """Change or delete a Service."""
        key = self.random.choice(KEYS)
        if self.random.random() < 0.2:
            self.wanted.pop(key, None)
            return
        number = KEYS.index(key)
        numbers = self.random.sample(range(10, 18), self.random.randrange(5))
        pods = [f"10.244.{number}.{each}" for each in sorted(numbers)]
        self.wanted[key] = intent(
            pods,
            nodes={pod: node_of(pod) for pod in pods},
            key=key,
            addresses=(f"203.0.113.{number + 40 + 10 * self.random.randrange(2)}",),
            protocol=self.random.choice(("TCP", "UDP")),
            affinity_s=self.random.choice((0, 60)),
        )

    async def interfere(self) -> None:
        """Change a row of Fairlead, or a router, as another program would."""
        if self.site.topology == "gateways" and self.random.random() < 0.3:
            command = self.random.choice(("lr-add", "lr-del"))
            option = "--may-exist" if command == "lr-add" else "--if-exists"
            await self.central.control("nb", option, command, FLEETING)
            return
        rows = [row for row in await self.central.rows("Load_Balancer") if is_own(row)]
        if not rows:
            return
        uuid = self.random.choice(rows)["_uuid"]
        await self.central.control(
            "nb",
            *self.random.choice(
                (
                    ("--if-exists", "lb-del", uuid),
                    ("--if-exists", "lr-lb-del", await self.router_with(uuid), uuid),
                    ("clear", "load_balancer", uuid, "vips"),
                    ("set", "load_balancer", uuid, "options:reject=false"),
                    ("remove", "load_balancer", uuid, "external_ids", "fairlead.io/vip"),
                    ("remove", "load_balancer", uuid, "external_ids", "fairlead.io/drains"),
                    ("remove", "load_balancer", uuid, "external_ids", "fairlead.io/service"),
                    ("set", "load_balancer", uuid, "external_ids:fairlead.io/vip=203.0.113.9\\:80"),
                    ("remove", "load_balancer", uuid, "external_ids", "fairlead.io/node"),
                    ("set", "load_balancer", uuid, "external_ids:fairlead.io/node=n2"),
                    ("set", "load_balancer", uuid, "protocol=udp"),
                    ("set", "load_balancer", uuid, "protocol=sctp"),
                    ("set", "load_balancer", uuid, f"external_ids:fairlead.io/service={KEYS[0]}"),
                )
            ),
        )

    async def cut(self) -> None:
        """Kill the server of the database in the middle of the work, and start it again."""
        work = asyncio.create_task(self.run_pass())
        await asyncio.sleep(self.random.uniform(0, 0.02))
        await process.one(self.central.lab, "ovn/ovsdb-nb").kill()
        await self.central.start_database("nb")
        await work

    async def run_pass(self) -> Sequence[str]:
        """Make a pass for all Services. Return the changes of the pass, and the error if they
        failed. Nothing: the rows are as desired."""
        assert self.driver is not None
        desired = self.driver.render(self.wanted)
        changes = self.driver.diff(desired, await self.driver.read([*KEYS, UNNAMED]))
        try:
            if changes:
                await self.driver.apply(changes)
        except (Conflict, Unavailable) as error:
            return [*map(str, changes), repr(error)]
        return [*map(str, changes)]

    async def settle(self) -> None:
        """Make passes until nothing is to do."""
        end_s = time.monotonic() + DEADLINE_S
        while undone := await self.run_pass():
            assert time.monotonic() < end_s, undone
            await asyncio.sleep(0.02)

    async def converge(self) -> None:
        """Make passes until the rows are as desired: the driver may see the last change of another
        program a moment later. Raise AssertionError after a time."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            await self.settle()
            try:
                await self.check()
            except AssertionError:
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(0.02)
            else:
                return

    async def check(self) -> None:
        """Compare the database with the desired Services."""
        rows = [row for row in await self.central.rows("Load_Balancer") if is_own(row)]
        kept = [row for row in rows if "fairlead.io/removed" not in row["external_ids"]]
        expected = {}
        for key, each in self.wanted.items():
            (listener,) = each.listeners
            of_gateways = self.site.topology == "gateways"
            for node in {pod.node for pod in listener.pods} if of_gateways else {""}:
                pods = [pod for pod in listener.pods if node in ("", pod.node)]
                weights = {f"{pod.address}:8080": 1 for pod in pods}
                slots = assign((), weights, table_size(weights, SITE.slots)) if weights else ()
                vip = f"{each.addresses[0]}:80"
                place = (str(key), vip, listener.protocol.lower(), node)
                expected[place] = (set(weights), sorted(Counter(slots).values()))
        found = {}
        for row in kept:
            vip = row["external_ids"]["fairlead.io/vip"]
            marks = row["external_ids"]
            node = marks.get("fairlead.io/node", "")
            place = (marks["fairlead.io/service"], vip, row["protocol"], node)
            assert place not in found, f"two rows for {place}"
            counts = Counter(filter(None, row["vips"][vip].split(",")))
            found[place] = (set(counts), sorted(counts.values()))
            assert row["options"]["reject"] == "true"
        assert found == expected
        attached = await self.attached()
        for row in kept:
            self.check_drains(row)
            node = row["external_ids"].get("fairlead.io/node", "")
            places = [name for name, rows in attached.items() if row["_uuid"] in rows]
            assert places == [self.site.router_of(node)]

    def check_drains(self, row: Mapping[str, Any]) -> None:
        """Check that the backends that drain are those with a deadline, which is not over."""
        marks, now_s = row["external_ids"], 1e9 + self.offset_s
        listed = [
            backend
            for key, text in row["vips"].items()
            if key != marks["fairlead.io/vip"]
            for backend in text.split(",")
        ]
        deadlines = drains_of(marks)
        assert sorted(listed) == sorted(deadlines)
        assert all(now_s < until <= now_s + DRAIN_S + 1 for until in deadlines.values())

    async def attached(self) -> Mapping[str, set[str]]:
        """Return the rows at each router."""
        found = {}
        for router in await self.central.rows("Logical_Router"):
            attached = router["load_balancer"]
            found[router["name"]] = {attached} if isinstance(attached, str) else set(attached)
        return found

    async def router_with(self, row: str) -> str:
        """Return a router with this row; the first one if there is none."""
        attached = await self.attached()
        return next((name for name, rows in attached.items() if row in rows), min(attached))


def is_own(row: Mapping[str, Any]) -> bool:
    return bool(row["external_ids"].get("fairlead.io/cluster") == SITE.cluster)


async def foreign(central: Central) -> dict[str, Mapping[str, Any]]:
    """Return the rows of others, which are all attached."""
    rows = await central.rows("Load_Balancer")
    return {row["_uuid"]: row for row in rows if not is_own(row)}


@pytest.mark.parametrize("site", [SITE, GATEWAYS], ids=lambda each: each.topology)
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
async def test_after_each_history_the_rows_are_as_desired(
    router: Central, site: Site, seed: int
) -> None:
    print(f"seed {seed}")
    before = await foreign(router)
    history = History(router, site, seed)
    await history.restart()
    try:
        for _ in range(STEPS):
            for _ in range(history.random.randrange(3)):
                history.change()
            match history.random.randrange(6):
                case 0:
                    await history.restart()
                case 1:
                    await history.cut()
                case 2 | 3:
                    await history.interfere()
                case 4:
                    history.offset_s += DRAIN_S * history.random.random()
                case _:
                    await history.run_pass()
        assert history.driver is not None
        await history.driver.wait_synced(DEADLINE_S)
        await router.control("nb", "--may-exist", "lr-add", FLEETING)
        await history.converge()
        history.wanted.clear()
        await history.settle()
        history.offset_s += 2 * DRAIN_S
        await history.settle()
        assert await foreign(router) == before
        assert not [row for row in await router.rows("Load_Balancer") if is_own(row)]
        # A reference to a row that does not exist has no effect. The server removes it (RFC 7047,
        # 3.2), but was seen to keep one after it had been killed.
        attached = {name: rows & before.keys() for name, rows in (await history.attached()).items()}
        assert {name: rows for name, rows in attached.items() if rows} == {
            name: set(before) for name in (SITE.router, GATEWAYS.router_of("n1"))
        }
    finally:
        await history.stop()
