"""Gateways that find each other by their Leases (`gateway.peers: auto`)."""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from fairlead.config import Config
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import ObjectKey
from fairlead.kube.presence import lease_name
from fairlead.lab.apiserver import ApiServer
from fairlead.net.selection import Present, select
from fairlead.role_state import PeerState
from fairlead.roles.gateway import others_of, peers_of, search_of
from fairlead.roles.gateways import FoundPeers
from fairlead.roles.peer_search import first_address
from fairlead.roles.presence import Announcer
from fairlead.state import State
from fairlead.web import View

GATEWAYS = {"gw1": "192.0.2.11:9445", "gw2": "192.0.2.12:9445"}


def config(name: str, **gateway: object) -> Config:
    section = {"peers": "auto", "peerListen": GATEWAYS[name], **gateway}
    return msgspec.convert({"presence": {"leaseDurationS": 1.0}, "gateway": section}, Config)


@pytest.mark.parametrize(
    ("present", "first"),
    [
        ([Present("eth0", ("fe80::1", "2001:db8::1", "192.0.2.1", "192.0.2.2"))], "192.0.2.1"),
        ([Present("eth0", ("fe80::1", "2001:db8::1"))], "2001:db8::1"),
        ([Present("eth0", ("fe80::1",)), Present("eth1", ("192.0.2.1",))], "192.0.2.1"),
        ([Present("lo", ("127.0.0.1",)), Present("other", ("192.0.2.1",))], ""),
        ([], ""),
    ],
)
def test_others_connect_to_the_first_address_of_the_interfaces(
    present: Sequence[Present], first: str
) -> None:
    assert first_address(select(["eth*"], present)) == first


async def test_gateways_find_each_other_by_their_leases() -> None:
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        asyncio.TaskGroup() as group,
    ):
        namespace = Config().presence.namespace
        await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        tasks, shown = [], {}
        for name in GATEWAYS:
            # The addresses are not on a link of this host.
            section = config(name)
            peers = peers_of(section)
            assert peers is not None
            search = search_of(section, ("eth0",), peers)
            assert search is not None
            search._own_link = False
            await search.open()
            freshness = Freshness(lambda: client.answered_s)
            (watch,), known = others_of(section, client, State(()), freshness, None, name, search)
            assert not known
            announcer = Announcer(
                client,
                section.presence,
                View("gateway", name),
                name,
                peer=partial(getattr, search, "own"),
            )
            tasks += [group.create_task(each.run()) for each in (watch, announcer)]
            shown[name] = peers
        async with asyncio.timeout(20):
            while any(not each.shown for each in shown.values()):
                await asyncio.sleep(0.01)
            assert shown["gw1"].shown == [PeerState(GATEWAYS["gw2"], False)]
            assert shown["gw2"].shown == [PeerState(GATEWAYS["gw1"], False)]
            tasks.pop().cancel()
            await client.delete(LEASES, ObjectKey(namespace, lease_name("gateway", "gw2")))
            while shown["gw1"].shown:
                await asyncio.sleep(0.01)
        for each in tasks:
            each.cancel()


async def test_without_certificates_only_gateways_on_the_same_link_are_peers() -> None:
    section = config("gw1")
    peers = peers_of(section)
    assert peers is not None
    search = search_of(section, ("lo",), peers)
    assert search is not None
    await search.open()
    there = frozenset({"127.0.0.2:9445", "203.0.113.12:9445", "[2001:db8::2]:9445"})
    search.update(FoundPeers(there, there))
    assert [each.address for each in peers.shown] == ["127.0.0.2:9445"]
