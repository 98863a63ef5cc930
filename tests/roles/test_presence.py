"""A process takes over the record of an earlier process of the same instance, also if the API
server was unreachable at first."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fairlead.config import PresenceConfig
from fairlead.errors import Conflict
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import (
    Announced,
    OnLink,
    Presence,
    Warned,
    lease_body,
    lease_name,
    presence_of,
)
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.roles.presence import Announcer
from fairlead.web import View

SECTION = PresenceConfig(lease_duration_s=1.0)
LEFT = Warned("default/web", "HealthChecksFailing", "2026-01-02T03:04:05Z", "uid")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await client.request(
            "POST", "/api/v1/namespaces", body={"metadata": {"name": SECTION.namespace}}
        )
        yield server


def renewals(server: ApiServer) -> int:
    return sum(each.method == "PATCH" for each in server.requests)


async def test_an_unreachable_server_at_the_start_loses_no_warning(server: ApiServer) -> None:
    async with Client(Access(server.url)) as client:
        first = asyncio.ensure_future(
            Announcer(client, SECTION, View("node", "n1"), "n1", warned=lambda: [LEFT]).run()
        )
        await until(lambda: renewals(server) > 0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        warned: list[Warned] = []
        server.faults.add(Fault("status", "GET", "/leases/", count=2, code=503))
        announcer = Announcer(client, SECTION, View("node", "n1"), "n1", warned=lambda: warned)
        second = asyncio.ensure_future(announcer.run(resume=warned.extend))
        await until(lambda: bool(warned))
        renewed = renewals(server)
        await until(lambda: renewals(server) > renewed)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        record = presence_of(
            await client.get(LEASES, ObjectKey(SECTION.namespace, lease_name("node", "n1")))
        )
    assert warned == [LEFT]
    assert record is not None
    assert record.warned == (LEFT,)


async def test_without_permission_to_read_its_lease_a_process_announces_itself(
    server: ApiServer,
) -> None:
    server.faults.add(Fault("status", "GET", "/leases/", count=0, code=403))
    async with Client(Access(server.url)) as client:
        resumed: list[Warned] = []
        task = asyncio.ensure_future(
            Announcer(client, SECTION, View("node", "n1"), "n1").run(resume=resumed.extend)
        )
        await until(lambda: renewals(server) > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_another_network_is_announced_at_once(server: ApiServer) -> None:
    """Other gateways choose the owners of addresses by it."""
    section = PresenceConfig(lease_duration_s=600.0)
    links: list[OnLink] = []
    async with Client(Access(server.url)) as client:
        key = ObjectKey(section.namespace, lease_name("gateway", "gw1"))
        announcer = Announcer(
            client, section, View("gateway", "gw1"), "gw1", announces=lambda: links
        )
        task = asyncio.ensure_future(announcer.run())
        await until(lambda: renewals(server) > 0)
        links.append(OnLink("eth0", "192.0.2.0/24", "02:00:00:00:00:01"))
        await until(lambda: renewals(server) > 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        record = presence_of(await client.get(LEASES, key))
    assert record is not None
    assert record.announces == tuple(links)


async def test_a_restart_does_not_change_since_when_an_address_is_announced(
    server: ApiServer,
) -> None:
    key = ObjectKey(SECTION.namespace, lease_name("gateway", "gw1"))

    async def announced_by(view: View, owned: dict[str, str], renewed: int) -> list[Announced]:
        """Announce these addresses until there are this many renewals. Return those of the
        record."""
        async with Client(Access(server.url)) as client:
            announcer = Announcer(client, SECTION, view, "gw1", announced=lambda: owned)
            task = asyncio.ensure_future(announcer.run(resume=lambda _: None))
            until_s = renewals(server) + renewed
            await until(lambda: renewals(server) >= until_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            record = presence_of(await client.get(LEASES, key))
        assert record is not None
        assert record.announced_count == len(record.announced)
        return list(record.announced)

    ready = View("gateway", "gw1")
    ready.standing_by = lambda: True
    old = Announced("192.0.2.224", "eth0", "2026-01-02T03:04:05Z")
    async with Client(Access(server.url)) as client:
        record = Presence("gateway", "gw1", "1", "", announced_count=1, announced=(old,))
        body = lease_body(record, identity="former", now="", lease_s=1.0)
        del body["spec"]["renewTime"]  # type: ignore[attr-defined]
        await client.apply(LEASES, key, body, field_manager="test", force=True)
    starting = View("gateway", "gw1")
    assert await announced_by(starting, {"192.0.2.224": "eth0"}, 1) == [old], "the kernel answers"
    found = await announced_by(ready, {"192.0.2.224": "eth0", "192.0.2.225": "eth0"}, 2)
    assert found[0] == old
    assert [each.address for each in found] == ["192.0.2.224", "192.0.2.225"]
    assert await announced_by(starting, {}, 1) == [], "the host was booted"


class Late(Client):
    """A client whose requests to apply an object, while `down`, are kept and not answered."""

    down = False
    kept: list[tuple[Any, ...]]

    async def apply(self, *arguments: Any, **options: Any) -> Any:
        if self.down:
            self.kept.append((arguments, options))
            raise TimeoutError
        return await super().apply(*arguments, **options)


async def test_a_renewal_that_arrives_late_does_not_replace_a_newer_record(
    server: ApiServer,
) -> None:
    """As after an outage of the network, which the record still reports."""
    key = ObjectKey(SECTION.namespace, lease_name("gateway", "gw1"))
    problems = ["", "link down", "link down", ""]
    view = View("gateway", "gw1")
    async with Late(Access(server.url)) as client:
        announcer = Announcer(client, SECTION, view, "gw1", interfaces=lambda: problems[:1])
        client.kept = []
        for _ in range(2):
            assert await announcer._renew()
        client.down = True
        for _ in range(2):
            problems.pop(0)
            assert not await announcer._renew()
        client.down = False
        problems.pop(0)
        assert await announcer._renew()
        for arguments, options in client.kept:
            with pytest.raises(Conflict):
                await client.apply(*arguments, **options)
        assert (await record_at(client, key)).interfaces == ("",)

        # The first renewal after an outage may be the one that comes too late.
        client.down = True
        assert not await announcer._renew()
        client.down = False
        arguments, options = client.kept[-1]
        await client.apply(*arguments, **options)
        assert await announcer._renew()
        await client.delete(LEASES, key)
        for _ in range(2):
            await announcer._renew()
        assert (await record_at(client, key)).interfaces == ("",)


async def record_at(client: Client, key: ObjectKey) -> Presence:
    found = presence_of(await client.get(LEASES, key))
    assert found is not None
    return found
