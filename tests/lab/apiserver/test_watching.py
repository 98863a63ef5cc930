"""Lists and watches over HTTP: pages, versions, selections, bookmarks, watch-lists, and
compaction."""

from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from tests.lab.apiserver.api import Api, Failed, Object, Watch, version_of

from fairlead.lab.apiserver.kinds import EVENTS, SERVICES
from fairlead.lab.kubeapiserver import KubeApiServer

Make = Callable[..., Object]
Fill = Callable[..., Awaitable[str]]


def names(events: list[Object]) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"].get("name", "")) for event in events]


@pytest.fixture
def fill(api: Api, make_service: Make) -> Fill:
    """Create Services with these names and labels; return the version of the last one."""

    async def fill(*names: str, **labels: str) -> str:
        for name in names:
            service = make_service(name)
            service["metadata"]["labels"] = labels
            made = await api.create(SERVICES, service)
        return version_of(made)

    return fill


@pytest.fixture
def compact(
    request: pytest.FixtureRequest, api: Api, real_access: object
) -> Callable[[], Awaitable[None]]:
    """Make the server drop its history."""
    etcd = request.getfixturevalue("real_apiserver") if real_access is not None else None

    async def compact() -> None:
        if etcd is None:
            await api.call("POST", "/_faults", {"action": "compact"})
            return
        assert isinstance(etcd, KubeApiServer)
        revision = {"revision": await api.version(EVENTS), "physical": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{etcd.etcd_url}/v3/kv/compaction", json=revision) as answer,
        ):
            assert answer.status == 200, await answer.text()

    return compact


async def test_a_list_contains_the_version_of_the_store(api: Api, fill: Fill) -> None:
    version = await fill("b", "a")
    listed = await api.do("GET", api.path(SERVICES))
    assert (listed["kind"], listed["apiVersion"]) == ("ServiceList", "v1")
    assert listed["metadata"].keys() == {"resourceVersion"}
    assert int(listed["metadata"]["resourceVersion"]) >= int(version)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["a", "b"]
    assert all("kind" not in item for item in listed["items"]), (
        "the list names the kind of all items"
    )
    elsewhere = await api.do("GET", api.path(SERVICES, namespace="kube-public"))
    assert elsewhere["items"] == []
    everywhere = await api.do("GET", "/api/v1/services")
    assert {("a", api.namespace), ("b", api.namespace)} <= {
        (item["metadata"]["name"], item["metadata"]["namespace"]) for item in everywhere["items"]
    }


async def test_all_pages_of_a_list_show_one_version(api: Api, fill: Fill) -> None:
    await fill("a", "b", "c", "d", "e")
    path = api.path(SERVICES)
    page = await api.do("GET", f"{path}?limit=2")
    version = page["metadata"]["resourceVersion"]
    assert page["metadata"]["remainingItemCount"] == 3
    await api.delete(SERVICES, "d")
    await fill("bb")
    seen = [item["metadata"]["name"] for item in page["items"]]
    while token := page["metadata"].get("continue"):
        page = await api.do("GET", f"{path}?limit=2&continue={token}")
        assert page["metadata"]["resourceVersion"] == version
        seen += [item["metadata"]["name"] for item in page["items"]]
    assert seen == ["a", "b", "c", "d", "e"]


def event_body(name: str) -> Object:
    return {
        "metadata": {"name": name},
        "involvedObject": {"kind": "Service", "name": "web"},
        "reason": "Told",
        "type": "Normal",
    }


async def event(api: Api, name: str) -> str:
    obj = event_body(name)
    obj["involvedObject"]["namespace"] = api.namespace
    return version_of(await api.create(EVENTS, obj))


