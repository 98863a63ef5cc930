"""Class ovn when the chassis with the gateway port is killed.

The gateway port may be on the third chassis, which has no pods, or on the second one. Only this
file has a second gateway chassis, because on a busy machine the port may also move although both
are alive. Connections must survive that as well, so nothing here depends on when it moves."""

import asyncio
import json

from tests.drivers.ovn.rows import VIP
from tests.drivers.ovn.traffic import (
    DEADLINE_S,
    applied,
    ask,
    calls,
    connect,
    removed,
    running,
    served,
    settle,
    until_answered,
)

from fairlead.drivers.ovn.checks import LAGGING
from fairlead.lab.ovn.central import plain
from fairlead.lab.ovn.chassis import Chassis
from fairlead.lab.ovn.layout import OUTSIDE, ROUTER
from fairlead.lab.ovn.site import CLIENT_ADDRESS, OvnSite

CONNECTIONS = 30


async def watched(chassis: Chassis) -> set[str]:
    """Return the names of the other chassis that this one sees alive by BFD."""
    columns = "--columns=external_ids,options,bfd_status"
    answer = json.loads(await chassis.control("--format=json", columns, "list", "interface"))
    rows = [dict(zip(answer["headings"], map(plain, each), strict=True)) for each in answer["data"]]
    return {
        row["options"]["remote_ip"]
        for row in rows
        if row["bfd_status"] and row["bfd_status"]["state"] == "up"
    }


async def has_port(site: OvnSite, chassis: str) -> bool:
    """Return whether the gateway port is on this chassis."""
    (port,) = [
        row
        for row in await site.central.rows("Port_Binding", "sb")
        if row["logical_port"] == f"cr-{ROUTER}-{OUTSIDE}"
    ]
    (expected,) = [
        row["_uuid"] for row in await site.central.rows("Chassis", "sb") if row["name"] == chassis
    ]
    return bool(port["chassis"] == expected)


async def test_open_connections_survive_the_death_of_the_gateway_chassis(site: OvnSite) -> None:
    _, second, third = site.chassis
    port = f"{ROUTER}-{OUTSIDE}"
    for chassis, priority in ((third, "20"), (second, "10")):
        await site.central.control("nb", "lrp-set-gateway-chassis", port, chassis.name, priority)
    async with asyncio.timeout(DEADLINE_S):
        others = {each.tunnel_address for each in site.chassis} - {second.tunnel_address}
        while await watched(second) != others or not await has_port(site, third.name):
            await asyncio.sleep(0.1)
    await removed(site)
    client = site.namespace("client")
    async with running(site) as driver:
        await applied(site, driver, served(site))
        held = [await connect(client, VIP) for _ in range(CONNECTIONS)]
        before = [await ask(each) for each in held]
        for process in third.processes():
            await process.kill()
        await until_answered(client, VIP)
        assert await has_port(site, second.name)
        assert [await ask(each) for each in held] == before
        pods, peers = await calls(client, VIP, CONNECTIONS)
        assert peers == {CLIENT_ADDRESS}
        assert pods.keys() <= {pod.name for pod in site.pods}

        # Services are still changed, and the dead chassis is named.
        notes = [note for each in await settle(driver, served(site, "n2p1")) for note in each.notes]
        assert {each.code for each in notes} <= {LAGGING}
        async with asyncio.timeout(DEADLINE_S):
            while (await calls(client, VIP, 1))[0].keys() != {"n2p1"}:
                await asyncio.sleep(0.05)
        assert [await ask(each) for each in held] == before
        for each in held:
            each.close()
