"""Which instances count as alive if the API server does not show all Leases to the command."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from fairlead.cli import instances as instances_module
from fairlead.config import PresenceConfig
from fairlead.errors import Refused, Unavailable
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.instances import RENEW_TIME, observe
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.kube.presence import (
    Announced,
    Claimed,
    OnLink,
    Presence,
    lease_body,
    lease_name,
)
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.roles.presence import Announcer
from fairlead.web import View

SECTION = PresenceConfig(lease_duration_s=1.0)
SINCE = "2026-01-02T03:04:05Z"
MAC2, MAC3 = "02:00:00:00:00:02", "02:00:00:00:00:03"
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


def announcing(
    gateway: str,
    mac: str,
    *addresses: str,
    more: int = 0,
    claimed: tuple[Claimed, ...] = (),
) -> Presence:
    """The record of a gateway that announces these addresses on eth0, and `more` others."""
    return Presence(
        "gateway",
        gateway,
        "1",
        "",
        announces=(OnLink("eth0", "192.0.2.0/24", mac),),
        announced_count=len(addresses) + more,
        announced=tuple(Announced(each, "eth0", SINCE) for each in addresses),
        claimed=claimed,
    )


@asynccontextmanager
async def renewing(server: ApiServer, *records: Presence) -> AsyncIterator[None]:
    """Gateways that renew their Leases with these records."""

    async def renew() -> None:
        async with Client(Access(server.url)) as client:
            while True:
                now = datetime.now(UTC).strftime(RENEW_TIME)
                for each in records:
                    body = lease_body(each, identity=each.name, now=now, lease_s=1.0)
                    key = ObjectKey(SECTION.namespace, lease_name("gateway", each.name))
                    await client.apply(LEASES, key, body, field_manager=each.name, force=True)
                await asyncio.sleep(0.1)

    task = asyncio.ensure_future(renew())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def shown(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of the table, without repeated blanks, and those on standard error."""
    async with Client(Access(server.url)) as client:
        found = await instances_module.read(client, SECTION.namespace)
    instances_module._tables(found)
    output = capsys.readouterr()
    return [" ".join(line.split()) for line in (output.out + output.err).splitlines()]


async def create_service(client: Client, name: str, *addresses: str) -> None:
    """Create a Service whose status shows these addresses."""
    key = ObjectKey("default", name)
    spec = {"type": "LoadBalancer", "ports": [{"port": 80}]}
    await client.apply(SERVICES, key, {"spec": spec}, field_manager="test")
    status = {"loadBalancer": {"ingress": [{"ip": each} for each in addresses]}}
    await client.apply(
        SERVICES, key, {"status": status}, field_manager="test", subresource="status"
    )


async def test_announced_addresses_are_shown_with_their_services(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Client(Access(server.url)) as client:
        await create_service(client, "web", "192.0.2.9", "2001:db8::9")
        await create_service(client, "dns", "192.0.2.9")
    first = announcing("gw2", MAC2, "192.0.2.100", "192.0.2.9", more=2)
    async with renewing(server, first, announcing("gw3", MAC3, "192.0.2.20")):
        lines = await shown(server, capsys)
    begin = lines.index("ANNOUNCED SERVICE GATEWAY INTERFACE SINCE")
    assert lines[begin + 1 :] == [
        f"192.0.2.9 default/dns, default/web gw2 eth0 {SINCE}",
        f"192.0.2.20 - gw3 eth0 {SINCE}",
        f"192.0.2.100 - gw2 eth0 {SINCE}",
        "gateway gw2: announces 4 addresses, of 192.0.2.0/24 on eth0",
        "gateway gw2: and 2 more addresses: `fairlead status` on its host lists them",
        "gateway gw3: announces 1 address, of 192.0.2.0/24 on eth0",
    ]


async def test_programs_get_the_services_of_announced_addresses_and_their_other_users(
    server: ApiServer,
) -> None:
    claim = Claimed("192.0.2.9", "eth0", "02:00:00:00:00:99")
    async with Client(Access(server.url)) as client:
        await create_service(client, "web", "192.0.2.9")
        async with renewing(server, announcing("gw2", MAC2, "192.0.2.9", claimed=(claim,))):
            found = await instances_module.read(client, SECTION.namespace)
    (gateway,) = (each for each in json.loads(msgspec.json.encode(found)) if each["name"] == "gw2")
    assert gateway["announced"] == [
        {
            "address": "192.0.2.9",
            "interface": "eth0",
            "since": SINCE,
            "services": ["default/web"],
        }
    ]
    assert gateway["claimed"] == [
        {"address": "192.0.2.9", "interface": "eth0", "mac": "02:00:00:00:00:99"}
    ]


async def test_an_address_with_two_users_is_named(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = (
        Claimed("192.0.2.8", "eth0", "02:00:00:00:00:99"),
        Claimed("192.0.2.9", "eth0", MAC3),
    )
    first = announcing("gw2", MAC2, "192.0.2.8", "192.0.2.9", claimed=claims)
    async with renewing(server, first, announcing("gw3", MAC3, "192.0.2.9")):
        lines = await shown(server, capsys)
    remedy = "give that station another address, or exclude the address from the pool"
    assert lines[-3:] == [
        "192.0.2.9 is announced by gateways gw2, gw3: this is normal for a moment while the "
        "address moves",
        "192.0.2.8 is announced by gateway gw2 on eth0, and a station that is no gateway also uses "
        f"it (02:00:00:00:00:99); {remedy}",
        f"192.0.2.9 is announced by gateway gw2 on eth0, and gateway gw3 also uses it ({MAC3}); "
        f"{remedy}",
    ]


async def test_of_accepted_addresses_only_those_of_strangers_are_named(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels of gateways that announce nothing all answer for what they accept."""
    stranger = "02:00:00:00:00:99"
    claims = (Claimed("192.0.2.8", "eth0", MAC3), Claimed("192.0.2.9", "eth0", stranger))
    first = Presence("gateway", "gw2", "1", "", macs=(MAC2,), claimed=claims)
    async with renewing(server, first, Presence("gateway", "gw3", "1", "", macs=(MAC3,))):
        lines = await shown(server, capsys)
    assert [each for each in lines if "192.0.2." in each] == [
        f"192.0.2.9 is accepted by gateway gw2, and a station that is no gateway ({stranger}) "
        "answers for it on the network of its eth0; give that station another address, or exclude "
        "the address from the pool"
    ]


async def test_without_the_right_to_list_services_the_addresses_are_shown_alone(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Client(Access(server.url)) as client:
        await create_service(client, "web", "192.0.2.9")
    server.faults.add(Fault("status", "GET", "/services", code=403, count=0))
    async with renewing(server, announcing("gw2", MAC2, "192.0.2.9")):
        lines = await shown(server, capsys)
    assert f"192.0.2.9 - gw2 eth0 {SINCE}" in lines
    assert lines[-1].startswith("the Services of announced addresses are not shown: ")
    assert "403" in lines[-1]
