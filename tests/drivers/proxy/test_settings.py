"""The connection settings of a Service with a real HAProxy: they are changed on a live Service, and
apply to new connections."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from tests.drivers.proxy.site import (
    ClientConnection,
    balancer,
    connections,
    counted,
    new_answers,
    nodes,
    opened,
    reconcile,
    until,
)

from fairlead.model import LoadBalancer, ProxySettings
from fairlead.net.nftables import Nftables

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("inside")]


@pytest.mark.parametrize(
    "shorter",
    [ProxySettings(client_ms=100), ProxySettings(member_ms=100)],
    ids=["timeout-client-data", "timeout-member-data"],
)
async def test_silence_ends_connections_that_began_under_the_limit(
    folder: Path, shorter: ProxySettings
) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        before = await ClientConnection.start()
        assert await before.request() == ["node1", "-", "x"]
        await reconcile(driver, balancer({"node1": 1}, settings=shorter))
        after = await ClientConnection.start()
        assert await after.request() == ["node1", "-", "x"]
        with suppress(ConnectionError):
            assert await asyncio.wait_for(after.reader.read(), 10) == b""
        assert await before.request() == ["node1", "-", "x"]
        before.end()


async def test_a_silent_member_is_skipped_after_the_connect_timeout(folder: Path) -> None:
    with Nftables() as nft:
        nft.run(
            "table inet silence { chain input { type filter hook input priority 0; ip daddr "
            "127.0.1.9 drop; }; }"
        )
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(
            driver, balancer({"node1": 1, "node9": 1}, settings=ProxySettings(connect_ms=100))
        )
        assert await new_answers(4) == [["node1", "-", "x"]] * 4


async def test_more_connections_than_the_limit_wait(folder: Path) -> None:
    async with nodes("node1"), opened(folder) as driver:
        await reconcile(driver, balancer({"node1": 1}))
        await reconcile(driver, balancer({"node1": 1}, settings=ProxySettings(connection_limit=1)))
        first, second = await ClientConnection.start(), await ClientConnection.start()
        assert await first.request() == ["node1", "-", "x"]
        waiting = asyncio.ensure_future(second.request())
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        first.end()
        assert await waiting == ["node1", "-", "x"]
        second.end()


async def test_a_connection_is_passed_on_after_the_inspection_delay(
    folder: Path,
) -> None:
    """The delay applies to clients that send data and to silent ones. Until it ends no node gets
    the connection, so silent clients do not occupy nodes."""

    def inspecting(inspect_ms: int) -> LoadBalancer:
        return balancer({"node1": 1}, settings=ProxySettings(inspect_ms=inspect_ms))

    async with nodes("node1"), opened(folder) as driver:

        async def come(count: int) -> bool:
            return (await counted(driver, "stot"))["FRONTEND"] == str(count)

        async def passed_on(count: int) -> bool:
            return await connections(driver) == {"node1": count}

        await reconcile(driver, inspecting(0))
        silent = await ClientConnection.start()
        await until(lambda: passed_on(1))
        assert await silent.request() == ["node1", "-", "x"]

        await reconcile(driver, inspecting(3_600_000))
        held = [await ClientConnection.start() for _ in range(2)]
        answer = asyncio.ensure_future(held[0].request())  # the other client sends nothing
        await until(lambda: come(2))
        assert not (await asyncio.wait([answer], timeout=0.3))[0]
        assert await passed_on(0)
        assert await silent.request() == ["node1", "-", "x"]

        await reconcile(driver, inspecting(100))
        slow = await ClientConnection.start()
        await until(lambda: passed_on(1))
        assert await slow.request() == ["node1", "-", "x"]
        assert await new_answers() == [["node1", "-", "x"]]
        assert not answer.done()  # the connection keeps the settings with which it began
        assert await silent.request() == ["node1", "-", "x"]

        held[0].end()
        with suppress(ConnectionError):
            await answer
        for talk in (silent, slow, held[1]):
            talk.end()
