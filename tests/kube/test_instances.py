"""Which instances count as alive if the API server does not show all Leases to the command."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from fairlead.cli import instances as instances_module
from fairlead.config import PresenceConfig
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.instances import RENEW_TIME, observe
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import Announced, OnLink, Presence, lease_body, lease_name
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.roles.presence import Announcer
from fairlead.web import View

SECTION = PresenceConfig(lease_duration_s=1.0)
WATCHES, LISTS = "/leases.*watch=", "/leases(?!.*watch=)"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """An API server, with one gateway that renews its Lease continuously."""
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": SECTION.namespace}}
        )
        task = asyncio.ensure_future(
            Announcer(client, SECTION, View("gateway", "gw1"), "gw1").run()
        )
        async with asyncio.timeout(30):
            while not any(each.method == "PATCH" for each in server.requests):
                await asyncio.sleep(0.01)
        yield server
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def observed(server: ApiServer) -> list[tuple[str, bool]]:
    async with Client(Access(server.url), timeout_s=1.0) as client:
        return [(each.name, each.alive) for each in await observe(client, SECTION.namespace)]


async def test_an_instance_counts_as_alive_although_the_watch_is_forbidden(
    server: ApiServer,
) -> None:
    server.faults.add(Fault("status", "GET", WATCHES, code=403, count=0))
    assert await observed(server) == [("gw1", True)]


async def test_an_unreachable_server_is_an_error_and_not_a_missing_instance(
    server: ApiServer,
) -> None:
    server.faults.add(Fault("stall", "GET", WATCHES, count=0))
    observation = asyncio.ensure_future(observed(server))
    async with asyncio.timeout(30):
        while not any("watch=" in each.query for each in server.requests):
            await asyncio.sleep(0.01)
    server.faults.add(Fault("reset", "GET", LISTS, count=0))
    with pytest.raises(Unavailable):
        await observation


async def test_the_error_names_the_missing_permission(server: ApiServer) -> None:
    server.faults.add(Fault("status", "GET", LISTS, code=403, count=0))
    with pytest.raises(Refused, match="may not read the Leases of the roles") as problem:
        await observed(server)
    assert "`list` and `watch` leases.coordination.k8s.io" in str(problem.value)


async def test_a_gone_instance_shows_how_long_it_has_really_been_silent(server: ApiServer) -> None:
    """The command watches for one second, and the gateway has been dead for longer."""
    dead = Presence("gateway", "gw2", "1", "", ready=True)
    renewed = (datetime.now(UTC) - timedelta(seconds=53)).strftime(RENEW_TIME)
    body = lease_body(dead, identity="gw2", now=renewed, lease_s=1.0)
    key = ObjectKey(SECTION.namespace, lease_name("gateway", "gw2"))
    async with Client(Access(server.url)) as client:
        await client.apply(LEASES, key, body, field_manager="gw2", force=True)
        alive, gone = await observe(client, SECTION.namespace)
    assert (alive.name, alive.silent_s) == ("gw1", None)
    assert (gone.name, gone.state) == ("gw2", "gone")
    assert gone.silent_s is not None
    assert gone.silent_s >= 53


async def test_an_instance_shows_what_it_announces(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = (Announced("192.0.2.224", "eth0", "2026-01-02T03:04:05Z"),)
    record = Presence(
        "gateway",
        "gw2",
        "1",
        "",
        announces=(OnLink("eth0", "192.0.2.0/24"),),
        announced_count=3,
        announced=addresses,
    )
    key = ObjectKey(SECTION.namespace, lease_name("gateway", "gw2"))

    async def renew(client: Client) -> None:
        while True:
            now = datetime.now(UTC).strftime(RENEW_TIME)
            body = lease_body(record, identity="gw2", now=now, lease_s=1.0)
            await client.apply(LEASES, key, body, field_manager="gw2", force=True)
            await asyncio.sleep(0.1)

    async with Client(Access(server.url)) as client:
        renewing = asyncio.ensure_future(renew(client))
        instances = await observe(client, SECTION.namespace)
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
    assert [each.announced for each in instances if each.name == "gw2"] == [addresses]
    instances_module._tables(instances)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "192.0.2.224 gw2 eth0 2026-01-02T03:04:05Z" in lines
    assert "gateway gw2: announces 3 addresses, of 192.0.2.0/24 on eth0" in lines
    assert "gateway gw2: 2 more addresses: `fairlead status` on its host lists them" in lines
