"""Rows in a real northbound database that others, or the configuration, have made unusual."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from tests.drivers.ovn.rows import API, SITE, VIP, WEB, intent
from tests.drivers.ovn.traffic import DEADLINE_S, run_pass, settle

from fairlead.drivers.ovn.checks import NO_SWITCH
from fairlead.drivers.ovn.driver import OvnDriver
from fairlead.drivers.ovn.foreign import ADDRESS_CONFLICT
from fairlead.drivers.ovn.spec import Site
from fairlead.errors import Conflict, Unavailable
from fairlead.lab.ovn.central import Central
from fairlead.model import LoadBalancer

A, B = "10.244.1.10", "10.244.1.11"


@asynccontextmanager
async def running(central: Central, *switches: str, **given: Any) -> AsyncIterator[OvnDriver]:
    """Run a driver during the block."""
    driver = OvnDriver(Site("c1", SITE.router, switches), [central.remote("nb")], **given)
    assert isinstance(driver.obstacle(), Unavailable)
    task = asyncio.create_task(driver.run())
    try:
        await driver.wait_synced(DEADLINE_S)
        yield driver
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def with_port(balancer: LoadBalancer, port: int) -> LoadBalancer:
    """Return the Service with another port besides its own."""
    (listener,) = balancer.listeners
    return msgspec.structs.replace(
        balancer, listeners=(listener, msgspec.structs.replace(listener, port=port))
    )


async def add_foreign(central: Central, name: str, vip: str) -> None:
    """Attach a row of another program to the router."""
    attach = ("--", "lr-lb-add", SITE.router, name)
    await central.control("nb", "lb-add", name, vip, "10.244.9.9:80", "tcp", *attach)


async def backends(central: Central) -> set[str]:
    """Return the backends of the row of the Service that get new connections."""
    (row,) = [row for row in await central.rows("Load_Balancer") if row["external_ids"]]
    return set(row["vips"][f"{VIP}:80"].split(","))


async def test_a_missing_switch_is_reported_and_pods_are_followed(central: Central) -> None:
    async with running(central, "pods", "missing") as driver:
        found = await settle(driver, intent((A,)))
        assert [n.code for each in found for n in each.notes].count(NO_SWITCH) == 1
        await central.control("nb", "ls-del", "pods")
        await settle(driver, intent((B,)))
        assert await backends(central) == {f"{B}:8080"}


async def test_a_refused_port_does_not_stop_the_others(central: Central) -> None:
    await add_foreign(central, "theirs", f"{VIP}:81")
    async with running(central) as driver:
        await settle(driver, intent((A,)))
        outcome = (await run_pass(driver, with_port(intent((B,)), 81)))[WEB]
        assert outcome.state == "refused"
        assert outcome.in_part
        assert await backends(central) == {f"{B}:8080"}


async def test_rows_follow_their_pods_without_the_router_and_are_attached_when_it_returns(
    central: Central,
) -> None:
    touched: list[Any] = []
    async with running(central, requeue=touched.extend) as driver:
        await settle(driver, intent((A,)))
        touched.clear()
        await central.control("nb", "lr-del", SITE.router)
        async with asyncio.timeout(DEADLINE_S):
            while WEB not in touched:
                await asyncio.sleep(0.02)
        outcome = (await run_pass(driver, intent((B,))))[WEB]
        assert (outcome.state, outcome.in_part) == ("refused", True)
        assert await backends(central) == {f"{B}:8080"}
        touched.clear()
        await central.control("nb", "lr-add", SITE.router)
        async with asyncio.timeout(DEADLINE_S):
            while WEB not in touched:
                await asyncio.sleep(0.02)
        await settle(driver, intent((B,)))
        (router,) = await central.rows("Logical_Router")
        (row,) = await central.rows("Load_Balancer")
        assert router["load_balancer"] in (row["_uuid"], [row["_uuid"]])


async def test_a_service_without_rows_is_compared_again_when_the_router_appears(
    central: Central,
) -> None:
    touched: list[Any] = []
    await central.control("nb", "lr-del", SITE.router)
    async with running(central, requeue=touched.extend) as driver:
        assert (await run_pass(driver, intent((A,))))[WEB].state == "refused"
        await central.control("nb", "lr-add", SITE.router)
        async with asyncio.timeout(DEADLINE_S):
            while WEB not in touched:
                await asyncio.sleep(0.02)
        await settle(driver, intent((A,)))


async def test_a_row_without_the_mark_of_the_cluster_is_not_changed(central: Central) -> None:
    async with running(central) as driver:
        await settle(driver, intent((A,)))
        (row,) = await central.rows("Load_Balancer")
        mark = "fairlead.io/cluster"
        await central.control("nb", "remove", "load_balancer", row["_uuid"], "external_ids", mark)
        async with asyncio.timeout(DEADLINE_S):
            while (await driver.read([WEB]))[WEB].rows:
                await asyncio.sleep(0.02)
        await driver.read(None)
        outcome = (await run_pass(driver, intent((A,))))[WEB]
        assert outcome.state == "refused"
        assert f"row {row['name']}" in outcome.message
        await central.control("nb", "lb-del", row["_uuid"])
        await driver.read(None)
        await settle(driver, intent((A,)))


async def test_a_row_of_others_at_an_address_in_use_is_reported_once(central: Central) -> None:
    touched: list[Any] = []
    async with running(central, requeue=touched.extend) as driver:
        await settle(driver, intent((A,)))
        await add_foreign(central, "other", f"{VIP}:81")
        touched.clear()
        await add_foreign(central, "theirs", f"{VIP}:80")
        async with asyncio.timeout(DEADLINE_S):
            while WEB not in touched:
                await asyncio.sleep(0.02)
        notes = [note for each in await settle(driver, intent((A,))) for note in each.notes]
        assert [note.code for note in notes] == [ADDRESS_CONFLICT]
        assert f"{VIP}:80/TCP: row theirs (" in notes[0].message
        assert not [note for each in await settle(driver, intent((B,))) for note in each.notes]
    async with running(central, requeue=touched.extend) as driver:
        touched.clear()
        async with asyncio.timeout(DEADLINE_S):
            while WEB not in touched or not (await driver.read([WEB]))[WEB].unreported:
                await asyncio.sleep(0.02)
        notes = [note for each in await settle(driver, intent((B,))) for note in each.notes]
        assert [note.code for note in notes] == [ADDRESS_CONFLICT]


async def test_a_row_of_others_counts_for_an_address_that_is_used_a_moment_later(
    central: Central,
) -> None:
    async with running(central) as driver:
        other: dict[str, Any] = {"key": API, "addresses": ("203.0.113.41",)}
        await settle(driver, intent((A,), **other), keys=(API,))
        await add_foreign(central, "theirs", f"{VIP}:80")
        # The answer to this change comes after the news about the row.
        await settle(driver, intent((B,), **other), keys=(API,))
        assert (await run_pass(driver, intent((A,))))[WEB].state == "refused"


async def test_two_processes_do_not_create_a_row_twice(central: Central) -> None:
    async with running(central) as first, running(central) as second:
        drivers = (first, second)
        desired = [each.render({WEB: intent((A,))}) for each in drivers]
        changes = [
            each.diff(wanted, await each.read([WEB]))
            for each, wanted in zip(drivers, desired, strict=True)
        ]
        results = await asyncio.gather(
            *(each.apply(some) for each, some in zip(drivers, changes, strict=True)),
            return_exceptions=True,
        )
        assert sum(isinstance(each, Conflict) for each in results) == 1
        assert len(await central.rows("Load_Balancer")) == 1
