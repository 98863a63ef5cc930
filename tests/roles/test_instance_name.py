"""Of two processes with one name, exactly one writes the Lease, and the other one says so."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from fairlead.config import PresenceConfig
from fairlead.drivers import Component
from fairlead.errors import Conflict
from fairlead.kube.access import Access
from fairlead.kube.announcers import ANNOUNCERS, announcer_name
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.events import EVENTS, EventRecorder
from fairlead.kube.lease_object import LEASES, Lease
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import Presence, lease_body, lease_name
from fairlead.model import Finding
from fairlead.role_state import BgpSession, BgpSessionState, BgpState
from fairlead.roles.announcing.report import AnnouncerReport, remove_announcer
from fairlead.roles.instance_name import InstanceName, Process
from fairlead.roles.presence import Announcer
from fairlead.web import View

SECTION = PresenceConfig(namespace=f"names-{secrets.token_hex(4)}", lease_duration_s=1.0)
NAME = SECTION.namespace
KEY = ObjectKey(NAME, lease_name("gateway", NAME))
EARLY, LATE = "2026-01-02T03:04:05Z", "2026-01-02T04:00:00Z"
CHANGES = 100


@pytest.fixture
async def client(access: Access) -> AsyncIterator[Client]:
    path = "/api/v1/namespaces"
    async with Client(access) as client:
        with contextlib.suppress(Conflict):  # of an earlier test
            await client.request("POST", path, body={"metadata": {"name": NAME}})
        yield client
        with contextlib.suppress(NotFound):
            await client.delete(LEASES, KEY)
        await remove_announcer(client, "gateway", NAME)


class Instance:
    """A process that reports under the name."""

    def __init__(self, client: Client, host: str, since: str) -> None:
        self.process = Process(since, f"{host}_1")
        self.told: list[Finding] = []
        self.name = InstanceName(
            client, KEY, self.process, f"gateway {NAME}", lease_s=1.0, told=self._tell
        )

    def _tell(self, _lease: Lease, finding: Finding) -> None:
        self.told.append(finding)

    async def renew(self) -> None:
        record = Presence("gateway", NAME, "1", self.process.since)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = lease_body(record, identity=self.process.identity, now=now, lease_s=1.0)
        await self.name.write(body)


async def holder(client: Client) -> str | None:
    return (await client.get(LEASES, KEY)).spec.holder_identity


@pytest.mark.parametrize("first", ["early", "late"])
async def test_the_process_that_started_earlier_yields(client: Client, first: str) -> None:
    early, late = Instance(client, "host1", EARLY), Instance(client, "host2", LATE)
    order = [early, late] if first == "early" else [late, early]
    for each in (*order, *order, *order):
        await each.renew()
        assert len([one for one in order if one.name.finding]) <= 1
    assert await holder(client) == "host2_1"
    assert late.name.finding is None
    assert [finding.code for finding in early.told] == ["NameInUse"]
    assert "host2" in early.told[0].message
    assert LATE in early.told[0].message


async def test_it_reports_again_when_the_lease_of_the_other_one_has_expired(client: Client) -> None:
    early, late = Instance(client, "host1", EARLY), Instance(client, "host2", LATE)
    for each in (early, late, early):
        await each.renew()
    for _ in range(3):  # the other one is alive
        await late.renew()
        await early.renew()
    assert await holder(client) == "host2_1"
    async with asyncio.timeout(60):
        while early.name.finding is not None:
            await early.renew()
            await asyncio.sleep(0.1)
    assert await holder(client) == "host1_1"
    await late.renew()  # it was only suspended
    await early.renew()
    assert await holder(client) == "host2_1"


async def test_other_writers_of_the_lease_are_no_processes(client: Client) -> None:
    one = Instance(client, "host1", EARLY)
    await one.renew()
    await client.patch(LEASES, KEY, {"metadata": {"annotations": {"example.com/note": "seen"}}})
    await one.renew()
    assert await holder(client) == "host1_1"
    await client.delete(LEASES, KEY)
    await one.renew()
    assert await holder(client) == "host1_1"
    assert one.told == []


async def test_a_process_that_yields_writes_no_announcer_and_an_event(client: Client) -> None:
    view, recorder = View("gateway", NAME), EventRecorder(client, "fairlead-gateway")
    view.standing_by = lambda: True
    announcer = Announcer(client, SECTION, view, NAME, recorder=recorder)
    report = AnnouncerReport(client, view, [], recorder, lambda _: None, interval_s=0.05)
    await report.open()
    other = Instance(client, "host2", "2999-01-01T00:00:00Z")
    key = ObjectKey("", announcer_name("gateway", NAME))
    runs = [asyncio.ensure_future(each) for each in (announcer.run(), recorder.run())]
    try:
        async with asyncio.timeout(60):
            while not view.name_in_use():
                await other.renew()
                await asyncio.sleep(0.05)
            runs.append(asyncio.ensure_future(report.run()))
            while not (events := await client.list(EVENTS, namespace=NAME)):
                await other.renew()
                await asyncio.sleep(0.05)
            assert [each.reason for each in events] == ["NameInUse"]
            assert [each.code for each in view.state().host] == ["NameInUse"]
            with pytest.raises(NotFound):
                await client.get(ANNOUNCERS, key)
            while view.name_in_use():  # the other one has ended
                await asyncio.sleep(0.05)
            while key.name not in {each.metadata.name for each in await client.list(ANNOUNCERS)}:
                await asyncio.sleep(0.05)
    finally:
        for each in runs:
            each.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def test_a_name_that_is_in_use_for_long_leaves_one_event_for_each_subject(
    client: Client,
) -> None:
    """Sessions change many times meanwhile. Afterwards, only their last changes matter."""
    view, sent = View("gateway", NAME), Sent()
    view.standing_by = lambda: True
    other = Finding("NameInUse", "another process")
    view.name_in_use = lambda: (other,)
    source = Sessions()
    report = AnnouncerReport(
        client, view, [source], cast(EventRecorder, sent), lambda _: None, interval_s=0.01
    )
    await report.open()
    task = asyncio.ensure_future(report.run())
    try:
        async with asyncio.timeout(60):
            while source.read < CHANGES:
                await asyncio.sleep(0.01)
            assert sent.messages == []
            view.name_in_use = lambda: ()
            while not sent.messages:
                await asyncio.sleep(0.01)
        assert [each.rpartition(": ")[2] for each in sent.messages] == [f"error {CHANGES}"] * 2
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Sent:
    """The Events that were reported."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def event_about(self, *about: Any) -> None:
        self.messages.append(str(about[-1]))


class Sessions(Component):
    """Two BGP sessions that change each time they are read, and are down at the end."""

    def __init__(self) -> None:
        self.read = 0

    def status(self) -> BgpState:
        self.read += 1
        number = min(self.read, CHANGES)
        state: BgpSessionState = "established" if number % 2 else "down"
        error = "" if number % 2 else f"error {number}"
        return BgpState(
            sessions=tuple(
                BgpSession(peer, "192.0.2.1", state, EARLY, error) for peer in ("tor1", "tor2")
            )
        )