async def test_a_page_of_a_compacted_list_is_gone(
    api: Api, compact: Callable[[], Awaitable[None]]
) -> None:
    """The test uses Events: for other kinds the real server answers from its watch cache, even if
    etcd is compacted."""
    for name in "abc":
        await event(api, name)
    page = await api.do("GET", f"{api.path(EVENTS)}?limit=1")
    await event(api, "d")
    await compact()
    with pytest.raises(Failed) as gone:
        await api.do("GET", f"{api.path(EVENTS)}?limit=1&continue={page['metadata']['continue']}")
    assert (gone.value.code, gone.value.reason) == (410, "Expired")
    assert gone.value.message.startswith(
        "The provided continue parameter is too old to display a consistent list result."
    )
    # A client that prefers an inconsistent rest to none continues with the token in the error.
    rest = await api.do(
        "GET", f"{api.path(EVENTS)}?continue={gone.value.status['metadata']['continue']}"
    )
    assert [item["metadata"]["name"] for item in rest["items"]] == ["b", "c", "d"]
    with pytest.raises(Failed, match="continue key is not valid") as refused:
        await api.do("GET", f"{api.path(EVENTS)}?limit=1&continue=nonsense")
    assert refused.value.code == 400


async def test_a_list_accepts_a_version_with_a_match_rule(api: Api, fill: Fill) -> None:
    then = await fill("a")
    latest = await fill("b")

    async def listed(query: str) -> list[str]:
        items: list[Object] = (await api.do("GET", f"{api.path(SERVICES)}?{query}"))["items"]
        return [item["metadata"]["name"] for item in items]

    assert await listed(f"resourceVersion={then}&resourceVersionMatch=Exact") == ["a"]
    assert await listed(f"resourceVersion={latest}&resourceVersionMatch=NotOlderThan") == ["a", "b"]
    assert set(await listed("resourceVersion=0")) <= {"a", "b"}, "the watch cache may be behind"
    with pytest.raises(Failed) as refused:
        await listed("resourceVersionMatch=Exact")
    assert refused.value.causes == [
        "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless "
        "resourceVersion is provided"
    ]


async def test_a_version_that_is_too_large_is_refused(api: Api, fill: Fill) -> None:
    await fill("a")
    with pytest.raises(Failed) as future:
        await api.do("GET", f"{api.path(SERVICES)}?resourceVersion=99999999")
    assert (future.value.code, future.value.reason) == (504, "Timeout")
    assert future.value.message.startswith(
        "Timeout: Too large resource version: 99999999, current: "
    )
    assert future.value.details["causes"][0]["reason"] == "ResourceVersionTooLarge"


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
        ("fieldSelector=metadata.name%21%3Db%2Cmetadata.namespace%21%3Ddefault", ["a", "c"]),
        ("fieldSelector=spec.type%3DLoadBalancer&labelSelector=tier%3Dback", ["b"]),
    ],
)
async def test_label_and_field_selectors_select_objects(
    api: Api, fill: Fill, query: str, found: list[str]
) -> None:
    await fill("a", tier="front")
    await fill("b", tier="back")
    await fill("c")
    listed = await api.do("GET", f"{api.path(SERVICES)}?{query}")
    assert [item["metadata"]["name"] for item in listed["items"]] == found


async def test_an_unsupported_field_selector_is_refused(api: Api) -> None:
    with pytest.raises(Failed, match=r"field label not supported: spec\.ports") as refused:
        await api.do("GET", f"{api.path(SERVICES)}?fieldSelector=spec.ports%3D80")
    assert refused.value.code == 400


async def test_a_watch_continues_from_its_version(api: Api, fill: Fill) -> None:
    version = await fill("a")
    await fill("b")
    async with api.watch(SERVICES, f"resourceVersion={version}") as watch:
        assert names([await watch.next()]) == [("ADDED", "b")]
        await api.patch(SERVICES, "a", {"metadata": {"labels": {"x": "y"}}})
        await api.delete(SERVICES, "b")
        modified, deleted = await watch.next(), await watch.next()
    assert names([modified, deleted]) == [("MODIFIED", "a"), ("DELETED", "b")]
    assert modified["object"]["kind"] == "Service"
    assert int(version_of(deleted["object"])) > int(version_of(modified["object"]))


@pytest.mark.parametrize("query", ["", "resourceVersion=0"])
async def test_a_watch_without_a_version_begins_with_the_existing_objects(
    api: Api, fill: Fill, query: str
) -> None:
    await fill("a", "b")
    async with api.watch(SERVICES, query) as watch:
        assert names([await watch.next(), await watch.next()]) == [("ADDED", "a"), ("ADDED", "b")]
        await fill("c")
        assert names([await watch.next()]) == [("ADDED", "c")]


