"""The age of a watch at an API server that is idle, that hangs, or that rejects the watch."""

import asyncio
import random
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


class Setup:
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
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    async with (
        ApiServer() as server,
        Client(Access(server.url), timeout_s=1.0) as client,
        asyncio.TaskGroup() as group,
    ):
        setup = Setup(server, client, custom=getattr(request, "param", False))
        tasks = [group.create_task(setup.follow()), group.create_task(setup.send_requests())]
        await setup.until(lambda: setup.reflector.watching)
        yield setup
        for task in tasks:
            task.cancel()


async def test_a_quiet_watch_is_current_while_the_server_answers(setup: Setup) -> None:
    last_contact_s = setup.reflector.last_contact_s
    await setup.until(lambda: setup.client.answered_s > last_contact_s + 2 * STALE_S)
    assert setup.reflector.last_contact_s == last_contact_s, "no event, and no bookmark yet"
    assert not setup.stale


async def test_a_server_that_hangs_makes_the_watch_stale_and_is_logged_once(setup: Setup) -> None:
    with capture_logs() as logs:
        setup.server.faults.add(Fault("stall", count=0))
        await setup.until(lambda: setup.stale)
        assert not setup.freshness.reachable
        await setup.until(lambda: setup.freshness.ages()["services"] > 2 * STALE_S)
        setup.server.faults.clear()
        await setup.until(
            lambda: not setup.stale and any("current again" in each["event"] for each in logs)
        )
    logged = [each["event"] for each in logs if "watches of the API server" in each["event"]]
    assert logged == [
        "watches of the API server are stale: continuing with the last known state",
        "watches of the API server are current again",
    ]


async def test_a_rejected_watch_is_stale_although_the_server_answers(setup: Setup) -> None:
    setup.server.faults.add(Fault("status", path="/services", code=403, count=0))
    setup.server.faults.add(Fault("end", path="/services", count=1))
    await setup.until(lambda: setup.stale)
    assert setup.freshness.reachable
    setup.server.faults.clear()
    await setup.until(lambda: not setup.stale)


async def test_the_age_of_a_watch_survives_its_end(setup: Setup) -> None:
    last_contact_s = setup.reflector.last_contact_s
    await setup.until(lambda: setup.client.answered_s > last_contact_s + 2 * STALE_S)
    setup.server.faults.add(Fault("reset", count=0))
    setup.server.faults.add(Fault("cut", path="/services", count=1))
    await setup.until(lambda: not setup.reflector.watching)
    assert setup.reflector.last_contact_s > last_contact_s + STALE_S


@pytest.mark.parametrize("setup", [True], indirect=True)
async def test_a_kind_that_the_server_does_not_have_counts_as_empty_and_not_as_stale(
    setup: Setup,
) -> None:
    setup.server.faults.add(Fault("status", path="/services", code=404, count=0))
    setup.server.faults.add(Fault("end", path="/services", count=1))
    requests_before = len(setup.server.requests)
    await setup.until(
        lambda: (
            sum("/services" in each.path for each in list(setup.server.requests)[requests_before:])
            > 2
        )
    )
    assert setup.reflector.watching
    assert not setup.stale


async def test_a_kind_that_every_server_has_is_stale_if_another_program_responds(
    setup: Setup,
) -> None:
    """An example is a proxy in front of an API server that is down."""
    setup.server.faults.add(Fault("status", path="/services", code=404, count=0))
    setup.server.faults.add(Fault("end", path="/services", count=1))
    await setup.until(lambda: setup.stale)


async def test_a_watch_that_repeatedly_becomes_stale_is_logged_once_per_interval() -> None:
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


def test_every_log_line_about_stale_watches_is_followed_by_one_about_their_end() -> None:
    """In any history, also if checks are late: lines alternate, a state that stays stale is logged
    after an interval at the latest, and the line about the end comes with the next check."""
    chance = random.Random(7)
    now_s = 1000.0
    watches = [Watch(now_s) for _ in range(3)]
    freshness = Freshness(
        lambda: max(each.last_contact_s for each in watches),
        clock=lambda: now_s,
        stale_s=20,
        log_interval_s=60,
    )
    for number, each in enumerate(watches):
        freshness.add(str(number), each)
    for _ in range(300):
        with capture_logs() as logs:
            for _ in range(chance.randrange(100)):
                now_s += chance.choice((1, 1, 1, 5))
                for each in watches:
                    each.watching = chance.random() < 0.5
                    if chance.random() < 0.05:
                        each.last_contact_s = now_s
                freshness.log_changes()
            watches[0].watching = False
            watches[0].last_contact_s = now_s - 21
            now_s += 60
            freshness.log_changes()
            assert logs[-1]["log_level"] == "warning"
            for each in watches:
                each.last_contact_s = now_s
            freshness.log_changes()
        assert [each["log_level"] for each in logs] == ["warning", "info"] * (len(logs) // 2)


class Watch:
    """An open watch."""

    watching = True

    def __init__(self, last_contact_s: float) -> None:
        self.last_contact_s = last_contact_s


def test_a_later_response_of_the_server_confirms_only_an_open_watch() -> None:
    watch = Watch(100.0)
    assert confirmed_s(watch, 130.0) == 130.0
    assert confirmed_s(watch, 90.0) == 100.0
    watch.watching = False
    assert confirmed_s(watch, 130.0) == 100.0


def test_a_quiet_cluster_is_not_stale_with_rare_renewals_of_leases() -> None:
    """The renewals may be the only requests of a process, and one of them may fail."""
    presence = PresenceConfig()
    assert stale_after_s(presence.lease_duration_s) == DEFAULT_STALE_S
    for duration_s in (1.0, 60.0, 90.0, 600.0):
        assert stale_after_s(duration_s) >= 2 * duration_s / 3
