"""A gateway is lost while slots are in transition, with real connections through three gateways and
the real roles. Without peers, a connection breaks if it was opened after the change, its slot has
changed, and it moves to another gateway. With peers no connection breaks."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.crowd import Crowd, Shop, check_unharmed, summary, without_moved_flows

from fairlead.lab.rundir import Transport
from fairlead.lab.site import Site

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

GATEWAYS = ("gw1", "gw2", "gw3")
FEW = 40
"""The number of UDP flows that may break because they began within the seconds before a loss and
had sent only one request, of about 400 flows per period. Without peers ten times as many break, all
of them QUIC."""
TRIES = 3
"""The number of attempts. An attempt does not count if a busy machine made a node seem down
meanwhile."""


@pytest_asyncio.fixture(loop_scope="module")
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    """A Service whose slots are in transition at all gateways: connections were open when pods were
    added."""
    lab = Site.create(
        f"peers{os.getpid()}",
        nodes=4,
        gateways=3,
        clients=1,
        transport=Transport(peers=request.param),
    )
    async with lab as site:
        shop = Shop(site)
        await shop.start(["node1", "node2"])
        await shop.create()
        await shop.await_weights(["node1", "node2"])
        async with Crowd(shop, tcp=100, udp=50, quic=50, new_per_s=10):
            await shop.place(["node1", "node2", "node3", "node3", "node4"])
        yield shop


async def withdraw_each_in_turn(shop: Shop) -> None:
    for gateway in GATEWAYS:
        await shop.site.route_vips([each for each in GATEWAYS if each != gateway])
        await asyncio.sleep(shop.interval_s)
        await shop.site.route_vips(GATEWAYS)
        await asyncio.sleep(shop.interval_s)


@pytest.mark.parametrize("shop", [False], indirect=True, ids=["alone"])
async def test_without_peers_connections_of_changed_slots_break(shop: Shop) -> None:
    async with Crowd(shop, tcp=300, udp=100, quic=100, new_per_s=50) as crowd:
        period = await crowd.counts_during(withdraw_each_in_turn(shop))
        print(summary(period))
        assert any(count.broken for name, count in period.items() if name.startswith("tcp"))


@pytest.mark.parametrize("shop", [True], indirect=True, ids=["peers"])
async def test_with_peers_no_flow_breaks(shop: Shop) -> None:
    async with Crowd(shop, tcp=300, udp=100, quic=100, new_per_s=50) as crowd:
        for event in (withdraw_each_in_turn, kill_and_restart):
            for _ in range(TRIES):
                since = shop.down_verdicts()
                period = await crowd.counts_during(event(shop))
                print(summary(period))
                if shop.down_verdicts() == since:
                    break
            # Gateways send a UDP flow to their peers from its second packet on.
            check_unharmed(without_moved_flows(period, FEW))


async def kill_and_restart(shop: Shop) -> None:
    await shop.site.route_vips(GATEWAYS[1:])
    await shop.site.kill_role("gw1")
    shop.gateways = list(GATEWAYS[1:])
    await shop.place(["node1", "node2", "node3", "node3", "node4", "node4", "node1"])
    await asyncio.sleep(shop.interval_s)
    await shop.place(
        ["node1", "node2", "node3", "node3", "node4", "node4", "node1", "node2", "node2"]
    )
    await shop.site.start_role("gw1")
    shop.gateways = list(GATEWAYS)
    await shop.site.route_vips(GATEWAYS)
    await asyncio.sleep(shop.interval_s)
