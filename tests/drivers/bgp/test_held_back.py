"""Routes that are held back while the host was cut off: a real BIRD and a real router."""

import asyncio
import math
from pathlib import Path

import pytest
from tests.drivers.bgp.conftest import Routers
from tests.drivers.bgp.site import (
    API,
    VIP,
    VIP6,
    WEB,
    announced,
    driver_in,
    established,
    intent,
    peer,
    reconcile,
    running,
    until,
)

from fairlead.drivers.bgp import BirdDriver, desired
from fairlead.kube.announcers import status_of
from fairlead.model import ServiceKey
from fairlead.plan.cut_off import START_S
from fairlead.roles.cut_off import CHECK_S, CutOffWatch, StartWatch
from fairlead.state import State

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("link")]
API_VIP = "203.0.113.9"


async def test_routes_are_withdrawn_during_a_cut_and_return_with_the_next_pass_of_the_loop(
    folder: Path, router_of: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desired, "RESTORE_S", math.inf)
    router = router_of("bird")
    await router.start()
    requeued: list[ServiceKey] = []
    async with running(folder / "b", [peer()], requeue=requeued.extend) as driver:
        await announced(driver, {WEB: intent(VIP, VIP6)})
        await router.learns(f"{VIP}/32", f"{VIP6}/128")
        await driver.hold_back(held=True)
        await router.learns()
        await established(driver, "tor1")
        # A full pass and a new Service during the cut export nothing.
        outcomes = await reconcile(driver, {WEB: intent(VIP, VIP6), API: intent(API_VIP)})
        assert {each.reason for each in outcomes.values()} == {"CutOff"}
        await driver.read(None)
        await router.learns()
        assert driver.status().addresses == ()
        (problem,) = status_of("gateway", "gw1", None, driver.status(), ready=True).problems
        assert "cut off" in problem
        requeued.clear()
        await driver.hold_back(held=False)
        assert set(requeued) == {WEB, API}
        await driver.poll()
        await router.learns()
        await announced(driver, {WEB: intent(VIP, VIP6)})
        await router.learns(f"{VIP}/32", f"{VIP6}/128")
        await announced(driver, {API: intent(API_VIP)})
        await router.learns(f"{VIP}/32", f"{VIP6}/128", f"{API_VIP}/32")


