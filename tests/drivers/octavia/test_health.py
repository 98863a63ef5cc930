"""`fairlead status` lists discrepancies: members with ready pods that a real Octavia reports as
failed, because their amphora reports them as failed."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.drivers.octavia.site import Site, listener, member, service, settings
from tests.openstack import clients
from tests.openstack.octavia import Octavia

from fairlead.lab.ports import free_port
from fairlead.web import View, serve

PROGRAM = Path(sys.executable).with_name("fairlead")


async def status(site: Site) -> list[str]:
    await site.driver.read(None)  # as an audit does
    view, address = View("controller", ""), f"127.0.0.1:{free_port()}"
    with view.showing(site.driver):
        async with serve(view, address):
            run = await asyncio.create_subprocess_exec(
                PROGRAM, "status", "--address", address, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await run.communicate()
    assert run.returncode == 0
    return output.decode().splitlines()


@pytest.mark.soak
async def test_a_member_with_ready_pods_that_octavia_reports_as_failed_is_listed(
    site: Site, octavia: Octavia
) -> None:
    await site.reconcile(service(listener(80, member(1), member(2), member(3, 0))))
    tree = await site.tree()
    (pool,), (front,) = tree.pools, tree.listeners
    first, second, third = (
        each.id for each in sorted(pool.members, key=lambda each: each.member.address)
    )
    (amphora,) = site.client.load_balancer.amphorae(loadbalancer_id=tree.id)
    discrepancy = (
        "default/web: pods are ready, but Octavia reports the load balancer as OFFLINE (load "
        f"balancer {tree.id})"
    )
    assert discrepancy in await status(site)  # no amphora has reported yet

    octavia.heartbeat(
        amphora.id, {(pool.id, front.id): {first: "UP", second: "DOWN", third: "DOWN"}}
    )
    clients.wait_until(
        lambda: site.client.load_balancer.get_member(second, pool.id).operating_status == "ERROR"
    )
    lines = await status(site)
    assert [line for line in lines if "are ready, but" in line] == [
        "default/web: TCP/80: pods on 10.1.0.2 are ready, but Octavia reports the member as ERROR "
        "(load "
        f"balancer {tree.id})"
    ]
    (row,) = (line for line in lines if line.startswith("default/web   "))
    assert "198.51.100.1 (amphora)   DEGRADED" in row
    assert "10.1.0.1:30080=1 ONLINE" in row


@pytest.mark.soak
async def test_members_without_a_health_monitor_are_not_listed(site: Site) -> None:
    await site.reconcile(service(octavia=settings(checks=None, monitor_types=())))
    lines = await status(site)
    assert not any("are ready, but" in line for line in lines)
    assert any("10.1.0.1:30080=1 NO_MONITOR" in line for line in lines)
