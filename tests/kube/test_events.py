"""Events are written once, repetitions are counted, and the caller is never blocked."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.lab.apiserver.api import Api

from fairlead.kube import events
from fairlead.kube.access import Access
from fairlead.kube.answers import NamespaceTerminating
from fairlead.kube.client import Client
from fairlead.kube.events import EVENTS, Event, EventRecorder, is_stale, stamp
from fairlead.kube.objects import SERVICES, ObjectKey, ObjectMeta
from fairlead.lab.apiserver import ApiServer
from fairlead.lab.apiserver.faults import Fault
from fairlead.lab.apiserver.kinds import EVENTS as KIND
from fairlead.model import ServiceKey

WEB = ServiceKey("default", "web")
DEADLINE_S = 60.0
StoredEvents = Callable[[], Awaitable[list[Event]]]


@asynccontextmanager
async def recording(client: Client, interval_s: float = 60.0) -> AsyncIterator[EventRecorder]:
    recorder = EventRecorder(client, "fairlead-test", interval_s=interval_s)
    task = asyncio.ensure_future(recorder.run())
    try:
        yield recorder
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def web(place: Api) -> ServiceKey:
    return ServiceKey(place.namespace, "web")


@pytest.fixture
def stored_events(client: Client, place: Api) -> StoredEvents:
    """Return a function that returns the Events of the test's namespace."""

    async def stored_events() -> list[Event]:
        return await client.list(EVENTS, namespace=place.namespace)

    return stored_events


async def test_an_event_has_the_fields_that_kubectl_shows(
    client: Client, place: Api, web: ServiceKey, stored_events: StoredEvents
) -> None:
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
        await until(stored_events)
    [body] = await place.items(KIND)
    assert body["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Service",
        "namespace": web.namespace,
        "name": "web",
        "uid": "uid-1",
    }
    assert (body["type"], body["reason"], body["message"]) == (
        "Warning",
        "SyncFailed",
        "no address is free",
    )
    assert body["count"] == 1
    assert body["source"] == {"component": "fairlead-test"}
    assert body["firstTimestamp"] == body["lastTimestamp"]


async def test_a_thousand_repetitions_are_at_most_two_writes(
    client: Client, place: Api, web: ServiceKey, stored_events: StoredEvents
) -> None:
    async with (
        place.watch(KIND, f"resourceVersion={await place.version(KIND)}") as watch,
        recording(client, interval_s=0.5) as recorder,
    ):
        for _ in range(1000):
            recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
            await asyncio.sleep(0)

        async def counted() -> bool:
            return [event.count for event in await stored_events()] == [1000]

        await until(counted)
        # An Event that is written afterwards shows that no other write came before it.
        recorder.event(web, "uid-1", "Normal", "Ensured", "the last one")
        written = [await watch.next()]
        while written[-1]["object"]["message"] != "the last one":
            written.append(await watch.next())
    assert [event["type"] for event in written] in (
        ["ADDED", "MODIFIED", "ADDED"],
        ["ADDED", "ADDED"],
    )


async def test_another_message_or_service_is_another_event(
    client: Client, web: ServiceKey, stored_events: StoredEvents
) -> None:
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Normal", "Ensured", "it has 203.0.113.1")
        recorder.event(web, "uid-1", "Normal", "Ensured", "it has 203.0.113.2")
        recorder.event(
            ServiceKey(web.namespace, "api"), "uid-2", "Normal", "Ensured", "it has 203.0.113.1"
        )

        async def three() -> bool:
            return len(await stored_events()) == 3

        await until(three)


