"""When class ovn reports a Service as done, which publishes its address: at the real databases and
northd of OVN, which the tests stop for a while, with a chassis that confirms nothing."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tests.drivers.ovn.rows import API, DRAIN_S, NOW_S, SITE, VIP, WEB, intent
from tests.drivers.ovn.traffic import DEADLINE_S, run_pass, running, settle

from fairlead.drivers.ovn import northbound
from fairlead.drivers.ovn.changes import AwaitFlows
from fairlead.drivers.ovn.checks import LAGGING
from fairlead.drivers.ovn.driver import COALESCE_S, OvnDriver
from fairlead.drivers.ovn.southbound import Southbound
from fairlead.lab import process
from fairlead.lab.ovn.central import Central
from fairlead.model import LoadBalancer, Outcome, ServiceKey
from fairlead.net.ovsdb import Database, Table, Update, by_uuid

A, B, C = (f"10.244.1.{number}" for number in (10, 11, 12))
SECOND = "203.0.113.41"


@contextmanager
def stopped(central: Central, label: str) -> Iterator[None]:
    """Stop a process during the block."""
    found = process.one(central.lab, label)
    found.send(signal.SIGSTOP)
    try:
        yield
    finally:
        found.send(signal.SIGCONT)


@asynccontextmanager
async def client(central: Central) -> AsyncIterator[Database]:
    """Yield a connection of another program to the northbound database."""
    tables = {northbound.BALANCERS: Table(("vips",))}
    database = Database(northbound.NAME, [central.remote("nb")], tables)
    task = asyncio.create_task(database.run())
    try:
        await database.wait_synced(DEADLINE_S)
        yield database
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def add_chassis(central: Central) -> None:
    """Add a chassis that is not running."""
    await central.control("sb", "chassis-add", "ch1", "geneve", "10.250.0.1")
    chassis = (await central.control("sb", "get", "chassis", "ch1", "_uuid")).strip()
    await central.control("sb", "create", "Chassis_Private", "name=ch1", f"chassis={chassis}")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.02)


async def passes_until(
    driver: OvnDriver, wanted: LoadBalancer, holds: Callable[[Outcome], bool]
) -> list[Outcome | None]:
    """Make passes until an outcome is as expected. Return all outcomes; None: nothing was to do."""
    found: list[Outcome | None] = []
    async with asyncio.timeout(DEADLINE_S):
        while not found or found[-1] is None or not holds(found[-1]):
            found.append((await run_pass(driver, wanted)).get(WEB))
            await asyncio.sleep(0.02)
    return found


async def pods_of(driver: OvnDriver) -> set[str]:
    """Return the backends of the only row of Service web, as the driver sees it."""
    (row,) = (await driver.read([WEB]))[WEB].rows
    return set(row.columns.vips[row.frontend.vip].split(","))


def metrics(driver: OvnDriver) -> dict[str, float]:
    """Return the samples by their name and the value of their label."""
    (collector,) = driver.collectors()
    return {
        " ".join((each.name, *each.labels.values())): each.value
        for family in collector.collect()
        for each in family.samples
    }


async def test_a_service_whose_pods_change_is_waiting_until_its_row_is_installed(
    central: Central,
) -> None:
    async with running(central) as driver:
        with stopped(central, "ovn/northd"):
            first = (await run_pass(driver, intent((A,))))[WEB]
            assert first.state == "waiting"
            assert "until ovn-northd has processed the load balancer" in first.message
            wanted = intent((A, B))
            while await pods_of(driver) != {f"{A}:8080", f"{B}:8080"}:
                outcome = (await run_pass(driver, wanted))[WEB]
                assert outcome.state == "waiting"
                assert outcome.again_s > 0
                await asyncio.sleep(0.02)
            assert (await run_pass(driver, wanted))[WEB].state == "waiting"
        await settle(driver, wanted)


async def test_a_row_whose_answer_was_lost_is_waited_for(central: Central) -> None:
    async with running(central) as driver:
        with stopped(central, "ovn/northd"):
            with stopped(central, "ovn/ovsdb-nb"):
                lost = (await run_pass(driver, intent((A,))))[WEB]
                assert lost.state == "unavailable"
                assert "it may have been executed" in lost.message
                # The database is not asked again before it answers.
                again = (await run_pass(driver, intent((A,))))[WEB]
                assert again.state == "unavailable"
                assert "does not answer" in again.message
            outcomes = await passes_until(
                driver, intent((A,)), lambda outcome: outcome.state == "waiting"
            )
            assert {each.state for each in outcomes if each} <= {"unavailable", "waiting"}
            assert None not in outcomes
            assert len((await driver.read([WEB]))[WEB].rows) == 1
        await settle(driver, intent((A,)))


async def test_a_database_that_answers_again_continues_what_was_held_up(central: Central) -> None:
    touched: set[ServiceKey] = set()
    async with running(central, requeue=touched.update) as driver:
        with stopped(central, "ovn/ovsdb-nb"):
            assert (await run_pass(driver, intent((A,))))[WEB].state == "unavailable"
            touched.clear()
        await until(lambda: WEB in touched)
        await settle(driver, intent((A,)))


async def test_a_chassis_that_is_gone_is_reported_once_and_after_a_restart_not_waited_for(
    central: Central,
) -> None:
    await add_chassis(central)
    web, api = intent((A,)), intent((B,), key=API, addresses=(SECOND,))
    async with running(central) as driver:
        outcomes = await settle(driver, web)
        outcomes += await settle(driver, api, keys=(API,))
        notes = [note for each in outcomes for note in each.notes]
        assert [note.code for note in notes] == [LAGGING]
        assert "chassis ch1 did not confirm" in notes[0].message
        await until(lambda: metrics(driver)["fairlead_ovn_chassis_behind"] == 1)
        assert metrics(driver) == {
            "fairlead_ovn_connected OVN_Northbound": 1,
            "fairlead_ovn_connected OVN_Southbound": 1,
            "fairlead_ovn_rows": 2,
            "fairlead_ovn_waiting_rows": 0,
            "fairlead_ovn_chassis_behind": 1,
            "fairlead_ovn_transactions_total Done": 2,
        }
    published = {WEB: [VIP], API: ["203.0.113.99"]}
    async with running(central, published=lambda key: published[key]) as driver:
        desired = driver.render({WEB: web, API: api})
        assert driver.diff(desired, await driver.read(None)) == [AwaitFlows(API)]
        number = (await central.rows("NB_Global"))[0]["nb_cfg"]
        await central.control("sb", "set", "Chassis_Private", "ch1", f"nb_cfg={number}")
        await settle(driver, web, api, keys=(WEB, API))


async def test_chassis_of_a_database_that_is_not_connected_are_unknown(central: Central) -> None:
    await add_chassis(central)
    south = Southbound([central.remote("sb")], None)
    task = asyncio.create_task(south.run())
    try:
        await until(lambda: list(south.chassis) == ["ch1"])
        assert south.behind(1) == ["ch1"]
        await process.one(central.lab, "ovn/ovsdb-sb").kill()
        await until(lambda: not south.chassis)
        assert not south.behind(1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_new_process_removes_what_drains_at_its_time(central: Central) -> None:
    async with running(central, clock=lambda: NOW_S, drain_timeout_s=DRAIN_S) as driver:
        both = intent((A, B)), intent((C,), key=API, addresses=(SECOND,))
        await settle(driver, *both, keys=(WEB, API))
        await asyncio.sleep(COALESCE_S)
        await settle(driver, intent((A,)), keys=(WEB, API))
    touched: set[ServiceKey] = set()
    now_s = NOW_S + DRAIN_S - 1
    async with running(central, clock=lambda: now_s, requeue=touched.update):
        touched.clear()
        now_s += 1
        await until(lambda: {WEB, API} <= touched)


async def test_a_change_of_another_program_during_a_transaction_is_not_missed(
    central: Central,
) -> None:
    touched: set[ServiceKey] = set()
    async with running(central, requeue=touched.update) as driver, client(central) as other:
        await settle(driver, intent((A,)))
        ((row, _),) = other.rows(northbound.BALANCERS).items()
        await asyncio.sleep(COALESCE_S)
        server = process.one(central.lab, "ovn/ovsdb-nb")
        server.send(signal.SIGSTOP)
        try:
            ours = asyncio.create_task(settle_once(driver, intent((A, B))))
            await asyncio.sleep(0.1)  # the server reads ours first, as its connection is older
            touched.clear()
            theirs = asyncio.create_task(
                other.transact([Update(northbound.BALANCERS, by_uuid(row), {"vips": {}})])
            )
            await asyncio.sleep(0.1)
        finally:
            server.send(signal.SIGCONT)
        await theirs
        outcome = await ours
        assert outcome is not None
        assert outcome.state == "done"
        await until(lambda: WEB in touched)
        await settle(driver, intent((A, B)))
        assert await pods_of(driver) == {f"{A}:8080", f"{B}:8080"}


async def settle_once(driver: OvnDriver, wanted: LoadBalancer) -> Outcome | None:
    return (await run_pass(driver, wanted)).get(WEB)


async def test_a_driver_that_is_open_knows_the_rows(central: Central) -> None:
    driver = OvnDriver(SITE, [central.remote("nb")])
    try:
        await driver.open()
        assert not driver.read_incomplete
        task = asyncio.create_task(driver.run())
        await settle(driver, intent((A,)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    finally:
        await driver.close()


async def test_a_database_that_does_not_exist_delays_the_start_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead.drivers.ovn.driver.START_S", 0.1)
    driver = OvnDriver(SITE, [f"unix:{tmp_path}/nb.sock"])
    try:
        await driver.open()
        assert driver.read_incomplete
    finally:
        await driver.close()
