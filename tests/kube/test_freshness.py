"""The age of a watch, with an API server that is idle, one that hangs, and one that rejects the
watch."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from fairlead.config import PresenceConfig
from fairlead.errors import FairleadError
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.freshness import STALE_S as DEFAULT_STALE_S
from fairlead.kube.freshness import Freshness, confirmed_s, stale_after_s
from fairlead.kube.objects import NODES, SERVICES, Service
from fairlead.kube.reflector import Reflector
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault

STALE_S = 0.6


class Bench:
    """A reflector of Services, and a task that requests Nodes periodically, as a role renews its
    Lease. `custom`: the kind is followed like a kind that an API server may lack."""

    def __init__(self, server: ApiServer, client: Client, *, custom: bool) -> None:
        self.server = server
        self.client = client
        self.reflector: Reflector[Service] = Reflector(
            client,
            SERVICES,
            floor_s=0.01,
            ceiling_s=0.05,
            on_absent=(lambda: None) if custom else None,
        )
        self.freshness = Freshness(lambda: client.answered_s, stale_s=STALE_S, log_interval_s=0.0)
        self.freshness.add("services", self.reflector)

    async def follow(self) -> None:
        async for _ in self.reflector.changes():
            pass

    async def send_requests(self) -> None:
        while True:
            try:
                async with asyncio.timeout(0.1):
                    await self.client.page(NODES, limit=1)
            except (FairleadError, TimeoutError):
                pass
            self.freshness.log_changes()
            await asyncio.sleep(0.02)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    @property
    def stale(self) -> bool:
        return "services" in self.freshness.stale()


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with (
        ApiServer() as server,
        Client(Access(server.url), timeout_s=1.0) as client,
        asyncio.TaskGroup() as group,
    ):
        bench = Bench(server, client, custom=getattr(request, "param", False))
        tasks = [group.create_task(bench.follow()), group.create_task(bench.send_requests())]
        await bench.until(lambda: bench.reflector.watching)
        yield bench
        for task in tasks:
            task.cancel()


async def test_a_quiet_watch_is_current_while_the_server_answers(bench: Bench) -> None:
    last_contact_s = bench.reflector.last_contact_s
    await bench.until(lambda: bench.client.answered_s > last_contact_s + 2 * STALE_S)
    assert bench.reflector.last_contact_s == last_contact_s, "no event, and no bookmark yet"
    assert not bench.stale


async def test_a_server_that_hangs_makes_the_watch_stale_and_is_logged_once(bench: Bench) -> None:
    with capture_logs() as logs:
        bench.server.faults.add(Fault("stall", count=0))
        await bench.until(lambda: bench.stale)
        assert not bench.freshness.reachable
        await bench.until(lambda: bench.freshness.ages()["services"] > 2 * STALE_S)
        bench.server.faults.clear()
        await bench.until(
            lambda: not bench.stale and any("current again" in each["event"] for each in logs)
        )
    logged = [each["event"] for each in logs if "watches of the API server" in each["event"]]
    assert logged == [
        "watches of the API server are stale: continuing with the last known state",
        "watches of the API server are current again",
    ]


async def test_a_rejected_watch_is_stale_although_the_server_answers(bench: Bench) -> None:
    bench.server.faults.add(Fault("status", path="/services", code=403, count=0))
    bench.server.faults.add(Fault("end", path="/services", count=1))
    await bench.until(lambda: bench.stale)
    assert bench.freshness.reachable
    bench.server.faults.clear()
    await bench.until(lambda: not bench.stale)


async def test_the_age_of_a_watch_survives_its_end(bench: Bench) -> None:
    last_contact_s = bench.reflector.last_contact_s
    await bench.until(lambda: bench.client.answered_s > last_contact_s + 2 * STALE_S)
    bench.server.faults.add(Fault("reset", count=0))
    bench.server.faults.add(Fault("cut", path="/services", count=1))
    await bench.until(lambda: not bench.reflector.watching)
    assert bench.reflector.last_contact_s > last_contact_s + STALE_S


@pytest.mark.parametrize("bench", [True], indirect=True)
async def test_a_kind_that_the_server_does_not_have_is_known_to_be_empty(bench: Bench) -> None:
    bench.server.faults.add(Fault("status", path="/services", code=404, count=0))
    bench.server.faults.add(Fault("end", path="/services", count=1))
    requests_before = len(bench.server.requests)
    await bench.until(
        lambda: (
            sum("/services" in each.path for each in list(bench.server.requests)[requests_before:])
            > 2
        )
    )
    assert bench.reflector.watching
    assert not bench.stale


async def test_a_kind_that_every_server_has_is_stale_where_something_else_answers(
    bench: Bench,
) -> None:
    """An example is a proxy in front of the API server whose backend is gone."""
    bench.server.faults.add(Fault("status", path="/services", code=404, count=0))
    bench.server.faults.add(Fault("end", path="/services", count=1))
    await bench.until(lambda: bench.stale)


async def test_flapping_is_logged_at_most_once_per_interval() -> None:
    now_s = 1000.0
    watch = Watch(now_s)
    freshness = Freshness(
        lambda: watch.last_contact_s, clock=lambda: now_s, stale_s=20, log_interval_s=60
    )
    freshness.add("services", watch)
    with capture_logs() as logs:
        for _ in range(6):
            now_s += 25
            freshness.log_changes()
            watch.last_contact_s = now_s
            freshness.log_changes()
    assert [each["log_level"] for each in logs] == ["warning", "info"] * 2


class Watch:
    """An open watch."""

    watching = True

    def __init__(self, last_contact_s: float) -> None:
        self.last_contact_s = last_contact_s


def test_what_proves_a_watch() -> None:
    watch = Watch(100.0)
    assert confirmed_s(watch, 130.0) == 130.0
    assert confirmed_s(watch, 90.0) == 100.0
    watch.watching = False
    assert confirmed_s(watch, 130.0) == 100.0


def test_a_quiet_cluster_is_not_stale_where_leases_are_renewed_seldom() -> None:
    """Between two renewals, of which one may fail, the API server may have no other request to
    answer."""
    presence = PresenceConfig()
    assert stale_after_s(presence.lease_duration_s) == DEFAULT_STALE_S
    for duration_s in (1.0, 60.0, 90.0, 600.0):
        assert stale_after_s(duration_s) >= 2 * duration_s / 3