async def test_a_number_that_changes_is_one_event_with_the_last_number(
    client: Client, web: ServiceKey, stored_events: StoredEvents
) -> None:
    """The next process reports the same message with another number, and finds the Event."""
    for first in (1, 100):
        async with recording(client, interval_s=0.05) as recorder:
            for number in range(first, first + 20):
                recorder.event(
                    web,
                    "uid-1",
                    "Warning",
                    "Full",
                    f"{number} of 1,000 entries are taken after {number}.5 s",
                )
                await asyncio.sleep(0.01)

            async def written_last(last: int = first + 19) -> bool:
                return any(
                    event.message.startswith(f"{last} of 1,000") for event in await stored_events()
                )

            await until(written_last)
    [event] = await stored_events()
    assert event.message == "119 of 1,000 entries are taken after 119.5 s"
    assert event.count == 39, "a Warning that a new process repeats is not counted"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("9 of 10 entries", "10 of 10 entries", True),
        ("no answer for 12.5 s", "no answer for 3 s", True),
        (
            "written for version 712 of the Service",
            "written for version 1,713 of the Service",
            True,
        ),
        ("served on 203.0.113.1.", "served on 203.0.113.2.", False),
        ("served on 2001:db8::1", "served on 2001:db8::2", False),
        ("range 10.1.0.0/24", "range 10.1.0.0/25", False),
        ("port 80 has no node port", "port 81 has no node port", False),
        ("80/TCP: no endpoint", "81/TCP: no endpoint", False),
        ("node web-1 is away", "node web-2 is away", False),
        ("load balancer 0f1a7c1e-1 is gone", "load balancer 0f1a7c1e-2 is gone", False),
    ],
)
def test_only_numbers_that_identify_an_object_make_another_event(
    one: str, other: str, same: bool
) -> None:
    assert (events.without_numbers(one) == events.without_numbers(other)) == same


async def test_an_event_in_a_namespace_that_is_being_deleted_is_dropped_without_a_log(
    client: Client, place: Api, web: ServiceKey
) -> None:
    body = {
        "metadata": {"name": "web", "finalizers": ["example.com/stay"]},
        "spec": {"ports": [{"port": 80}]},
    }
    service = await client.create(SERVICES, body, namespace=web.namespace)
    await place.do("DELETE", f"/api/v1/namespaces/{web.namespace}")
    try:
        with pytest.raises(NamespaceTerminating, match="the namespace is being deleted") as problem:
            await client.create(
                SERVICES, body | {"metadata": {"name": "other"}}, namespace=web.namespace
            )
        assert "RBAC" not in str(problem.value)
        with capture_logs() as logs:
            async with recording(client) as recorder:
                recorder.event(
                    web,
                    service.metadata.uid,
                    "Normal",
                    "DeletingLoadBalancer",
                    "Deleting load balancer",
                )

                async def given_up() -> bool:
                    return recorder.dropped == 1

                await until(given_up)
        assert logs == []
    finally:
        await client.patch(SERVICES, ObjectKey(*web), {"metadata": {"finalizers": None}})


async def test_an_event_that_the_server_deleted_is_created_again(
    client: Client, web: ServiceKey, stored_events: StoredEvents
) -> None:
    async with recording(client, interval_s=0.05) as recorder:
        recorder.event(web, "uid-1", "Normal", "Ensured", "again")
        await until(stored_events)
        (old,) = await stored_events()
        await client.delete(EVENTS, (web.namespace, old.metadata.name))
        recorder.event(web, "uid-1", "Normal", "Ensured", "again")
        await until(stored_events)
        (new,) = await stored_events()
        assert new.metadata.uid != old.metadata.uid


async def repeat_after(
    client: Client, web: ServiceKey, stored_events: StoredEvents, last: datetime
) -> tuple[Event, Event]:
    """Return the Event before and after another process repeats it, with `last` as its previous
    time."""
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
        await until(stored_events)
    (old,) = await stored_events()
    before = await client.patch(
        EVENTS, (web.namespace, old.metadata.name), {"lastTimestamp": stamp(last)}
    )
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
        recorder.event(web, "uid-1", "Normal", "Ensured", "the last one")

        async def written() -> bool:
            return len(await stored_events()) == 2

        await until(written)
    return before, await client.get(EVENTS, (web.namespace, old.metadata.name))


@pytest.mark.parametrize("minutes", [1, 59, -20])
async def test_a_new_process_renews_the_time_of_an_old_warning(
    client: Client, web: ServiceKey, stored_events: StoredEvents, minutes: int
) -> None:
    """The count stays the same, because the Warning has held in the meantime. This is also true if
    the clock of the previous process was wrong (-20)."""
    now = datetime.now(UTC)
    before, after = await repeat_after(client, web, stored_events, now - timedelta(minutes=minutes))
    assert after.metadata.uid == before.metadata.uid
    assert after.count == before.count == 1
    assert stamp(now) <= str(after.last_timestamp) <= stamp(datetime.now(UTC))


