"""Class ovn with packets through a real OVN: three chassis, pods on two of them, a client outside.

The gateway port of the router is on the third chassis, which has no pods."""

import asyncio
import signal
from collections.abc import Mapping
from typing import Any

import pytest
from tests.drivers.ovn.rows import API, VIP, VIP6, WEB, intent, intent_by_node_ports
from tests.drivers.ovn.traffic import (
    CONNECTIONS,
    DEADLINE_S,
    MARKED,
    applied,
    ask,
    call,
    call_udp,
    calls,
    connect,
    foreign_dump,
    removed,
    run_pass,
    running,
    served,
    settle,
    shared,
    until_answered,
)

from fairlead.drivers.ovn.checks import LAGGING
from fairlead.drivers.ovn.northbound import UNNAMED
from fairlead.drivers.ovn.spec import Site
from fairlead.lab import process
from fairlead.lab.ovn.layout import ROUTER
from fairlead.lab.ovn.site import CLIENT_ADDRESS, CLIENT_ADDRESS_V6, OvnSite


async def own_row(site: OvnSite) -> Mapping[str, Any]:
    """Return the only row of the driver."""
    rows = await site.central.rows("Load_Balancer")
    (row,) = (each for each in rows if each["external_ids"].get(MARKED) == "c1")
    return row


async def test_backends_get_connections_in_proportion_to_their_weights(site: OvnSite) -> None:
    await removed(site)
    weights = dict(zip((pod.name for pod in site.pods), (5, 3, 2), strict=False))
    addresses = {pod.address: weights[pod.name] for pod in site.pods if pod.name in weights}
    async with running(site) as driver:
        await settle(driver, intent_by_node_ports(addresses, port=8080))
        pods, peers = await calls(site.namespace("client"), VIP, CONNECTIONS)
        assert peers == {CLIENT_ADDRESS}
        shared(pods, weights)


async def test_each_pod_sees_the_client_and_gets_the_same_share(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, served(site, addresses=(VIP, VIP6)))
        pods, peers = await calls(site.namespace("client"), VIP, CONNECTIONS)
        assert peers == {CLIENT_ADDRESS}
        shared(pods, {pod.name: 1 for pod in site.pods})
        answers = [await call(site.namespace("client"), VIP6) for _ in range(20)]
        assert {each.peer for each in answers} == {CLIENT_ADDRESS_V6}


async def test_open_connections_survive_twenty_changes(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, served(site))
        held = [await connect(site.namespace("client"), VIP) for _ in range(40)]
        before = [await ask(each) for each in held]
        assert len({each.pod for each in before}) == len(site.pods)
        names = [pod.name for pod in site.pods]
        for number in range(20):
            chosen = [names[number % 4], *([names[(number + 1) % 4]] if number % 3 else [])]
            await applied(site, driver, served(site, *chosen))
            assert [await ask(each) for each in held] == before
            assert (await call(site.namespace("client"), VIP)).pod in chosen
        for each in held:
            each.close()


async def test_without_ready_pods_connections_are_refused(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, intent(()))
        for _ in range(10):
            with pytest.raises(ConnectionRefusedError):
                await call(site.namespace("client"), VIP)
        await settle(driver, served(site, "n2p1"))
        assert (await until_answered(site.namespace("client"), VIP)).pod == "n2p1"


async def test_a_deleted_service_refuses_and_its_open_connections_continue(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, served(site))
        held = await connect(site.namespace("client"), VIP)
        before = await ask(held)
        await applied(site, driver)
        assert await ask(held) == before
        with pytest.raises(ConnectionRefusedError):
            await call(site.namespace("client"), VIP)
        held.close()
    now_s = asyncio.get_running_loop().time() + 1e10
    async with running(site, clock=lambda: now_s) as driver:
        await settle(driver)
    assert not await site.central.rows("Load_Balancer")