async def test_a_watch_reports_objects_that_enter_and_leave_a_selection(
    api: Api, fill: Fill
) -> None:
    version = await fill("a")
    async with api.watch(
        SERVICES, f"resourceVersion={version}&labelSelector=tier%3Dfront"
    ) as watch:
        for number, label in enumerate(("front", "front", "back")):
            patch = {"metadata": {"labels": {"tier": label}, "annotations": {"n": str(number)}}}
            last = await api.patch(SERVICES, "a", patch)
        events = [await watch.next(), await watch.next(), await watch.next()]
    assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]
    assert events[2]["object"]["metadata"]["labels"] == {"tier": "front"}
    assert version_of(events[2]["object"]) == version_of(last)


async def test_a_watch_ends_in_time_with_a_bookmark(api: Api, fill: Fill) -> None:
    """There was no event for this client, but the bookmark lets it continue from a later
    version."""
    version = await fill("a")
    async with (
        api.watch(
            SERVICES,
            f"resourceVersion={version}&timeoutSeconds=4&allowWatchBookmarks=true"
            "&fieldSelector=metadata.name%3Dz",
        ) as watch,
        api.watch(
            SERVICES, f"resourceVersion={version}&timeoutSeconds=1&fieldSelector=metadata.name%3Dz"
        ) as plain,
    ):
        latest = await fill("b")
        assert await plain.rest() == []
        events = await watch.rest()
    assert {event["type"] for event in events} == {"BOOKMARK"}
    last = events[-1]["object"]
    assert (last["kind"], last["apiVersion"]) == ("Service", "v1")
    assert int(last["metadata"]["resourceVersion"]) >= int(latest)


async def test_a_watch_list_marks_the_end_of_the_existing_objects(api: Api, fill: Fill) -> None:
    version = await fill("a", "b")
    query = (
        "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
        "&resourceVersion="
    )
    async with api.watch(SERVICES, query) as watch:
        first = await watch.next()
        events = [first, await watch.next(), await watch.next()]
        assert names(events[:2]) == [("ADDED", "a"), ("ADDED", "b")]
        metadata = events[2]["object"]["metadata"]
        assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
        assert int(metadata["resourceVersion"]) >= int(version)
        await fill("c")
        while (event := await watch.next())["type"] == "BOOKMARK":
            assert "annotations" not in event["object"]["metadata"]
        assert names([event]) == [("ADDED", "c")]


@pytest.mark.parametrize(
    "query",
    [
        "watch=true&sendInitialEvents=true",
        "sendInitialEvents=true",
        "watch=true&resourceVersionMatch=Exact",
    ],
)
async def test_contradictory_watch_list_options_are_refused(api: Api, query: str) -> None:
    with pytest.raises(Failed) as refused:
        await api.do("GET", f"{api.path(SERVICES)}?{query}")
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")


async def test_a_version_before_the_compaction_is_an_error_event(
    api: Api, compact: Callable[[], Awaitable[None]]
) -> None:
    old = await event(api, "a")
    for name in "bc":
        await event(api, name)
    await compact()
    async with api.watch(EVENTS, f"resourceVersion={old}") as watch:
        events = await watch.rest()
    assert [event["type"] for event in events] == ["ERROR"]
    status = events[0]["object"]
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
    assert "too old" in status["message"]
    async with api.watch(EVENTS, f"resourceVersion={await api.version(EVENTS)}") as watch:
        await event(api, "d")
        assert names([await watch.next()]) == [("ADDED", "d")]


async def test_many_writes_reach_every_watcher_in_order(api: Api, make_service: Make) -> None:
    version = await api.version()
    count = 60
    async with (
        api.watch(SERVICES, f"resourceVersion={version}") as one,
        api.watch(SERVICES, f"resourceVersion={version}") as two,
    ):
        for number in range(count):
            await api.create(SERVICES, make_service(f"s{number}", type="ClusterIP"))
        for watch in (one, two):
            seen = [await watch.next() for _ in range(count)]
            assert [event["object"]["metadata"]["name"] for event in seen] == [
                f"s{number}" for number in range(count)
            ]