async def test_a_service_that_is_not_applied_again_after_a_cut_is_announced_as_before(
    folder: Path, router_of: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop applies no Service that the plan refuses."""
    monkeypatch.setattr(desired, "RESTORE_S", math.inf)
    router = router_of("bird")
    await router.start()
    every = (f"{VIP}/32", f"{API_VIP}/32")
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP), API: intent(API_VIP)})
        await router.learns(*every)
        await driver.hold_back(held=True)
        await router.learns()
        await driver.hold_back(held=False)
        await announced(driver, {WEB: intent(VIP)})
        await router.learns(f"{VIP}/32")
    async with running(folder / "b", [peer()]) as driver:
        assert await driver.speaker.prefixes() == set(every), "a restart withdraws nothing"
        await established(driver, "tor1")
        await router.learns(*every)
        monkeypatch.setattr(desired, "RESTORE_S", 0.0)
        await driver.hold_back(held=True)
        await router.learns()
        await driver.hold_back(held=False)
        await router.learns(*every)
        assert {each.address for each in driver.status().addresses} == {VIP, API_VIP}


async def test_a_process_that_starts_during_a_cut_continues_to_hold_back(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    wanted = {WEB: intent(VIP, VIP6)}
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, wanted)
        await router.learns(f"{VIP}/32", f"{VIP6}/128")
        await driver.hold_back(held=True)
        await router.learns()
    requeued: list[ServiceKey] = []
    async with running(folder / "b", [peer()], requeue=requeued.extend) as driver:
        assert driver.held_back
        assert [each.code for each in driver.status().findings] == ["CutOff"]
        assert metrics(driver)["fairlead_bgp_cut_off"] == 1
        await established(driver, "tor1")
        await reconcile(driver, wanted)
        await router.learns()
        requeued.clear()
        watch = asyncio.ensure_future(CutOffWatch(synced(), "gw1", driver, None).run())
        try:
            await until(lambda: exports(driver))
        finally:
            watch.cancel()
        assert requeued == [WEB]
        await announced(driver, wanted)
        await router.learns(f"{VIP}/32", f"{VIP6}/128")
        assert metrics(driver)["fairlead_bgp_cut_off"] == 0
    async with running(folder / "b", [peer()]) as driver:
        assert not driver.held_back


@pytest.mark.parametrize("api", ["answers", "stays away"])
async def test_a_process_that_starts_while_its_host_is_cut_off_holds_back(
    folder: Path, router_of: Routers, api: str
) -> None:
    """Without the API server, everything is announced again when a session has been established for
    a while: a gateway that is alone must work. The peers are not known yet, and a Service may name
    more than BIRD can read."""
    router = router_of("bird")
    await router.start()
    names = ("tor1", *(f"tor-{number}" for number in range(10_000)))
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP, peers=tuple(sorted(names)))})
        await router.learns(f"{VIP}/32")
        router.stop()
        await until(lambda: alone(driver))
    state, driver = State(("services",)), driver_in(folder / "b", [peer()])
    obstacle = driver.speaker.bird.routes.with_suffix(".new")
    obstacle.mkdir()  # the file cannot be written at first
    watch = asyncio.ensure_future(StartWatch(state, driver).run())
    try:
        await until(lambda: holds_back(driver))
        assert await driver.speaker.prefixes()
        obstacle.rmdir()
        await until(lambda: exports_nothing(driver))
        await router.start()
        if api == "answers":
            state.has_synced.set()
            await watch
            await driver.open()
            await established(driver, "tor1")
            await router.learns()
            assert metrics(driver)["fairlead_bgp_cut_off"] == 1
            assert metrics(driver)["fairlead_bgp_cuts_total"] == 1
        else:
            await router.learns(f"{VIP}/32")
            assert not driver.held_back
    finally:
        watch.cancel()


async def test_a_process_that_starts_after_a_cut_without_the_api_server_announces(
    folder: Path, router_of: Routers
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP)})
        await router.learns(f"{VIP}/32")
        await driver.hold_back(held=True)
        await router.learns()
    driver = driver_in(folder / "b", [peer()])
    watch = asyncio.ensure_future(StartWatch(State(("services",)), driver).run())
    try:
        await router.learns(f"{VIP}/32")
    finally:
        watch.cancel()


async def test_a_process_that_starts_without_the_api_server_keeps_what_is_announced(
    folder: Path, router_of: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = router_of("bird")
    await router.start()
    async with running(folder / "b", [peer()]) as driver:
        await announced(driver, {WEB: intent(VIP)})
        await router.learns(f"{VIP}/32")
    driver = driver_in(folder / "b", [peer()])
    loop = asyncio.get_running_loop()
    begun_s = checked_s = loop.time()
    reads_session = driver.reads_session

    async def check() -> bool:
        nonlocal checked_s
        checked_s = loop.time()
        return await reads_session()

    async def decided() -> bool:
        return checked_s > begun_s + START_S + CHECK_S

    monkeypatch.setattr(driver, "reads_session", check)
    watch = asyncio.ensure_future(StartWatch(State(("services",)), driver).run())
    try:
        await until(decided)
        assert await router.prefixes() == {f"{VIP}/32"}
        assert not driver.held_back
    finally:
        watch.cancel()


def synced() -> State:
    state = State(())
    state.has_synced.set()
    return state


def metrics(driver: BirdDriver) -> dict[str, float]:
    (collector,) = driver.collectors()
    return {each.name: each.value for family in collector.collect() for each in family.samples}


async def alone(driver: BirdDriver) -> bool:
    return not await driver.reads_session()


async def exports(driver: BirdDriver) -> bool:
    return not driver.held_back


async def holds_back(driver: BirdDriver) -> bool:
    return driver.held_back


async def exports_nothing(driver: BirdDriver) -> bool:
    return driver.held_back and not await driver.speaker.prefixes()
