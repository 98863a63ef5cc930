"""Fault injection, from the client's side."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from tests.lab.apiserver.api import Api

from fairlead.errors import Refused
from fairlead.lab.apiserver import ApiServer, Fault, Write
from fairlead.lab.apiserver.kinds import SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
PATH = "/api/v1/namespaces/default/services"
DEADLINE_S = 60


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (410, "Expired"),
        (409, "Conflict"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
    ],
)
async def test_a_status_fault_occurs_as_often_as_configured(
    client: Api, server: ApiServer, code: int, reason: str
) -> None:
    server.faults.add(Fault("status", "GET", "services$", count=2, code=code))
    assert (await client.call("GET", "/api/v1/nodes"))[0] == 200
    for _ in range(2):
        status, body = await client.call("GET", PATH)
        assert (status, body["code"], body["reason"]) == (code, code, reason)
    assert (await client.call("GET", PATH))[0] == 200


async def test_a_status_fault_may_have_a_retry_after_header(client: Api, server: ApiServer) -> None:
    server.faults.add(Fault("status", code=429, retry_after_s=7))
    async with client.session.get(client.url + PATH) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        assert (await answer.json())["details"]["retryAfterSeconds"] == 7


async def test_an_unlimited_fault_occurs_until_it_is_cleared(
    client: Api, server: ApiServer
) -> None:
    server.faults.add(Fault("status", count=0, code=503))
    assert [(await client.call("GET", PATH))[0] for _ in range(4)] == [503] * 4
    server.faults.clear()
    assert (await client.call("GET", PATH))[0] == 200


async def test_a_stall_lasts_as_long_as_configured(client: Api, server: ApiServer) -> None:
    server.faults.add(Fault("stall", path="services"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.call("GET", PATH)
    server.faults.add(Fault("stall", path="services", stall_s=0.05))
    assert (await client.call("GET", PATH))[0] == 200


async def test_a_reset_fault_drops_the_connection(client: Api, server: ApiServer) -> None:
    server.faults.add(Fault("reset", "POST"))
    service = {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}]}}
    with pytest.raises(aiohttp.ClientError):
        await client.call("POST", PATH, service)
    assert server.store.get(SERVICES, "default", "a") is None
    server.faults.add(Fault("lose", "POST"))
    with pytest.raises(aiohttp.ClientError):
        await client.call("POST", PATH, service)
    assert server.store.get(SERVICES, "default", "a") is not None
    assert (await client.call("GET", PATH))[0] == 200


async def read_until_end(answer: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """Return all bytes of a watch, and whether it ended properly."""
    data = b""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while chunk := await answer.content.readany():
                data += chunk
        except aiohttp.ClientPayloadError:
            return data, False
    return data, True


async def test_a_running_watch_is_cut_in_the_middle_of_a_line(
    client: Api, server: ApiServer, make_service: Make
) -> None:
    async with client.session.get(
        f"{client.url}{PATH}?watch=true&resourceVersion={server.store.version}"
    ) as answer:
        server.registry.create(SERVICES, "default", make_service("a"), Write("test"))
        line = await answer.content.readline()
        assert json.loads(line)["object"]["metadata"]["name"] == "a"
        server.faults.add(Fault("cut", path="watch=true"))
        data, whole = await read_until_end(answer)
    assert not whole
    assert data.startswith(b'{"type":"')
    assert not data.endswith(b"\n")
    with pytest.raises(json.JSONDecodeError):
        json.loads(data)


async def test_a_watch_is_cut_after_the_configured_number_of_events(
    client: Api, server: ApiServer, make_service: Make
) -> None:
    for name in "abcd":
        server.registry.create(SERVICES, "default", make_service(name), Write("test"))
    server.faults.add(Fault("cut", after_events=2))
    async with client.session.get(f"{client.url}{PATH}?watch=true") as answer:
        data, whole = await read_until_end(answer)
    lines = data.split(b"\n")
    assert not whole
    assert [json.loads(line)["object"]["metadata"]["name"] for line in lines[:2]] == ["a", "b"]
    assert len(lines) == 3
    assert lines[2]


async def test_an_end_fault_ends_a_watch(client: Api, server: ApiServer) -> None:
    async with client.session.get(f"{client.url}{PATH}?watch=true&resourceVersion=1") as answer:
        server.faults.add(Fault("end", path="watch"))
        data, whole = await read_until_end(answer)
    assert whole
    assert b"ERROR" not in data


async def test_a_watch_gets_an_error_event(client: Api, server: ApiServer) -> None:
    async with client.session.get(f"{client.url}{PATH}?watch=true&resourceVersion=1") as answer:
        server.faults.add(Fault("expire", path="watch"))
        data, whole = await read_until_end(answer)
    event = json.loads(data.splitlines()[-1])
    assert whole
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == (
        "ERROR",
        410,
        "Expired",
    )


async def test_a_stalled_watch_sends_nothing(
    client: Api, server: ApiServer, make_service: Make
) -> None:
    async with client.session.get(
        f"{client.url}{PATH}?watch=true&resourceVersion={server.store.version}"
    ) as answer:
        server.faults.add(Fault("stall", path="watch"))
        server.registry.create(SERVICES, "default", make_service("a"), Write("test"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await answer.content.readline()


async def test_bookmarks_can_be_suppressed(client: Api, server: ApiServer) -> None:
    query = "?watch=true&resourceVersion=1&allowWatchBookmarks=true&timeoutSeconds=1"
    async with client.session.get(client.url + PATH + query) as answer:
        assert b"BOOKMARK" in await answer.read()
    server.faults.add(Fault("no-bookmarks", count=0))
    async with client.session.get(client.url + PATH + query) as answer:
        assert await answer.read() == b""


async def test_connections_are_refused_and_accepted_again(client: Api, server: ApiServer) -> None:
    address = client.url.removeprefix("http://").split(":")
    async with client.session.get(f"{client.url}{PATH}?watch=true&resourceVersion=1") as answer:
        await server.refuse()
        _, whole = await read_until_end(answer)
        assert not whole
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(address[0], int(address[1]))
    await server.accept()
    assert (await client.call("GET", PATH))[0] == 200
    assert server.url == client.url


async def test_faults_are_configured_over_http(
    client: Api, server: ApiServer, make_service: Make
) -> None:
    await client.call(
        "POST", "/_faults", [{"action": "status", "path": "nodes", "code": 503}, {"action": "end"}]
    )
    status, waiting = await client.call("GET", "/_faults")
    assert (status, [fault["action"] for fault in waiting]) == (200, ["status", "end"])
    assert (await client.call("GET", "/api/v1/nodes"))[0] == 503
    await client.call("DELETE", "/_faults")
    assert list(server.faults) == []
    status, refused = await client.call("POST", "/_faults", {"action": "explode"})
    assert status == 400
    assert "set `action` to one of status, stall" in refused["message"]
    server.registry.create(SERVICES, "default", make_service("a"), Write("test"))
    await client.call("POST", "/_faults", {"action": "compact"})
    assert server.store.compacted == server.store.version


async def test_refused_connections_are_configured_over_http(client: Api, server: ApiServer) -> None:
    await client.call("POST", "/_faults", {"action": "refuse", "refuse_s": 0.3})
    refused = 0
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await client.call("GET", PATH)
            except aiohttp.ClientError:
                refused += 1
            else:
                if refused:
                    break
            await asyncio.sleep(0.02)
    assert refused > 0


async def test_requests_are_counted(client: Api, server: ApiServer) -> None:
    server.requests.clear()
    await client.call("GET", f"{PATH}?limit=5")
    await client.call("GET", f"{PATH}/x")
    await client.call("DELETE", f"{PATH}/x")
    assert [(request.method, request.path, request.query) for request in server.requests] == [
        ("GET", PATH, "limit=5"),
        ("GET", f"{PATH}/x", ""),
        ("DELETE", f"{PATH}/x", ""),
    ]
    assert (server.requests.count("GET"), server.requests.count("", "limit=5")) == (2, 1)
    _, logged = await client.call("GET", "/_requests")
    assert len(logged) == 3
    await client.call("DELETE", "/_requests")
    assert len(server.requests) == 0


def test_an_invalid_regular_expression_for_a_path_is_refused() -> None:
    async def add() -> None:
        ApiServer().faults.add(Fault("end", path="("))

    with pytest.raises(Refused, match="not a valid regular expression"):
        asyncio.run(add())