async def test_a_recent_warning_is_not_written_again(
    client: Client, web: ServiceKey, stored_events: StoredEvents
) -> None:
    before, after = await repeat_after(
        client, web, stored_events, datetime.now(UTC) + timedelta(seconds=5)
    )
    assert after.metadata.resource_version == before.metadata.resource_version


async def test_a_warning_that_returns_is_written_after_its_recovery(
    client: Client, web: ServiceKey, stored_events: StoredEvents
) -> None:
    """The next process writes it; `kubectl describe` sorts Events by their last time."""
    reported = (
        ("Warning", "NoGateway", "no gateway is alive"),
        ("Normal", "Recovered", "NoGateway no longer holds"),
    )
    times = [datetime.now(UTC) - timedelta(seconds=passed) for passed in (30, 18)]
    async with recording(client) as recorder:
        for event in reported:
            recorder.event(web, "uid-1", *event)

        async def both() -> bool:
            return len(await stored_events()) == 2

        await until(both)
    for each in await stored_events():
        last = times[each.type == "Normal"]
        await client.patch(
            EVENTS, (web.namespace, each.metadata.name), {"lastTimestamp": stamp(last)}
        )
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", *reported[0])

        async def warned_last() -> bool:
            return (
                max(await stored_events(), key=lambda each: each.last_timestamp or "").type
                == "Warning"
            )

        await until(warned_last)
    assert {each.count for each in await stored_events()} == {1}


async def test_ten_thousand_events_fit_into_the_queue() -> None:
    async with Client(Access("http://127.0.0.1:1")) as client:
        recorder = EventRecorder(client, "fairlead-test")
        for number in range(10_000):
            recorder.event(
                ServiceKey("default", f"web-{number}"),
                f"uid-{number}",
                "Warning",
                "NoGateway",
                "no gateway is alive",
            )
        assert (recorder.waiting, recorder.dropped) == (10_000, 0)


@pytest.mark.parametrize("last", [None, "", "yesterday", "2026-02-30T00:00:00Z"])
def test_an_invalid_time_counts_as_old(last: str | None) -> None:
    assert is_stale(Event(ObjectMeta(), last_timestamp=last), datetime.now(UTC))


async def test_long_messages_are_truncated_to_the_limits_of_the_api(
    client: Client, web: ServiceKey, stored_events: StoredEvents
) -> None:
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Normal", "R" * 500, "m" * 5000)

        async def truncated() -> bool:
            return [(len(event.reason), len(event.message)) for event in await stored_events()] == [
                (128, 1024)
            ]

        await until(truncated)


async def test_an_event_is_written_as_soon_as_the_server_is_available() -> None:
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        recording(client) as recorder,
    ):
        server.faults.add(Fault("status", "POST", code=503, count=2))
        recorder.event(WEB, "uid-1", "Normal", "Ensured", "late")

        async def stored_events() -> bool:
            return bool(await client.list(EVENTS))

        await until(stored_events)
        assert recorder.dropped == 0


async def test_a_rejected_event_is_logged_and_the_next_one_is_written() -> None:
    with capture_logs() as logs:
        async with (
            ApiServer() as server,
            Client(Access(server.url)) as client,
            recording(client) as recorder,
        ):
            server.faults.add(Fault("status", "POST", code=403))
            recorder.event(WEB, "uid-1", "Normal", "First", "refused")
            recorder.event(WEB, "uid-1", "Normal", "Second", "written")

            async def second() -> bool:
                return [event.reason for event in await client.list(EVENTS)] == ["Second"]

            await until(second)
            assert recorder.dropped == 1
    assert [entry["reason"] for entry in logs if entry["event"] == "Event not written"] == ["First"]


async def test_the_number_of_queued_events_is_limited() -> None:
    async with Client(Access("http://127.0.0.1:1")) as client:
        recorder = EventRecorder(client, "fairlead-test")
        for number in range(events.MAX_SERIES + 500):
            recorder.event(WEB, "uid-1", "Normal", "Ensured", f"node-{number}")
        assert recorder.waiting == events.MAX_QUEUED
        assert recorder.waiting + recorder.dropped == events.MAX_SERIES + 500
