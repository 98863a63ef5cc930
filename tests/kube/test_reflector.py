"""The reflector with a scripted server, which sends everything that API servers, and proxies in
front of them, are known to send."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from fairlead.kube.objects import NODES, SERVICES, Node, ObjectKey, Service
from fairlead.kube.reflector import Reflector

A, B, C = (ObjectKey("default", name) for name in "abc")


def service(key: ObjectKey, version: int, port: int = 80, **annotations: str) -> dict[str, Any]:
    metadata = {
        "name": key.name,
        "namespace": key.namespace,
        "resourceVersion": str(version),
        "annotations": annotations,
    }
    return {"metadata": metadata, "spec": {"type": "LoadBalancer", "ports": [{"port": port}]}}


def event(kind: str, item: object) -> dict[str, object]:
    return {"type": kind, "object": item}


def bookmark(version: int, **annotations: str) -> dict[str, object]:
    return event(
        "BOOKMARK",
        {
            "kind": "Service",
            "metadata": {"resourceVersion": str(version), "annotations": annotations},
        },
    )


def streamed(*items: object, version: int) -> list[object]:
    """Return the events of a streamed list."""
    end = bookmark(version, **{"k8s.io/initial-events-end": "true"})
    return [*(event("ADDED", item) for item in items), end]


EXPIRED = event(
    "ERROR",
    {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"},
)


def quick(client: Any, resource: Any = SERVICES, **options: Any) -> Reflector[Any]:
    return Reflector(client, resource, floor_s=0.01, ceiling_s=0.2, **options)


async def test_a_streamed_list_is_one_change_set_and_events_follow(
    scripted: Any, replies: Any, follow: Any
) -> None:
    events = [
        event("MODIFIED", service(A, 6, 81)),
        event("DELETED", service(B, 7)),
        event("ADDED", service(C, 8)),
    ]
    async with scripted(
        replies.watch(*streamed(service(A, 1), service(B, 2), version=5), *events)
    ) as (server, client):
        async with follow(quick(client)) as follower:
            await follower.until(lambda: set(follower.view) == {A, C})
            assert A in follower.sets[0]
            assert follower.view[A].spec.ports[0].port == 81
            assert dict(follower.reflector.objects) == follower.view
        query = server.queries[0]
        assert (query["sendInitialEvents"], query["resourceVersionMatch"]) == (
            "true",
            "NotOlderThan",
        )
        assert query["allowWatchBookmarks"] == "true"
        assert "resourceVersion" not in query
        assert 240 <= int(query["timeoutSeconds"]) <= 300


async def test_nothing_is_reported_before_the_list_is_complete(
    scripted: Any, replies: Any, follow: Any
) -> None:
    part = [event("ADDED", service(A, 1))]
    whole = streamed(service(A, 1), service(B, 2), version=5)
    async with (
        scripted(replies.watch(*part, then="break"), replies.watch(*whole)) as (_, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: bool(follower.sets))
        assert follower.sets[0].keys() == {A, B}


async def test_an_empty_collection_is_reported_once(
    scripted: Any, replies: Any, follow: Any
) -> None:
    async with (
        scripted(replies.watch(*streamed(version=5))) as (_, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: follower.reflector.synced)
        await follower.until(lambda: len(follower.sets) == 1)
        assert follower.sets == [{}]


@pytest.mark.parametrize("code", [400, 422, 500])
async def test_a_server_without_streamed_lists_is_listed_in_pages(
    code: int, scripted: Any, replies: Any, follow: Any
) -> None:
    async with (
        scripted(
            replies.failure(code, "sendInitialEvents: Forbidden"),
            replies.page(service(A, 1), version=5, continues="more"),
            replies.page(service(B, 2), version=5),
            replies.watch(event("ADDED", service(C, 6))),
        ) as (server, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: C in follower.view)
        assert follower.sets[0].keys() == {A, B}
        assert [query.get("limit") for query in server.queries] == [None, "500", "500", None]
        assert server.queries[2]["continue"] == "more"
        assert server.queries[3]["resourceVersion"] == "5"


async def test_after_an_expired_page_the_list_is_requested_in_one_piece(
    scripted: Any, replies: Any, follow: Any
) -> None:
    async with (
        scripted(
            replies.failure(400),
            replies.page(service(A, 1), version=5, continues="more"),
            replies.failure(410, "the provided continue parameter is too old"),
            replies.page(service(B, 2), version=9),
            replies.watch(),
        ) as (server, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: bool(follower.sets))
        assert follower.view.keys() == {B}
        assert "limit" not in server.queries[3]


async def test_a_server_that_does_not_complete_a_streamed_list_is_listed_in_pages(
    scripted: Any, replies: Any, follow: Any
) -> None:
    async with (
        scripted(
            replies.watch(event("ADDED", service(A, 1))),
            replies.page(service(A, 1), version=5),
            replies.watch(),
        ) as (
            _,
            client,
        ),
        follow(quick(client, streamed_list_s=0.2)) as follower,
    ):
        await follower.until(lambda: A in follower.view)


async def test_a_streamed_list_that_ends_early_is_requested_in_pages(
    scripted: Any, replies: Any, follow: Any
) -> None:
    async with (
        scripted(
            replies.watch(event("ADDED", service(A, 1)), then="end"),
            replies.page(service(A, 1), version=5),
            replies.watch(),
        ) as (_, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: A in follower.view)


@pytest.mark.parametrize("how", ["status", "event"])
async def test_an_expired_version_causes_a_new_list_of_which_the_differences_are_reported(
    how: str, scripted: Any, replies: Any, follow: Any
) -> None:
    first = replies.watch(*streamed(service(A, 1), service(B, 2), version=5), then="end")
    expired = replies.failure(410) if how == "status" else replies.watch(EXPIRED)
    second = replies.watch(*streamed(service(A, 1), service(C, 7), version=9))
    async with (
        scripted(first, expired, second) as (server, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: follower.reflector.lists == 2)
        await follower.until(lambda: len(follower.sets) == 2)
        assert follower.sets[1].keys() == {B, C}
        assert follower.sets[1][B] is None
        assert follower.view.keys() == {A, C}
        assert server.queries[1]["resourceVersion"] == "5"


async def test_events_before_a_failure_in_the_same_packet_are_not_lost(
    scripted: Any, replies: Any, follow: Any
) -> None:
    import json

    packet = b"".join(
        json.dumps(item).encode() + b"\n" for item in (event("ADDED", service(B, 6)), EXPIRED)
    )
    first = replies.watch(*streamed(service(A, 1), version=5), packet)
    async with (
        scripted(first, replies.failure(503)) as (_, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: B in follower.view)


async def test_a_server_whose_versions_always_expire_gets_few_requests(
    scripted: Any, replies: Any, follow: Any
) -> None:
    async with scripted(
        replies.failure(400), replies.page(service(A, 1), version=5), replies.failure(410)
    ) as (server, client):
        server.replies = [replies.failure(400)]
        page, expired = replies.page(service(A, 1), version=5), replies.failure(410)

        async def reply(request: Any) -> Any:
            return await (page if "limit" in request.query else expired)(request)

        server.replies.append(reply)
        reflector: Reflector[Service] = Reflector(client, SERVICES, floor_s=0.05, ceiling_s=1.0)
        async with follow(reflector) as follower:
            await follower.until(lambda: bool(follower.sets))
            await asyncio.sleep(2.0)
        # The waits are at least 0.025, 0.05, 0.1, 0.2, 0.4, 0.5, 0.5 s, which makes seven rounds of
        # two requests; without waits there would be hundreds.
        assert 4 <= len(server.requests) <= 18


@pytest.mark.parametrize("then", ["end", "break"])
async def test_a_server_whose_watches_end_at_once_gets_few_requests(
    then: str, scripted: Any, replies: Any, follow: Any
) -> None:
    first = replies.watch(*streamed(service(A, 1), version=5), then=then)
    async with scripted(first, replies.watch(then=then)) as (server, client):
        async with follow(Reflector(client, SERVICES, floor_s=0.05, ceiling_s=1.0)) as follower:
            await follower.until(lambda: bool(follower.sets))
            await asyncio.sleep(1.5)
            assert follower.reflector.lists == 1
        assert 3 <= len(server.requests) <= 11


async def test_an_incomplete_line_is_discarded(scripted: Any, replies: Any, follow: Any) -> None:
    import json

    # The data is cut where it is complete JSON: only the newline is missing.
    cut = json.dumps(event("MODIFIED", service(A, 6, 666))).encode()
    for then in ("end", "break"):
        first = replies.watch(*streamed(service(A, 1), version=5), cut, then=then)
        second = replies.watch(event("MODIFIED", service(A, 6, 81)))
        there = replies.page(version=5)
        async with (
            scripted(first, there, second) as (server, client),
            follow(quick(client)) as follower,
        ):
            await follower.until(
                lambda follower=follower: (
                    A in follower.view and follower.view[A].spec.ports[0].port != 80
                )
            )
            assert follower.view[A].spec.ports[0].port == 81
            assert server.queries[2]["resourceVersion"] == "5"


async def test_a_very_long_line_is_read(scripted: Any, replies: Any, follow: Any) -> None:
    long = "x" * (3 << 20)
    async with (
        scripted(replies.watch(*streamed(service(A, 1, note=long), version=5))) as (_, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: A in follower.view)
        assert follower.view[A].metadata.annotations["note"] == long


async def test_a_watch_is_resumed_at_the_version_of_the_last_bookmark(
    scripted: Any, replies: Any, follow: Any
) -> None:
    first = replies.watch(*streamed(service(A, 1), version=5), bookmark(77), then="end")
    async with (
        scripted(first, replies.watch(event("ADDED", service(B, 78)))) as (server, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: B in follower.view)
        assert server.queries[1]["resourceVersion"] == "77"


async def test_a_silent_watch_is_ended_and_resumed(
    scripted: Any, replies: Any, follow: Any
) -> None:
    first = replies.watch(*streamed(service(A, 1), version=5))
    async with (
        scripted(first, replies.page(version=5), replies.watch(event("ADDED", service(B, 6)))) as (
            _,
            client,
        ),
        follow(quick(client, idle_s=0.2)) as follower,
    ):
        await follower.until(lambda: B in follower.view)


async def test_one_unreadable_object_does_not_affect_the_others(
    scripted: Any, replies: Any, follow: Any
) -> None:
    broken = service(B, 2)
    broken["spec"]["ports"] = "none"
    changed = service(A, 6)
    changed["spec"]["type"] = 7
    events = [
        event("MODIFIED", changed),
        event("ADDED", {"metadata": 3}),
        event("ADDED", service(C, 8)),
    ]
    with capture_logs() as logs:
        first = replies.watch(*streamed(service(A, 1), broken, version=5), *events)
        async with scripted(first) as (_, client), follow(quick(client)) as follower:
            await follower.until(lambda: C in follower.view)
            assert follower.view.keys() == {A, C}
            assert follower.view[A].spec.type == "LoadBalancer"
            assert follower.reflector.undecodable == 3
    warned = [entry["object"] for entry in logs if entry["event"] == "unreadable object skipped"]
    assert warned == ["default/b", "default/a"]


async def test_an_unreadable_object_in_a_new_list_keeps_its_previous_state(
    scripted: Any, replies: Any, follow: Any
) -> None:
    broken = service(A, 8)
    broken["spec"]["ports"] = "none"
    first = replies.watch(*streamed(service(A, 1), service(B, 2), version=5), EXPIRED)
    async with (
        scripted(first, replies.watch(*streamed(broken, version=9))) as (_, client),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: B not in follower.view and follower.reflector.lists == 2)
        assert follower.view.keys() == {A}
        assert follower.view[A].spec.ports[0].port == 80


async def test_a_forbidden_list_is_logged_once_and_retried(
    scripted: Any, replies: Any, follow: Any
) -> None:
    refusals = [replies.failure(403, 'services is forbidden: User "nobody" cannot list')] * 3
    with capture_logs() as logs:
        async with (
            scripted(
                *refusals, replies.watch(*streamed(service(A, 1), version=5), bookmark(6))
            ) as (_, client),
            follow(quick(client)) as follower,
        ):
            await follower.until(lambda: A in follower.view)
            await follower.until(lambda: any(entry["event"] == "watch resumed" for entry in logs))
    lost = [entry for entry in logs if entry["event"] == "watch lost"]
    assert len(lost) == 1
    assert lost[0]["log_level"] == "error"
    assert "cannot list" in lost[0]["problem"]
    assert "RBAC" in lost[0]["problem"]


async def test_the_retry_after_of_a_response_is_respected(
    scripted: Any, replies: Any, follow: Any
) -> None:
    async with scripted(
        replies.failure(429, Retry_After="1"), replies.watch(*streamed(version=5))
    ) as (server, client):
        async with follow(quick(client)) as follower:
            await follower.until(lambda: follower.reflector.synced)
        assert server.requests[1][0] - server.requests[0][0] >= 0.99


async def test_a_version_that_the_server_does_not_know_causes_a_new_list_after_some_attempts(
    scripted: Any, replies: Any, follow: Any
) -> None:
    first = replies.watch(*streamed(service(A, 1), version=5_000), then="end")
    unknown = [replies.failure(504, "Too large resource version: 5000, current: 12")] * 5
    async with (
        scripted(first, *unknown, replies.watch(*streamed(service(B, 9), version=12))) as (
            _,
            client,
        ),
        follow(quick(client)) as follower,
    ):
        await follower.until(lambda: follower.view.keys() == {B})


async def test_a_transform_may_remove_fields_and_objects(
    scripted: Any, replies: Any, follow: Any
) -> None:
    def keep(item: Service) -> Service | None:
        if item.spec.ports[0].port == 443:
            return None
        return Service(metadata=item.metadata)

    events = [
        event("MODIFIED", service(A, 6, 81)),
        event("MODIFIED", service(B, 7, 443)),
        event("ADDED", service(C, 8)),
    ]
    initial = streamed(service(A, 1), service(B, 2), version=5)
    async with (
        scripted(replies.watch(*initial, *events)) as (_, client),
        follow(quick(client, transform=keep)) as follower,
    ):
        await follower.until(lambda: C in follower.view)
        assert follower.view.keys() == {A, C}
        assert follower.view[A].spec.ports == ()
        # The port of A is dropped by `transform`, so a change of the port alone is not a change.
        assert sum(A in changed for changed in follower.sets) == 1


async def test_the_heartbeat_of_a_node_is_not_a_change(
    scripted: Any, replies: Any, follow: Any
) -> None:
    def node(version: int, address: str = "192.0.2.1") -> dict[str, Any]:
        addresses = [{"type": "InternalIP", "address": address}]
        conditions = [{"type": "Ready", "lastHeartbeatTime": f"beat {version}"}]
        metadata = {"name": "n", "resourceVersion": str(version)}
        return {"metadata": metadata, "status": {"addresses": addresses, "conditions": conditions}}

    beats = [event("MODIFIED", node(version)) for version in range(6, 16)]
    moved = event("MODIFIED", node(16, "192.0.2.9"))
    async with scripted(replies.watch(*streamed(node(1), version=5), 0.1, *beats, 0.1, moved)) as (
        _,
        client,
    ):
        reflector: Reflector[Node] = quick(client, NODES)
        async with follow(reflector) as follower:
            await follower.until(lambda: len(follower.sets) == 2)
            assert reflector.objects[ObjectKey("", "n")].metadata.resource_version == "16"