async def test_kubectl_gets_a_table(api: Api, fill: Fill) -> None:
    version = await fill("a")
    as_table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
    _, table = await api.call("GET", api.path(SERVICES), Accept=as_table)
    assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    shown = [column["name"] for column in table["columnDefinitions"] if column["priority"] == 0]
    assert shown == ["Name", "Type", "Cluster-IP", "External-IP", "Port(s)", "Age"]
    row = table["rows"][0]
    assert (row["cells"][:2], row["cells"][3]) == (["a", "LoadBalancer"], "<pending>")
    assert row["object"]["kind"] == "PartialObjectMetadata"
    path = f"{api.path(SERVICES)}?watch=true&resourceVersion={version}"
    async with api.request("GET", path, Accept=as_table) as answer:
        await fill("b")
        event = await Watch(answer).next()
    assert (event["type"], event["object"]["kind"], event["object"]["rows"][0]["cells"][0]) == (
        "ADDED",
        "Table",
        "b",
    )


SERVICES_OF = "/api/v1/namespaces/{}/services"


@pytest.mark.parametrize(
    ("method", "path", "body", "media_type", "code"),
    [
        ("GET", f"{SERVICES_OF}/none", None, "application/json", 404),
        ("GET", "/api/v1/namespaces/{}/gadgets", None, "application/json", 404),
        ("GET", "/apis/example.com/v1/things", None, "application/json", 404),
        (
            "POST",
            SERVICES_OF,
            {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "x"}},
            "application/json",
            400,
        ),
        ("POST", SERVICES_OF, [1], "application/json", 400),
        ("POST", SERVICES_OF, {"metadata": {"name": "x"}}, "application/xml", 415),
        (
            "POST",
            SERVICES_OF,
            {"metadata": {"name": "x"}},
            "application/vnd.kubernetes.protobuf",
            400,
        ),
        ("PATCH", f"{SERVICES_OF}/x", {}, "application/json", 415),
        ("PATCH", f"{SERVICES_OF}/x", {"apiVersion": "v1"}, "application/apply-patch+yaml", 422),
        ("PUT", SERVICES_OF, {}, "application/json", 405),
        (
            "POST",
            f"{SERVICES_OF}?dryRun=Maybe",
            {"metadata": {"name": "x"}},
            "application/json",
            422,
        ),
    ],
)
async def test_a_refusal_is_a_status_object(
    api: Api, method: str, path: str, body: object, media_type: str, code: int
) -> None:
    status, refused = await api.call(method, path.format(api.namespace), body, media_type)
    if (status, code) == (404, 404) and isinstance(refused, str):
        # For a path outside of its API groups, the real server answers without a Status, like an
        # ordinary web server.
        assert (api.name, refused) == ("real", "404 page not found\n")
        return
    assert (status, refused["kind"], refused["status"], refused["code"]) == (
        code,
        "Status",
        "Failure",
        code,
    )


async def test_unknown_fields_are_dropped_reported_or_refused(api: Api, make_service: Make) -> None:
    service = make_service(externalTraficPolicy="Local")
    with pytest.raises(Failed) as refused:
        await api.create(SERVICES, service, fieldValidation="Strict")
    assert refused.value.code == 400
    assert refused.value.message == (
        'Service in version "v1" cannot be handled as a Service: strict decoding error: '
        'unknown field "spec.externalTraficPolicy"'
    )
    async with api.request("POST", api.path(SERVICES), body=service) as answer:
        assert answer.status == 201
        assert answer.headers["Warning"] == '299 - "unknown field \\"spec.externalTraficPolicy\\""'
        assert "externalTraficPolicy" not in (await answer.json())["spec"]


async def test_a_collection_is_deleted(api: Api, fill: Fill) -> None:
    await fill("a", "b", tier="front")
    await fill("c")
    gone = await api.do("DELETE", f"{api.path(SERVICES)}?labelSelector=tier%3Dfront")
    assert (gone["kind"], [item["metadata"]["name"] for item in gone["items"]]) == (
        "ServiceList",
        ["a", "b"],
    )
    assert [item["metadata"]["name"] for item in await api.items(SERVICES)] == ["c"]
