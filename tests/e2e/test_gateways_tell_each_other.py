"""A gateway is lost while slots are in transition, with real connections through three gateways and
the real roles. Without peers, connections break that were opened since the change, in a slot that
changed, and that move to another gateway. With peers none breaks."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.crowd import Crowd, Shop, forgiving, summary, unharmed

from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

GATEWAYS = ("gw1", "gw2", "gw3")
FEW = 40
"""UDP flows that may have begun within the seconds before a loss and sent only one request: of
about 400 per period. Without peers ten times as many break, all of them QUIC."""
TRIES = 3
"""Number of attempts: one does not count if a busy machine made a node seem dead meanwhile."""


@pytest_asyncio.fixture(loop_scope="module")
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    """A Service whose tables are in transition at all gateways: connections were open when pods
    came."""
    lab = Site.create(
        f"peers{os.getpid()}",
        nodes=4,
        gateways=3,
        clients=1,
        transport=Transport(peers=request.param),
    )
    async with lab as site:
        made = Shop(site)
        await made.start(["node1", "node2"])
        await made.create()
        await made.settled(["node1", "node2"])
        async with Crowd(made, tcp=100, udp=50, quic=50, new_per_s=10):
            await made.place(["node1", "node2", "node3", "node3", "node4"])
        yield made


async def lose_each_in_turn(shop: Shop) -> None:
    for gateway in GATEWAYS:
        await shop.site.route_vips([each for each in GATEWAYS if each != gateway])
        await asyncio.sleep(shop.turn_s)
        await shop.site.route_vips(GATEWAYS)
        await asyncio.sleep(shop.turn_s)


@pytest.mark.parametrize("shop", [False], indirect=True, ids=["alone"])
async def test_without_peers_connections_of_changed_slots_break(shop: Shop) -> None:
    async with Crowd(shop, tcp=300, udp=100, quic=100, new_per_s=50) as crowd:
        period = await crowd.through(lose_each_in_turn(shop))
        print(summary(period))
        assert any(count.broken for name, count in period.items() if name.startswith("tcp"))


@pytest.mark.parametrize("shop", [True], indirect=True, ids=["peers"])
async def test_with_peers_nothing_breaks(shop: Shop) -> None:
    async with Crowd(shop, tcp=300, udp=100, quic=100, new_per_s=50) as crowd:
        for event in (lose_each_in_turn, die_and_come_back):
            for _ in range(TRIES):
                since = shop.deaths()
                period = await crowd.through(event(shop))
                print(summary(period))
                if shop.deaths() == since:
                    break
            # Gateways send a UDP flow to their peers from its second packet on.
            unharmed(forgiving(period, FEW))


async def die_and_come_back(shop: Shop) -> None:
    await shop.site.route_vips(GATEWAYS[1:])
    await shop.site.kill_role("gw1")
    shop.gateways = list(GATEWAYS[1:])
    await shop.place(["node1", "node2", "node3", "node3", "node4", "node4", "node1"])
    await asyncio.sleep(shop.turn_s)
    await shop.place(
        ["node1", "node2", "node3", "node3", "node4", "node4", "node1", "node2", "node2"]
    )
    await shop.site.start_role("gw1")
    shop.gateways = list(GATEWAYS)
    await shop.site.route_vips(GATEWAYS)
    await asyncio.sleep(shop.turn_s)
