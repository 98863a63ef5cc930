"""Lists and watches over HTTP: pages, versions, bookmarks, watch-lists, and the end of history."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp
import pytest

from fairlead.lab.apiserver import ApiServer, Write
from fairlead.lab.apiserver.kinds import PODS, SERVICES

Object = dict[str, Any]
Make = Callable[..., Object]
WRITE = Write("test")
PATH = "/api/v1/namespaces/default/services"
DEADLINE_S = 10


class Client(Protocol):
    session: aiohttp.ClientSession
    url: str

    async def call(self, method: str, path: str, body: object = None, media_type: str = ...) -> tuple[int, Any]: ...


class Watch:
    """A watch as a client sees it: one event after the other."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> Object:
        async with asyncio.timeout(DEADLINE_S):
            line = await self.answer.content.readline()
        assert line.endswith(b"\n"), f"the watch ended with {line!r}"
        event: Object = json.loads(line)
        return event

    async def rest(self) -> list[Object]:
        async with asyncio.timeout(DEADLINE_S):
            return [json.loads(line) for line in (await self.answer.content.read()).splitlines()]


@asynccontextmanager
async def watching(client: Client, query: str, path: str = PATH) -> AsyncIterator[Watch]:
    async with client.session.get(f"{client.url}{path}?watch=true&{query}") as answer:
        assert answer.status == 200, await answer.text()
        yield Watch(answer)


def names(events: list[Object]) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"].get("name", "")) for event in events]


@pytest.fixture
def fill(server: ApiServer, make_service: Make) -> Callable[..., None]:
    def fill(*names: str, **labels: str) -> None:
        for name in names:
            service = make_service(name)
            service["metadata"]["labels"] = labels
            server.registry.create(SERVICES, "default", service, WRITE)

    return fill


