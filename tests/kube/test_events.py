"""Events are written once, counted afterwards, and never block their caller."""

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
There = Callable[[], Awaitable[list[Event]]]


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


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await true():
            await asyncio.sleep(0.02)


@pytest.fixture
def web(place: Api) -> ServiceKey:
    return ServiceKey(place.namespace, "web")


@pytest.fixture
def there(client: Client, place: Api) -> There:
    """Return a function that returns the Events of the test's namespace."""

    async def there() -> list[Event]:
        return await client.list(EVENTS, namespace=place.namespace)

    return there


async def test_event_as_kubectl_shows_it(
    client: Client, place: Api, web: ServiceKey, there: There
) -> None:
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
        await until(there)
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


async def test_a_thousand_retries_are_two_writes(
    client: Client, place: Api, web: ServiceKey, there: There
) -> None:
    async with (
        place.watch(KIND, f"resourceVersion={await place.version(KIND)}") as watch,
        recording(client, interval_s=0.5) as recorder,
    ):
        for _ in range(1000):
            recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
            await asyncio.sleep(0)

        async def counted() -> bool:
            return [event.count for event in await there()] == [1000]

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


async def test_different_things_are_different_events(
    client: Client, web: ServiceKey, there: There
) -> None:
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Normal", "Ensured", "it has 203.0.113.1")
        recorder.event(web, "uid-1", "Normal", "Ensured", "it has 203.0.113.2")
        recorder.event(
            ServiceKey(web.namespace, "api"), "uid-2", "Normal", "Ensured", "it has 203.0.113.1"
        )

        async def three() -> bool:
            return len(await there()) == 3

        await until(three)


async def test_a_number_that_changes_is_one_event_with_the_last_number(
    client: Client, web: ServiceKey, there: There
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
                return any(event.message.startswith(f"{last} of 1,000") for event in await there())

            await until(written_last)
    [event] = await there()
    assert event.message == "119 of 1,000 entries are taken after 119.5 s"
    assert event.count == 39, "a Warning that a new process repeats has held all the time"


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
def test_numbers_that_identify_something_make_another_event(
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
    client: Client, web: ServiceKey, there: There
) -> None:
    async with recording(client, interval_s=0.05) as recorder:
        recorder.event(web, "uid-1", "Normal", "Ensured", "again")
        await until(there)
        (old,) = await there()
        await client.delete(EVENTS, (web.namespace, old.metadata.name))
        recorder.event(web, "uid-1", "Normal", "Ensured", "again")
        await until(there)
        (new,) = await there()
        assert new.metadata.uid != old.metadata.uid


async def repeat_after(
    client: Client, web: ServiceKey, there: There, last: datetime
) -> tuple[Event, Event]:
    """Return the Event before and after another process repeats it, with `last` as its previous
    time."""
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
        await until(there)
    (old,) = await there()
    before = await client.patch(
        EVENTS, (web.namespace, old.metadata.name), {"lastTimestamp": stamp(last)}
    )
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Warning", "SyncFailed", "no address is free")
        recorder.event(web, "uid-1", "Normal", "Ensured", "the last one")

        async def written() -> bool:
            return len(await there()) == 2

        await until(written)
    return before, await client.get(EVENTS, (web.namespace, old.metadata.name))


@pytest.mark.parametrize("minutes", [1, 59, -20])
async def test_an_old_warning_is_renewed(
    client: Client, web: ServiceKey, there: There, minutes: int
) -> None:
    """Its count stays the same, because the repetition is no news. The same holds if the clock of
    the previous process was wrong (-20)."""
    now = datetime.now(UTC)
    before, after = await repeat_after(client, web, there, now - timedelta(minutes=minutes))
    assert after.metadata.uid == before.metadata.uid
    assert after.count == before.count == 1
    assert stamp(now) <= str(after.last_timestamp) <= stamp(datetime.now(UTC))


async def test_a_recent_warning_is_not_written_again(
    client: Client, web: ServiceKey, there: There
) -> None:
    before, after = await repeat_after(client, web, there, datetime.now(UTC) + timedelta(seconds=5))
    assert after.metadata.resource_version == before.metadata.resource_version


async def test_a_warning_that_returns_is_written_after_its_recovery(
    client: Client, web: ServiceKey, there: There
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
            return len(await there()) == 2

        await until(both)
    for each in await there():
        last = times[each.type == "Normal"]
        await client.patch(
            EVENTS, (web.namespace, each.metadata.name), {"lastTimestamp": stamp(last)}
        )
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", *reported[0])

        async def warned_last() -> bool:
            return max(await there(), key=lambda each: each.last_timestamp or "").type == "Warning"

        await until(warned_last)
    assert {each.count for each in await there()} == {1}


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


async def test_long_messages_are_cut_to_what_the_api_takes(
    client: Client, web: ServiceKey, there: There
) -> None:
    async with recording(client) as recorder:
        recorder.event(web, "uid-1", "Normal", "R" * 500, "m" * 5000)

        async def cut() -> bool:
            return [(len(event.reason), len(event.message)) for event in await there()] == [
                (128, 1024)
            ]

        await until(cut)


async def test_unavailable_server_is_retried() -> None:
    async with (
        ApiServer() as server,
        Client(Access(server.url)) as client,
        recording(client) as recorder,
    ):
        server.faults.add(Fault("status", "POST", code=503, count=2))
        recorder.event(WEB, "uid-1", "Normal", "Ensured", "late")

        async def there() -> bool:
            return bool(await client.list(EVENTS))

        await until(there)
        assert recorder.dropped == 0


async def test_rejection_is_logged_and_the_next_event_is_written() -> None:
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


async def test_queue_and_memory_are_bounded() -> None:
    async with Client(Access("http://127.0.0.1:1")) as client:
        recorder = EventRecorder(client, "fairlead-test")
        for number in range(events.MAX_SERIES + 500):
            recorder.event(WEB, "uid-1", "Normal", "Ensured", f"node-{number}")
        assert recorder.waiting == events.MAX_QUEUED
        assert recorder.waiting + recorder.dropped == events.MAX_SERIES + 500
