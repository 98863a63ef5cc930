"""Properties of the embedded server only: a bounded history, and watchers that share one encoding
and leave nothing behind."""

import asyncio
from collections.abc import Callable

from tests.lab.apiserver.api import DEADLINE_S, Api, Object

from fairlead.lab.apiserver import ApiServer, Write
from fairlead.lab.apiserver.kinds import SERVICES

Make = Callable[..., Object]
WRITE = Write("test")


async def test_history_is_bounded(make_service: Make) -> None:
    async with ApiServer(history_limit=5) as server:
        for number in range(8):
            server.registry.create(SERVICES, "default", make_service(f"s{number}"), WRITE)
        assert server.store.version - server.store.compacted == 5
        assert len(server.store.since(SERVICES, server.store.compacted)) == 5


async def test_watchers_share_one_encoding(server: ApiServer, make_service: Make) -> None:
    one, two = server.store.watch(SERVICES, None), server.store.watch(SERVICES, None)
    server.registry.create(SERVICES, "default", make_service("a"), WRITE)
    (first,), (second,) = await one.take(1.0), await two.take(1.0)
    assert first.line is second.line


async def test_a_watcher_that_does_not_read_is_cut_off(make_service: Make) -> None:
    async with ApiServer() as server:
        watcher = server.store.watch(SERVICES, None)
        watcher.limit = 3
        for number in range(5):
            server.registry.create(SERVICES, "default", make_service(f"s{number}"), WRITE)
        assert watcher.closed
        assert len(await watcher.take(1.0)) == 3


async def test_a_watch_leaves_nothing_behind(client: Api, server: ApiServer) -> None:
    async with client.watch(SERVICES, "resourceVersion=1"):
        assert server.store.watcher_count == 1
    async with asyncio.timeout(DEADLINE_S):
        while server.store.watcher_count:
            await asyncio.sleep(0.01)
