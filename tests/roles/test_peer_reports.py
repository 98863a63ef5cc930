"""The status of each BGPPeer is written when it changes, and only then."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from fairlead.announce_sections import BgpConfig
from fairlead.kube.access import Access
from fairlead.kube.announcers import status_of
from fairlead.kube.client import Client
from fairlead.kube.crds import BGP_PEERS
from fairlead.kube.events import EVENTS, EventRecorder
from fairlead.kube.reflector import Reflector
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.plan.announcers import Announcers, host_announcements
from fairlead.role_state import BgpSession, BgpState
from fairlead.roles.peer_reports import PeerReports
from fairlead.state import State

DEADLINE_S = 60.0
VALID = {"asn": 64512, "address": "192.0.2.1"}


class Bench:
    """The reports of some BGPPeers, with a state that follows the API server."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.state = State(("bgppeers",))
        self.known = asyncio.Event()
        self._recorder = EventRecorder(client, "fairlead-test")

        async def known() -> None:
            await self.known.wait()

        self._reports = PeerReports(
            client, self.state, BgpConfig(asn=64513), self._recorder, known, fence=lambda: None
        )

    async def _follow(self) -> None:
        async for changed in Reflector(self.client, BGP_PEERS).changes():
            self.state.update_bgp_peers(changed)
            self.state.mark_synced("bgppeers")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.ensure_future(each)
            for each in (
                self._follow(),
                *(each.run() for each in self._reports.components),
                self._recorder.run(),
            )
        ]
        try:
            await self.state.has_synced.wait()
            yield
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def announce(self, *sessions: BgpSession) -> None:
        """Let gateway gw1 have these sessions."""
        status = status_of("gateway", "gw1", None, BgpState(sessions=sessions), ready=True)
        self.state.update_announcers(Announcers({"gateway-gw1": host_announcements(status)}))

    async def conditions(self, name: str) -> Mapping[str, tuple[str, int]]:
        """Return the status and the observed generation of each condition."""
        shown = (await self.client.get(BGP_PEERS, ("", name))).status.conditions
        return {each.type: (each.status, each.observed_generation) for each in shown}

    async def shows(self, name: str, **wanted: tuple[str, int]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.conditions(name) != wanted:
                await asyncio.sleep(0.02)

    def writes(self, name: str) -> int:
        return sum(
            each.method == "PATCH" and f"/bgppeers/{name}/status" in each.path
            for each in self.server.requests
        )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with ApiServer() as server, Client(Access(server.url)) as client:
        await crds.install(client)
        for name, address in (("tor1", "192.0.2.1"), ("tor2", "192.0.2.2")):
            spec = {"asn": 64512, "address": address}
            await client.create(BGP_PEERS, {"metadata": {"name": name}, "spec": spec})
        yield Bench(server, client)


async def test_sessions_and_changes_of_the_object_are_shown_and_written_once(bench: Bench) -> None:
    bench.announce(BgpSession("tor1", "192.0.2.1", "established"))
    bench.known.set()
    async with bench.running():
        await bench.shows("tor1", Accepted=("True", 1), Established=("True", 1))
        await bench.shows("tor2", Accepted=("True", 1), Established=("False", 1))
        patch = {"spec": {"gracefulRestartTimeS": 30}}
        await bench.client.patch(BGP_PEERS, ("", "tor1"), patch)
        await bench.shows("tor1", Accepted=("True", 2), Established=("True", 2))
        bench.announce(BgpSession("tor1", "192.0.2.1", "down", last_error="Connection refused"))
        await bench.shows("tor1", Accepted=("True", 2), Established=("False", 2))
        found = await bench.client.get(BGP_PEERS, ("", "tor1"))
        assert found.status.sessions == "0/1"
        assert "gateway gw1: Connection refused" in found.status.conditions[1].message
    assert bench.writes("tor1") == 3
    assert bench.writes("tor2") == 1


async def test_nothing_is_written_before_it_is_known_what_hosts_announce(bench: Bench) -> None:
    async with bench.running():
        await asyncio.sleep(1)
        assert bench.writes("tor1") == 0
        bench.announce(BgpSession("tor1", "192.0.2.1", "established"))
        bench.known.set()
        await bench.shows("tor1", Accepted=("True", 1), Established=("True", 1))


async def test_a_mistake_and_its_end_are_reported_by_events(bench: Bench) -> None:
    async def reported(*reasons: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while sorted(each.reason for each in await bench.client.list(EVENTS)) != sorted(
                reasons
            ):
                await asyncio.sleep(0.02)

    bench.announce()
    bench.known.set()
    async with bench.running():
        for address, reasons in (
            ("224.0.0.5", ("PeerRefused",)),
            ("192.0.2.1", ("PeerRefused", "Recovered")),
        ):
            await bench.client.patch(BGP_PEERS, ("", "tor1"), {"spec": {"address": address}})
            await reported(*reasons)


async def test_a_peer_that_cannot_be_written_delays_no_other(bench: Bench) -> None:
    bench.server.faults.add(Fault("status", "PATCH", "/bgppeers/tor1/", 0, code=503))
    bench.announce()
    bench.known.set()
    async with bench.running():
        await bench.shows("tor2", Accepted=("True", 1), Established=("False", 1))
        bench.server.faults.clear()
        await bench.shows("tor1", Accepted=("True", 1), Established=("False", 1))