async def test_an_address_serves_the_next_service_at_once(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await settle(driver, served(site, "n1p1"))
        following = served(site, "n2p1", key=API)
        outcome = (await run_pass(driver, following, keys=(API,)))[API]
        assert outcome.state == "waiting"
        assert f"Service {WEB} has not released {VIP}:80 yet" in outcome.message
        await settle(driver)
        await settle(driver, following, keys=(API,))
        await site.central.synchronize()
        pods, _ = await calls(site.namespace("client"), VIP, 20)
        assert pods.keys() == {"n2p1"}
        assert (await own_row(site))["external_ids"]["fairlead.io/service"] == str(API)


async def test_udp_datagrams_reach_a_pod_with_the_client_address(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, served(site, protocol="UDP"))
        answers = [await call_udp(site.namespace("client"), VIP) for _ in range(20)]
        assert {each.peer for each in answers} == {CLIENT_ADDRESS}
        assert len({each.pod for each in answers}) > 1


async def test_pods_reach_the_address_even_if_the_answer_comes_from_themselves(
    site: OvnSite,
) -> None:
    await removed(site)
    async with running(site) as driver:
        await applied(site, driver, served(site))
        caller = site.pods[0]
        pods, peers = await calls(site.namespace(caller.name), VIP, 40)
        assert pods.keys() == {pod.name for pod in site.pods}
        assert peers == {caller.address, VIP}


async def test_with_session_affinity_one_pod_answers(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await settle(driver, served(site, affinity_s=60))
        first = await until_answered(site.namespace("client"), VIP)
        pods, _ = await calls(site.namespace("client"), VIP, 20)
        assert pods.keys() == {first.pod}


async def test_rows_of_others_stay_as_they_are(site: OvnSite) -> None:
    await removed(site)
    control = site.central.control
    for name, vip, *marks in (
        ("octavia", "203.0.113.50:80", "external_ids:neutron\\:vip=203.0.113.50"),
        ("other", "203.0.113.51:80", f"external_ids:{MARKED}=c2"),
        ("plain", "203.0.113.52:80"),
    ):
        await control("nb", "lb-add", name, vip, "10.244.1.10:8080", "tcp")
        await control("nb", "lr-lb-add", ROUTER, name)
        for each in marks:
            await control("nb", "set", "load_balancer", name, each)
    before = await foreign_dump(site)
    async with running(site) as driver:
        await settle(driver, served(site))
        (row,) = [
            row for row in await site.central.rows("Load_Balancer") if "fairlead:" in row["name"]
        ]
        await control("nb", "set", "load_balancer", row["_uuid"], "external_ids:ls_refs=x")
        await settle(driver, served(site, "n1p1"))
        (row,) = [
            row for row in await site.central.rows("Load_Balancer") if "fairlead:" in row["name"]
        ]
        assert row["external_ids"]["ls_refs"] == "x"
        await settle(driver)
    assert await foreign_dump(site) == before


async def test_an_address_of_a_foreign_row_is_refused_with_its_name(site: OvnSite) -> None:
    await removed(site)
    await site.central.control("nb", "lb-add", "theirs", f"{VIP}:80", "10.244.1.10:8080", "tcp")
    await site.central.control("nb", "lr-lb-add", ROUTER, "theirs")
    async with running(site) as driver:
        outcome = (await run_pass(driver, served(site)))[WEB]
        assert outcome.state == "refused"
        assert f"another load balancer for {VIP}:80/TCP: row theirs" in outcome.message
        await site.central.control("nb", "lb-del", "theirs")
        await driver.read(None)
        await settle(driver, served(site))
        assert (await until_answered(site.namespace("client"), VIP)).peer == CLIENT_ADDRESS


async def test_after_a_restart_there_is_nothing_to_do(site: OvnSite) -> None:
    await removed(site)
    async with running(site) as driver:
        await settle(driver, served(site))
        await settle(driver, served(site, "n1p1", "n1p2"))
    async with running(site) as driver:
        desired = driver.render({WEB: served(site, "n1p1", "n1p2")})
        assert driver.diff(desired, await driver.read(None)) == []


async def test_rows_that_another_program_changes_or_deletes_are_restored(site: OvnSite) -> None:
    await removed(site)
    touched: list[Any] = []
    async with running(site, requeue=touched.extend) as driver:
        await settle(driver, served(site))
        for command in (
            ("lr-lb-del", ROUTER),
            ("clear", "load_balancer", "{row}", "vips"),
            ("lb-del", "{row}"),
            ("remove", "load_balancer", "{row}", "external_ids", "fairlead.io/vip"),
            ("remove", "load_balancer", "{row}", "external_ids", "fairlead.io/service"),
            ("set", "load_balancer", "{row}", "external_ids:fairlead.io/vip=203.0.113.9\\:80"),
            ("set", "load_balancer", "{row}", "protocol=udp"),
        ):
            (row,) = await site.central.rows("Load_Balancer")
            touched.clear()
            words = (each.format(row=row["_uuid"]) for each in command)
            await site.central.control("nb", *words)
            async with asyncio.timeout(DEADLINE_S):
                while WEB not in touched:
                    await asyncio.sleep(0.02)
            await settle(driver, served(site), keys=(WEB, UNNAMED))
            assert (await until_answered(site.namespace("client"), VIP)).peer == CLIENT_ADDRESS


async def test_a_router_that_does_not_exist_is_refused(site: OvnSite) -> None:
    await removed(site)
    async with running(site, Site("c1", "missing")) as driver:
        outcome = (await run_pass(driver, served(site)))[WEB]
        assert outcome.state == "refused"
        assert "no router missing" in outcome.message
    assert not await site.central.rows("Load_Balancer")


async def test_a_router_of_ovn_kubernetes_is_refused(site: OvnSite) -> None:
    await removed(site)
    mark = "external_ids:k8s.ovn.org/kind=Service"
    words = ("lr-add", "GR_node1", "--", "lb-add", "kube", "203.0.113.9:80", "10.244.9.9:80")
    await site.central.control("nb", *words)
    await site.central.control("nb", "set", "load_balancer", "kube", mark)
    await site.central.control("nb", "lr-lb-add", "GR_node1", "kube")
    async with running(site, Site("c1", "GR_node1")) as driver:
        outcome = (await run_pass(driver, served(site)))[WEB]
        assert outcome.state == "refused"
        assert "use class fairlead.io/announce" in outcome.message
    await site.central.control("nb", "lr-del", "GR_node1")


async def test_a_chassis_that_does_not_confirm_is_named_and_does_not_delay_for_ever(
    site: OvnSite,
) -> None:
    await removed(site)
    controller = process.one(site.lab, "ch1/ovn-controller")
    controller.send(signal.SIGSTOP)
    try:
        async with running(site) as driver:
            first = (await run_pass(driver, served(site)))[WEB]
            assert first.state == "waiting"
            notes = [note for each in await settle(driver, served(site)) for note in each.notes]
            assert [note.code for note in notes] == [LAGGING]
            # On a busy machine, other chassis may be late too.
            names = notes[0].message.removeprefix("chassis ").partition(" did not confirm")[0]
            assert "ch1" in names.split(", ")
    finally:
        controller.send(signal.SIGCONT)
    await site.central.synchronize()


async def test_without_a_database_nothing_counts_as_removed(site: OvnSite) -> None:
    await removed(site)
    async with running(site, claimed=lambda key: key == WEB) as driver:
        await settle(driver, served(site))
        server = process.one(site.lab, "ovn/ovsdb-nb")
        await server.kill()
        async with asyncio.timeout(DEADLINE_S):
            while (await run_pass(driver)).get(WEB) is None:
                await asyncio.sleep(0.02)
        outcomes = await run_pass(driver, keys=(WEB, API))
        assert {key: each.state for key, each in outcomes.items()} == {WEB: "unavailable"}
        await site.central.start_database("nb")
        await driver.wait_synced(DEADLINE_S)
        await settle(driver, served(site))
        assert len(await site.central.rows("Load_Balancer")) == 1
