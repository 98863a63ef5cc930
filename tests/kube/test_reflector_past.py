"""The reflector at a server that was restored from a backup.

Such a server has another history: its versions have decreased, or have reached the previous version
with other objects. A watch from a version of the old history receives neither events nor an error,
so the reflector must detect the restoration itself."""

from typing import Any

import pytest

from fairlead.kube.access import Access
from fairlead.kube.answers import ServerUnavailable
from fairlead.kube.client import Client
from fairlead.kube.objects import SERVICES, ObjectKey
from fairlead.kube.reflector import Reflector, is_unreachable
from fairlead.kube.watch_events import is_older

A, B = (ObjectKey("default", name) for name in "ab")


def service(key: ObjectKey, version: int) -> dict[str, Any]:
    metadata = {"name": key.name, "namespace": key.namespace, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"ports": [{"port": 80}]}}


def quick(client: Any) -> Reflector[Any]:
    return Reflector(client, SERVICES, floor_s=0.01, ceiling_s=0.1)


async def test_decreased_versions_cause_a_new_list(
    scripted: Any, replies: Any, follow: Any
) -> None:
    """The connection breaks, and the server answers at once, at version 5 again."""
    paged = replies.failure(422)
    before = (paged, replies.page(service(A, 8), version=9), replies.watch(then="break"))
    after = (
        replies.page(service(B, 4), version=5),
        replies.page(service(B, 4), version=5),
        replies.watch(),
    )
    async with scripted(*before, *after) as (server, client), follow(quick(client)) as follower:
        await follower.until(lambda: follower.view.keys() == {B})
        assert follower.reflector.lists == 2
        version_queries = [query for query in server.queries if query.get("limit") == "1"]
        assert len(version_queries) == 1
        await follower.until(lambda: "watch" in server.queries[-1])
        assert server.queries[-1]["resourceVersion"] == "5"


@pytest.mark.parametrize("status", [502, 503])
async def test_a_server_that_was_unreachable_is_listed_again(
    status: int, scripted: Any, replies: Any, follow: Any
) -> None:
    """The server has another history, although its version is later than that of the reflector.
    Only a new list shows this."""
    before = (
        replies.failure(422),
        replies.page(service(A, 8), version=9),
        replies.watch(then="break"),
    )
    after = (replies.failure(status), replies.page(service(B, 12), version=12), replies.watch())
    async with scripted(*before, *after) as (_, client), follow(quick(client)) as follower:
        await follower.until(lambda: follower.view.keys() == {B})


@pytest.mark.parametrize("status", [429, 500, 504])
async def test_a_busy_server_is_not_listed_again(
    status: int, scripted: Any, replies: Any, follow: Any
) -> None:
    """The server responds, so it was not restarted. A new list would only add to its load."""
    before = (
        replies.failure(422),
        replies.page(service(A, 8), version=9),
        replies.watch(then="break"),
    )
    after = (
        replies.failure(status),
        replies.page(version=11),
        replies.watch({"type": "ADDED", "object": service(B, 12)}),
    )
    async with scripted(*before, *after) as (server, client), follow(quick(client)) as follower:
        await follower.until(lambda: follower.view.keys() == {A, B})
        assert follower.reflector.lists == 1
        assert server.queries[-1]["resourceVersion"] == "9"


async def test_a_slow_server_is_not_listed_again(scripted: Any, replies: Any, follow: Any) -> None:
    """A timeout of the client is no sign of a restored server, and a list for every client would
    overload a busy one."""
    before = (
        replies.failure(422),
        replies.page(service(A, 8), version=9),
        replies.watch(then="break"),
    )
    slow = (replies.silence(), replies.silence())
    after = (replies.page(version=11), replies.watch({"type": "ADDED", "object": service(B, 12)}))
    async with (
        scripted(*before, *slow, *after, timeout_s=0.5) as (server, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: follower.view.keys() == {A, B})
        assert follower.reflector.lists == 1
        assert server.queries[-1]["resourceVersion"] == "9"


async def test_a_connection_that_breaks_before_a_response_counts_as_unreachable(
    scripted: Any, replies: Any, follow: Any
) -> None:
    before = (
        replies.failure(422),
        replies.page(service(A, 8), version=9),
        replies.watch(then="break"),
    )
    after = (replies.watch(then="break"), replies.page(service(B, 12), version=12), replies.watch())
    async with scripted(*before, *after) as (_, client), follow(quick(client)) as follower:
        await follower.until(lambda: follower.view.keys() == {B})


async def test_a_closed_port_counts_as_unreachable() -> None:
    async with Client(Access("http://127.0.0.1:1")) as client:
        with pytest.raises(ServerUnavailable) as refused:
            await client.page(SERVICES, limit=1)
    assert is_unreachable(refused.value)


def test_versions_are_compared_as_numbers() -> None:
    assert is_older("99", "100")
    assert not is_older("100", "99")
    assert not is_older("7", "7")
    assert not is_older("", "7")
