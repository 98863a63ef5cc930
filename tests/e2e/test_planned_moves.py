"""Planned moves under a thousand open connections, where gateways announce the addresses: restarts
of the gateways, one after another and all at once, and a gateway that leaves."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.e2e.load import Load, addresses_of, until
from tests.e2e.test_announce_l2 import NODES, ask, command, owners, pod, service

from fairlead.lab.site import Site

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

OPEN = 1000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    lab = Site.create(f"mv{os.getpid()}", nodes=3, gateways_on_nodes=True, announce="l2")
    async with lab as made:
        await made.apply([pod(node) for node in NODES])
        await made.await_pods()
        await made.apply([service("web0")])
        yield made


async def restart(site: Site, *nodes: str) -> None:
    """Restart the gateways on these nodes, all at once."""
    await asyncio.gather(*(site.stop_role(node, "gateway") for node in nodes))
    await asyncio.gather(*(site.start_role(node, "gateway") for node in nodes))


async def test_restarts_of_all_gateways_break_none_of_a_thousand_connections(site: Site) -> None:
    addresses = {"web0": (await addresses_of(site, "web0"))[0]}

    async def owned() -> bool:
        first = ask(site, [*addresses.values()], 1)
        await asyncio.sleep(2)  # it moves while gateways start
        (answers,) = ask(site, [*addresses.values()], 1).values()
        return len(answers) == 1 and [answers] == [*first.values()]

    await until(owned, "an owner of the address")
    before = owners(site, addresses)
    async with Load(site, addresses["web0"], open_connections=OPEN) as load:
        for nodes in (*((each,) for each in NODES), NODES):
            period = await load.counts_during(restart(site, *nodes))
            assert (period.failed, period.broken, period.open_connections) == (0, [], OPEN), nodes
            assert owners(site, addresses) == before
        period = await load.counts_during(command(site, before["web0"], "--leave"))
        assert (period.failed, period.broken, period.open_connections) == (0, [], OPEN)
        assert owners(site, addresses) != before