async def test_a_list_carries_the_version_of_the_store(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("b", "a")
    status, listed = await client.call("GET", PATH)
    assert (status, listed["kind"], listed["apiVersion"]) == (200, "ServiceList", "v1")
    assert listed["metadata"] == {"resourceVersion": str(server.store.version)}
    assert [item["metadata"]["name"] for item in listed["items"]] == ["a", "b"]
    status, elsewhere = await client.call("GET", "/api/v1/namespaces/kube-system/services")
    assert (status, elsewhere["items"]) == (200, [])
    status, everywhere = await client.call("GET", "/api/v1/services")
    assert len(everywhere["items"]) == 2


async def test_pages_show_one_moment(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a", "b", "c", "d", "e")
    _, page = await client.call("GET", f"{PATH}?limit=2")
    version = page["metadata"]["resourceVersion"]
    assert page["metadata"]["remainingItemCount"] == 3
    await client.call("DELETE", f"{PATH}/d")
    fill("bb")
    seen = [item["metadata"]["name"] for item in page["items"]]
    while token := page["metadata"].get("continue"):
        _, page = await client.call("GET", f"{PATH}?limit=2&continue={token}")
        assert page["metadata"]["resourceVersion"] == version
        seen += [item["metadata"]["name"] for item in page["items"]]
    assert seen == ["a", "b", "c", "d", "e"]


async def test_a_page_of_a_compacted_list_is_gone(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a", "b", "c")
    _, page = await client.call("GET", f"{PATH}?limit=1")
    fill("d")
    server.store.compact()
    status, gone = await client.call("GET", f"{PATH}?limit=1&continue={page['metadata']['continue']}")
    assert (status, gone["reason"], gone["code"]) == (410, "Expired", 410)
    status, refused = await client.call("GET", f"{PATH}?limit=1&continue=nonsense")
    assert (status, refused["message"]) == (400, "continue key is not valid")


async def test_versions_of_a_list(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a")
    then = server.store.version
    fill("b")
    _, exact = await client.call("GET", f"{PATH}?resourceVersion={then}&resourceVersionMatch=Exact")
    assert [item["metadata"]["name"] for item in exact["items"]] == ["a"]
    _, newer = await client.call("GET", f"{PATH}?resourceVersion={then}&resourceVersionMatch=NotOlderThan")
    assert len(newer["items"]) == 2
    _, any_version = await client.call("GET", f"{PATH}?resourceVersion=0")
    assert len(any_version["items"]) == 2
    status, future = await client.call("GET", f"{PATH}?resourceVersion={server.store.version + 50}")
    assert (status, future["reason"]) == (504, "Timeout")
    assert future["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"
    status, _ = await client.call("GET", f"{PATH}?resourceVersionMatch=Exact")
    assert status == 422


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("labelSelector=tier%3Dfront", ["a"]),
        ("labelSelector=tier%21%3Dfront", ["b", "c"]),
        ("labelSelector=tier+in+%28front%2Cback%29", ["a", "b"]),
        ("labelSelector=tier+notin+%28front%29", ["b", "c"]),
        ("labelSelector=tier", ["a", "b"]),
        ("labelSelector=%21tier", ["c"]),
        ("labelSelector=tier%2Ctier%21%3Dfront", ["b"]),
        ("fieldSelector=metadata.name%3Db", ["b"]),
        ("fieldSelector=metadata.name%21%3Db%2Cmetadata.namespace%3Ddefault", ["a", "c"]),
        ("fieldSelector=spec.type%3DLoadBalancer&labelSelector=tier%3Dback", ["b"]),
    ],
)
async def test_selectors(client: Client, fill: Callable[..., None], query: str, found: list[str]) -> None:
    fill("a", tier="front")
    fill("b", tier="back")
    fill("c")
    _, listed = await client.call("GET", f"{PATH}?{query}")
    assert [item["metadata"]["name"] for item in listed["items"]] == found


async def test_a_field_that_cannot_be_selected(client: Client) -> None:
    status, refused = await client.call("GET", f"{PATH}?fieldSelector=spec.ports%3D80")
    assert status == 400
    assert "field label not supported: spec.ports" in refused["message"]


async def test_a_watch_goes_on_from_its_version(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a")
    version = server.store.version
    fill("b")
    async with watching(client, f"resourceVersion={version}") as watch:
        assert names([await watch.next()]) == [("ADDED", "b")]
        await client.call("PATCH", f"{PATH}/a", {"metadata": {"labels": {"x": "y"}}}, "application/merge-patch+json")
        await client.call("DELETE", f"{PATH}/b")
        modified, deleted = await watch.next(), await watch.next()
    assert names([modified, deleted]) == [("MODIFIED", "a"), ("DELETED", "b")]
    assert modified["object"]["kind"] == "Service"
    assert int(deleted["object"]["metadata"]["resourceVersion"]) == server.store.version


@pytest.mark.parametrize("query", ["", "resourceVersion=0"])
async def test_a_watch_without_a_version_begins_with_what_is_there(
    client: Client, fill: Callable[..., None], query: str
) -> None:
    fill("a", "b")
    async with watching(client, query) as watch:
        assert names([await watch.next(), await watch.next()]) == [("ADDED", "a"), ("ADDED", "b")]
        fill("c")
        assert names([await watch.next()]) == [("ADDED", "c")]


async def test_an_object_enters_and_leaves_a_selection(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a")
    async with watching(client, f"resourceVersion={server.store.version}&labelSelector=tier%3Dfront") as watch:
        for label in ("front", "front", "back"):
            patch = {"metadata": {"labels": {"tier": label}, "annotations": {"n": str(server.store.version)}}}
            await client.call("PATCH", f"{PATH}/a", patch, "application/merge-patch+json")
        events = [await watch.next(), await watch.next(), await watch.next()]
    assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]
    assert events[2]["object"]["metadata"]["labels"] == {"tier": "front"}
    assert int(events[2]["object"]["metadata"]["resourceVersion"]) == server.store.version


async def test_a_watch_ends_in_time_with_a_bookmark(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a")
    version = server.store.version
    async with watching(client, f"resourceVersion={version}&timeoutSeconds=1&allowWatchBookmarks=true") as watch:
        server.registry.create(PODS, "default", pod("p"), WRITE)
        events = await watch.rest()
    assert {event["type"] for event in events} == {"BOOKMARK"}
    last = events[-1]["object"]
    assert (last["kind"], last["metadata"]["resourceVersion"]) == ("Service", str(server.store.version))
    async with watching(client, f"resourceVersion={version}&timeoutSeconds=1") as watch:
        assert await watch.rest() == []


def pod(name: str) -> Object:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "x"}]}}


async def test_a_watch_list_marks_the_end_of_what_was_there(
    client: Client, server: ApiServer, fill: Callable[..., None]
) -> None:
    fill("a", "b")
    query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion="
    async with watching(client, query) as watch:
        events = [await watch.next() for _ in range(3)]
        assert names(events[:2]) == [("ADDED", "a"), ("ADDED", "b")]
        metadata = events[2]["object"]["metadata"]
        assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
        assert metadata["resourceVersion"] == str(server.store.version)
        fill("c")
        while (event := await watch.next())["type"] == "BOOKMARK":
            assert "annotations" not in event["object"]["metadata"]
        assert names([event]) == [("ADDED", "c")]


@pytest.mark.parametrize(
    "query", ["watch=true&sendInitialEvents=true", "sendInitialEvents=true", "watch=true&resourceVersionMatch=Exact"]
)
async def test_watch_list_options_that_contradict(client: Client, query: str) -> None:
    status, refused = await client.call("GET", f"{PATH}?{query}")
    assert (status, refused["reason"]) == (422, "Invalid")


async def test_a_version_before_the_compaction_is_an_error_event(
    client: Client, server: ApiServer, fill: Callable[..., None]
) -> None:
    fill("a")
    old = server.store.version
    fill("b")
    server.store.compact()
    async with watching(client, f"resourceVersion={old}") as watch:
        events = await watch.rest()
    assert [event["type"] for event in events] == ["ERROR"]
    status = events[0]["object"]
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
    assert status["message"] == f"too old resource version: {old} ({server.store.compacted})"
    async with watching(client, f"resourceVersion={server.store.version}") as watch:
        fill("c")
        assert names([await watch.next()]) == [("ADDED", "c")]


async def test_history_is_bounded(make_service: Make) -> None:
    async with ApiServer(history_limit=5) as server:
        for number in range(8):
            server.registry.create(SERVICES, "default", make_service(f"s{number}"), WRITE)
        assert server.store.version - server.store.compacted == 5
        assert len(server.store.since(SERVICES, server.store.compacted)) == 5


async def test_watchers_share_one_encoding(server: ApiServer, fill: Callable[..., None]) -> None:
    one, two = server.store.watch(SERVICES, None), server.store.watch(SERVICES, None)
    fill("a")
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


async def test_a_watch_leaves_nothing_behind(client: Client, server: ApiServer) -> None:
    async with watching(client, "resourceVersion=1"):
        assert server.store.watcher_count == 1
    async with asyncio.timeout(DEADLINE_S):
        while server.store.watcher_count:
            await asyncio.sleep(0.01)


async def test_many_writes_reach_every_watcher_in_order(client: Client, server: ApiServer, make_service: Make) -> None:
    version = server.store.version
    async with watching(client, f"resourceVersion={version}") as one, watching(client, f"resourceVersion={version}") as two:
        for number in range(300):
            server.registry.create(SERVICES, "default", make_service(f"s{number}"), WRITE)
        for watch in (one, two):
            seen = [await watch.next() for _ in range(300)]
            assert [event["object"]["metadata"]["name"] for event in seen] == [f"s{number}" for number in range(300)]


async def test_a_table_for_kubectl(client: Client, server: ApiServer, fill: Callable[..., None]) -> None:
    fill("a")
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
    async with client.session.get(client.url + PATH, headers=accept) as answer:
        table = await answer.json()
    assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    shown = [column["name"] for column in table["columnDefinitions"] if column["priority"] == 0]
    assert shown == ["Name", "Type", "Cluster-IP", "External-IP", "Port(s)", "Age"]
    row = table["rows"][0]
    assert row["cells"][:4] == ["a", "LoadBalancer", "10.96.0.2", "<pending>"]
    assert row["object"]["kind"] == "PartialObjectMetadata"
    query = f"?watch=true&resourceVersion={server.store.version}"
    async with client.session.get(client.url + PATH + query, headers=accept) as answer:
        fill("b")
        event = await Watch(answer).next()
    assert (event["type"], event["object"]["kind"], event["object"]["rows"][0]["cells"][0]) == ("ADDED", "Table", "b")


@pytest.mark.parametrize(
    ("method", "path", "body", "media_type", "code"),
    [
        ("GET", f"{PATH}/none", None, "application/json", 404),
        ("GET", "/api/v1/namespaces/default/gadgets", None, "application/json", 404),
        ("GET", "/apis/example.com/v1/things", None, "application/json", 404),
        ("POST", PATH, {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "x"}}, "application/json", 400),
        ("POST", PATH, [1], "application/json", 400),
        ("POST", PATH, {"metadata": {"name": "x"}}, "application/cbor", 415),
        ("POST", PATH, {"metadata": {"name": "x"}}, "application/vnd.kubernetes.protobuf", 400),
        ("PATCH", f"{PATH}/x", {}, "application/json", 415),
        ("PATCH", f"{PATH}/x", {"apiVersion": "v1"}, "application/apply-patch+yaml", 422),
        ("PUT", PATH, {}, "application/json", 405),
        ("POST", f"{PATH}?dryRun=Maybe", {"metadata": {"name": "x"}}, "application/json", 422),
    ],
)
async def test_what_is_refused_is_a_status(
    client: Client, method: str, path: str, body: object, media_type: str, code: int
) -> None:
    status, refused = await client.call(method, path, body, media_type)
    assert (status, refused["kind"], refused["status"], refused["code"]) == (code, "Status", "Failure", code)


async def test_unknown_fields_are_kept_told_or_refused(client: Client, make_service: Make) -> None:
    service = make_service(externalTraficPolicy="Local")
    status, refused = await client.call("POST", f"{PATH}?fieldValidation=Strict", service)
    assert status == 400
    assert refused["message"] == (
        'Service in version "v1" cannot be handled as a Service: strict decoding error: '
        'unknown field "spec.externalTraficPolicy"'
    )
    async with client.session.post(client.url + PATH, json=service) as answer:
        assert answer.status == 201
        assert answer.headers["Warning"] == '299 - "unknown field \\"spec.externalTraficPolicy\\""'
        assert (await answer.json())["spec"]["externalTraficPolicy"] == "Local"


async def test_deletecollection(client: Client, fill: Callable[..., None]) -> None:
    fill("a", "b", tier="front")
    fill("c")
    status, _ = await client.call("DELETE", f"{PATH}?labelSelector=tier%3Dfront")
    assert status == 200
    _, listed = await client.call("GET", PATH)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["c"]
