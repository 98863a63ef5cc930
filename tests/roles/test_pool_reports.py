"""The status of each AddressPool is written separately: a pool that cannot be written does not
delay the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from fairlead.config import Config, PoolConfig
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_POOLS
from fairlead.kube.events import EVENTS, EventRecorder
from fairlead.kube.reflector import Reflector
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.model import ServiceKey
from fairlead.plan.addresses import AddressRequest, Facts, HeldAddress
from fairlead.plan.keeping import limits_of
from fairlead.plan.ledger import Ledger
from fairlead.plan.pools import read_pools
from fairlead.roles.controller import Planner
from fairlead.roles.pool_reports import PoolReports, PoolStates
from fairlead.state import State

DEADLINE_S = 60.0
NAMES = ("a", "b", "c", "d")


class Bench:
    """The reports of some pools, with a state that follows the API server."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.state = State(("addresspools",))
        planner = Planner(self.state, Config())
        self._recorder = recorder = EventRecorder(client, "fairlead-test")
        self.reports = PoolReports(
            client, self.state, planner.ledger, recorder, limits_of(Config()), fence=lambda: None
        )
        planner.on_assigned = self.reports.changed
        self._planner = planner

    async def _follow(self) -> None:
        async for changed in Reflector(self.client, ADDRESS_POOLS).changes():
            self.state.update_pools(changed)
            self.state.mark_synced("addresspools")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.ensure_future(each)
            for each in (
                self._follow(),
                self._planner.follow_pools(),
                *(each.run() for each in self.reports.components),
                self._recorder.run(),
            )
        ]
        try:
            await self.state.has_synced.wait()
            yield
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def shown(self, *names: str) -> None:
        """Wait until exactly these pools are shown as used."""
        async with asyncio.timeout(DEADLINE_S):
            while {
                pool.metadata.name
                for pool in await self.client.list(ADDRESS_POOLS)
                if pool.status.conditions
            } != {*names}:
                await asyncio.sleep(0.02)

    def writes(self, name: str) -> int:
        return sum(
            each.method == "PATCH" and f"/addresspools/{name}/" in each.path
            for each in self.server.requests
        )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await crds.install(client)
        for number, name in enumerate(NAMES):
            spec = {"addresses": [f"203.0.113.{10 * number}-203.0.113.{10 * number + 9}"]}
            await client.create(ADDRESS_POOLS, {"metadata": {"name": name}, "spec": spec})
        yield Bench(server, client)


async def test_pools_that_cannot_be_written_delay_no_other(bench: Bench) -> None:
    failing = {"a": 403, "b": 409, "c": 503}
    for name, code in failing.items():
        bench.server.faults.add(Fault("status", "PATCH", f"/addresspools/{name}/", 0, code=code))
    with capture_logs() as logs:
        async with bench.running():
            await bench.shown("d")
            # A change of another pool does not cause an early retry for the failing pools, and
            # their failures do not delay the change.
            await asyncio.sleep(1.5)
            patch = {"spec": {"addresses": ["203.0.113.100"]}}
            await bench.client.patch(ADDRESS_POOLS, ("", "d"), patch)
            async with asyncio.timeout(DEADLINE_S):
                while (await bench.client.get(ADDRESS_POOLS, ("", "d"))).status.available_ipv4 != 1:
                    await asyncio.sleep(0.02)
            assert all(1 <= bench.writes(name) <= 5 for name in failing)
            bench.server.faults.clear()
            await bench.shown(*NAMES)
    # The failure is reported once, and the Conflict is not reported.
    logged = [entry for entry in logs if entry["event"] == "not applied"]
    assert [(entry["driver"], entry["services"], entry["first"]) for entry in logged] == [
        ("pools", 2, "a")
    ]


async def test_pools_that_are_deleted_are_forgotten(bench: Bench) -> None:
    bench.server.faults.add(Fault("status", "PATCH", "/addresspools/a/", 0, code=503))
    async with bench.running():
        await bench.shown("b", "c", "d")
        assert "a" in bench.reports.remembered
        for name in ("a", "b"):
            await bench.client.delete(ADDRESS_POOLS, ("", name))
        async with asyncio.timeout(DEADLINE_S):
            while bench.reports.remembered & {"a", "b"}:
                await asyncio.sleep(0.02)


async def test_the_end_of_a_problem_is_reported(bench: Bench) -> None:
    async def reported(*reasons: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while sorted(each.reason for each in await bench.client.list(EVENTS)) != sorted(
                reasons
            ):
                await asyncio.sleep(0.02)

    async with bench.running():
        await bench.client.patch(
            ADDRESS_POOLS, ("", "a"), {"spec": {"addresses": ["203.0.113.15"]}}
        )
        await reported("OverlapsAnotherPool")
        await bench.client.patch(ADDRESS_POOLS, ("", "a"), {"spec": {"addresses": ["203.0.113.5"]}})
        await reported("OverlapsAnotherPool", "Recovered")
    (recovered,) = [each for each in await bench.client.list(EVENTS) if each.reason == "Recovered"]
    assert recovered.message == "OverlapsAnotherPool no longer holds, after less than a minute"


async def test_few_free_addresses_of_a_pool_of_the_configuration_are_a_finding() -> None:
    """Such a pool is no object that could have a condition or an Event."""
    ledger = Ledger()
    ledger.use(read_pools([PoolConfig("main", ("203.0.113.0-203.0.113.9",))], ()))
    ports = frozenset({"TCP/80"})
    held = {f"203.0.113.{n}": HeldAddress(granted=ports, pool="main") for n in range(10)}
    key = ServiceKey("default", "a")
    states = PoolStates(State(()), ledger, limits_of(Config()))
    running = asyncio.ensure_future(states.run())

    async def found(*codes: str) -> None:
        states.changed()
        async with asyncio.timeout(DEADLINE_S):
            while [each.code for each in states.findings()] != [*codes]:
                await asyncio.sleep(0.02)

    with capture_logs() as logs:
        ledger.assign({key: Facts(AddressRequest(("IPv4",), ports=ports), held)})
        await found("FewAddressesFree")
        assert str(states.findings()[0]).startswith("pool main: few IPv4 addresses of the pool")
        ledger.assign({key: Facts()})
        await found()
    assert [each["log_level"] for each in logs] == ["warning", "info"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
