"""A gateway observes the other gateways only if it announces addresses."""

import asyncio
from pathlib import Path

import msgspec

from fairlead.config import Config
from fairlead.drivers.announce import AnnounceDriver, NoAnnouncement
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.presence import OnLink
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.roles.gateway import announce_driver, others_of
from fairlead.roles.presence import Announcer
from fairlead.sections import AnnounceConfig, L2Config
from fairlead.state import State
from fairlead.web import View

SILENT = msgspec.convert({"presence": {"leaseDurationS": 1.0}}, Config)
ANNOUNCING = msgspec.structs.replace(SILENT, announce=AnnounceConfig(L2Config()))
LINK = OnLink("eth0", "192.0.2.0/24")


def test_the_interfaces_of_a_gateway_are_the_default_for_announcements(tmp_path: Path) -> None:
    state = State(())
    assert isinstance(announce_driver(SILENT, ("eth0",), state, "gw1"), NoAnnouncement)
    made = announce_driver(ANNOUNCING, ("eth0",), state, "gw1")
    assert isinstance(made, AnnounceDriver)
    assert made._selectors == ("eth0",)
    elsewhere = AnnounceConfig(L2Config(("eth1",)))
    made = announce_driver(
        msgspec.structs.replace(ANNOUNCING, announce=elsewhere), ("eth0",), state, "gw1"
    )
    assert isinstance(made, AnnounceDriver)
    assert made._selectors == ("eth1",)


async def test_a_gateway_that_announces_waits_until_it_knows_the_others() -> None:
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        asyncio.TaskGroup() as group,
    ):
        namespace = SILENT.presence.namespace
        await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        state, freshness = State(()), Freshness(lambda: client.answered_s)
        assert others_of(SILENT, client, state, freshness, None, "gw1") == ((), ())
        made = announce_driver(ANNOUNCING, ("eth0",), state, "gw2")
        assert isinstance(made, AnnounceDriver)
        (watch,), (known,) = others_of(ANNOUNCING, client, state, freshness, made, "gw2")
        view = View("gateway", "gw1")
        view.standing_by = lambda: True
        announcer = Announcer(client, ANNOUNCING.presence, view, "gw1", announces=lambda: [LINK])
        tasks = [group.create_task(watch.run()), group.create_task(announcer.run())]
        await known.open()
        assert state.gateways is not None
        async with asyncio.timeout(20):
            while state.gateways.announcers != {"gw1": (LINK,)}:
                await asyncio.sleep(0.01)
        for each in tasks:
            each.cancel()


async def test_without_the_right_to_watch_leases_a_gateway_starts_and_owns_nothing() -> None:
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        asyncio.TaskGroup() as group,
    ):
        server.faults.add(Fault("status", "GET", "/leases", code=403, count=0))
        state = State(())
        made = announce_driver(ANNOUNCING, ("eth0",), state, "gw1")
        assert isinstance(made, AnnounceDriver)
        (watch,), (known,) = others_of(
            ANNOUNCING, client, state, Freshness(lambda: client.answered_s), made, "gw1"
        )
        task = group.create_task(watch.run())
        await known.open()
        assert state.gateways is None
        task.cancel()
