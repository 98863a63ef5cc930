"""Leader election with both API servers: whatever fails, there is one leader at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.lab.apiserver.api import Api

from fairlead.errors import Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.lease import Elector
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.lab.apiserver import ApiServer, Fault

KEY = ObjectKey("kube-system", "fairlead-controller")
DEADLINE_S = 60.0
TIMES = {"lease_s": 1.0, "renew_deadline_s": 0.6, "retry_s": 0.1}


class Candidate:
    """An elector whose work records when it runs. `leaders`, which all candidates share, must never
    contain two names."""

    def __init__(self, client: Client, key: ObjectKey, name: str, leaders: set[str]) -> None:
        self.name = name
        self.leaders = leaders
        self.terms = 0
        self.elector = Elector(client, key, name, **TIMES)
        self.task: asyncio.Future[None] | None = None
        self.may_end = asyncio.Event()

    def start(self) -> None:
        self.task = asyncio.ensure_future(self.elector.lead(self.work))

    async def work(self) -> None:
        assert not self.leaders, f"{self.name} begins while {self.leaders} works"
        self.leaders.add(self.name)
        self.terms += 1
        try:
            await self.may_end.wait()
        finally:
            self.leaders.discard(self.name)

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def crash(self) -> None:
        """Stop as after SIGKILL: the candidate neither renews nor releases the Lease."""
        assert self.task is not None
        self.elector._renewed_at = None
        self.task.cancel()


async def until(leaders: set[str], *expected: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while leaders != set(expected):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def candidates(
    access: Access, *names: str, key: ObjectKey = KEY
) -> AsyncIterator[tuple[set[str], list[Candidate]]]:
    leaders: set[str] = set()
    async with Client(access, timeout_s=2) as client:
        made = [Candidate(client, key, name, leaders) for name in names]
        try:
            yield leaders, made
        finally:
            for candidate in made:
                if candidate.task is not None:
                    await candidate.stop()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        yield running


@pytest.fixture
def key(place: Api) -> ObjectKey:
    """Return the key of a Lease that only this test uses."""
    return ObjectKey(place.namespace, "fairlead-controller")


async def test_one_candidate_leads_and_the_next_leads_at_once_when_it_stops(
    place: Api, client: Client, key: ObjectKey
) -> None:
    async with candidates(place.access, "a", "b", key=key) as (leaders, (a, b)):
        a.start()
        await until(leaders, "a")
        b.start()
        await asyncio.sleep(3 * TIMES["lease_s"])
        assert leaders == {"a"}
        assert a.elector.leading
        assert not b.elector.leading
        await a.stop()
        await until(leaders, "b")
    lease = await client.get(LEASES, key)
    assert lease.spec.holder_identity == ""
    assert lease.spec.lease_transitions == 1


async def test_after_a_crash_of_the_leader_the_next_leads_when_the_lease_has_expired(
    place: Api, key: ObjectKey
) -> None:
    async with candidates(place.access, "a", "b", key=key) as (leaders, (a, b)):
        a.start()
        await until(leaders, "a")
        b.start()
        await asyncio.sleep(0.3)
        a.crash()
        await until(leaders, "b")
        assert b.terms == 1


async def test_of_many_candidates_that_start_together_one_leads(place: Api, key: ObjectKey) -> None:
    async with candidates(place.access, *"abcde", key=key) as (leaders, made):
        for candidate in made:
            candidate.start()
        async with asyncio.timeout(DEADLINE_S):
            while not leaders:
                await asyncio.sleep(0.01)
        await asyncio.sleep(TIMES["lease_s"])
        assert len(leaders) == 1
        assert sum(candidate.terms for candidate in made) == 1


async def test_a_leader_that_cannot_renew_stops_before_another_candidate_may_lead(
    server: ApiServer,
) -> None:
    async with candidates(Access(server.url), "a", "b") as (leaders, (a, b)):
        a.start()
        await until(leaders, "a")
        server.faults.add(Fault("status", path="/leases", count=0, code=500))
        await until(leaders)
        assert not a.elector.leading
        with pytest.raises(Unavailable, match="does not hold Lease"):
            a.elector.assert_leading()
        b.start()
        await asyncio.sleep(0.5)
        server.faults.clear()
        async with asyncio.timeout(DEADLINE_S):
            while not leaders:
                await asyncio.sleep(0.01)
        assert len(leaders) == 1


async def test_a_hanging_server_does_not_prolong_a_term(server: ApiServer) -> None:
    async with candidates(Access(server.url), "a") as (leaders, (a,)):
        a.start()
        await until(leaders, "a")
        server.faults.add(Fault("stall", path="/leases", count=0, stall_s=30))
        await until(leaders)
        server.faults.clear()


async def test_a_leader_that_is_cancelled_while_its_term_ends_does_not_lead_again(
    server: ApiServer,
) -> None:
    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            leading.cancel()

    started = asyncio.Event()
    async with Client(Access(server.url), timeout_s=2) as client:
        leading = asyncio.ensure_future(Elector(client, KEY, "a", **TIMES).lead(work))
        async with asyncio.timeout(DEADLINE_S):
            await started.wait()
            server.faults.add(Fault("status", path="/leases", count=0, code=500))
            await asyncio.wait([leading])
        assert leading.cancelled()


async def test_each_term_starts_the_work_again(server: ApiServer) -> None:
    async with candidates(Access(server.url), "a") as (leaders, (a,)):
        a.start()
        for _ in range(2):
            await until(leaders, "a")
            server.faults.add(Fault("status", path="/leases", count=0, code=500))
            await until(leaders)
            server.faults.clear()
        await until(leaders, "a")
        assert a.terms == 3


async def test_a_term_whose_work_fails_ends_the_process(server: ApiServer) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    async with Client(Access(server.url)) as client:
        elector = Elector(client, KEY, "a", **TIMES)
        with pytest.raises(ExceptionGroup) as caught:
            await elector.lead(broken)
        assert caught.group_contains(RuntimeError, match="a bug")
        assert (await client.get(LEASES, KEY)).spec.holder_identity == "", (
            "released for the next leader"
        )
