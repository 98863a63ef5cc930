"""The Events about a Service, and their timing: each once, and only for problems that last."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from fairlead.kube.events import rounded_duration, stamp
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta
from fairlead.model import DONE, Finding, LoadBalancer, Outcome, ServiceKey
from fairlead.roles.report import START_S, Reporter
from fairlead.state import State
from fairlead.web import View

KEY = ServiceKey("default", "web")
FAILING = Finding("HealthChecksFailing", "no health port answers 200")
PATIENCE_S = 0.05
SETTLE_S = 2 * PATIENCE_S


class Bench:
    """A reporter with a patience, and the Events that it wrote: the warnings, and in `ended` the
    Events that they no longer hold."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []
        self.ended: list[str] = []
        self.told: list[tuple[str, str]] = []
        """The other Normal Events: reason and message."""
        self.state = state = State(("services",))
        self.create()
        self.report = Reporter[LoadBalancer](
            View("gateway", "gw1"),
            state,
            self,
            reason="SyncFailed",
            who="gateway gw1",
            notes=lambda balancer: balancer.notes,
            patience_s=PATIENCE_S,
            settle_s=SETTLE_S,
        )

    def create(self, age_s: float | None = None) -> None:
        """Create the Service with this age; None: without a creation time."""
        since = stamp(datetime.now(UTC) - timedelta(seconds=age_s)) if age_s is not None else None
        meta = ServiceMeta(name="web", namespace="default", uid="uid", creation_timestamp=since)
        self.state.update_services({ObjectKey(*KEY): Service(meta)})

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        assert (key, uid) == (KEY, "uid")
        if kind == "Warning":
            self.said.append((reason, message, ""))
        elif reason == "Recovered":
            assert kind == "Normal"
            self.ended.append(message)
        else:
            assert kind == "Normal"
            self.told.append((reason, message))

    def tell(self, *notes: Finding, outcome: Outcome = DONE) -> None:
        self.report(
            {KEY: LoadBalancer(KEY, "uid", "fairlead.io/direct", (), (), notes=notes)},
            {KEY: outcome},
        )

    async def heard(self) -> list[str]:
        await asyncio.sleep(4 * PATIENCE_S)
        return [reason for reason, _, _ in self.said]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_what_lasts_is_said_once(bench: Bench) -> None:
    for _ in range(3):
        bench.tell(FAILING)
    assert await bench.heard() == ["HealthChecksFailing"]
    bench.tell(FAILING)
    assert await bench.heard() == ["HealthChecksFailing"]


async def test_what_a_driver_says_has_happened_is_an_event_each_time_and_at_once(
    bench: Bench,
) -> None:
    """The type of the Event follows from the severity, and its text has the remedy."""
    switched = Finding("Switched", "it has a header now", severity="info", remedy="expect it")
    cut = Finding("Cut", "1 connection was ended")
    for times in (1, 2):
        bench.tell(outcome=Outcome("done", notes=(switched, cut)))
        assert bench.told == [("Switched", "it has a header now; expect it")] * times
        assert bench.said == [("Cut", "1 connection was ended", "")] * times
    assert bench.report.warned() == [], "it does not last, so nothing ends"


async def test_what_is_over_in_a_moment_is_no_news(bench: Bench) -> None:
    bench.tell(FAILING)
    bench.tell()
    assert await bench.heard() == []


async def test_what_comes_back_is_said_again(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.heard()
    bench.tell()
    bench.tell(FAILING)
    assert await bench.heard() == ["HealthChecksFailing"] * 2


async def test_a_number_that_changes_is_the_same_matter(bench: Bench) -> None:
    """The Event is written although the number changes more often than the patience, and shows each
    later number."""
    while not bench.said:
        for number in range(10):
            bench.tell(Finding("Full", f"{number} of 10 entries are taken"))
            await asyncio.sleep(PATIENCE_S / 4)
    bench.said.clear()
    bench.tell(Finding("Full", "10 of 10 entries are taken"))
    assert bench.said == [("Full", "10 of 10 entries are taken", "")]
    bench.tell(Finding("Full", "10 of 10 entries are taken"))
    bench.tell()
    assert len(bench.said) == 1


NOBODY = Finding("NoReadyEndpoints", "it has no endpoint: see `kubectl get pods`", at_start=True)


async def test_that_pods_of_a_new_service_are_starting_is_no_news(bench: Bench) -> None:
    """The next note is reported after the patience, and shows that the first note waits longer."""
    bench.create(age_s=0)
    bench.tell(NOBODY, FAILING)
    assert await bench.heard() == ["HealthChecksFailing"]
    bench.tell(FAILING)
    bench.create(age_s=START_S)
    bench.tell(NOBODY, FAILING)
    assert await bench.heard() == ["HealthChecksFailing", "NoReadyEndpoints"]


async def test_what_is_normal_at_the_start_is_said_when_the_service_is_old_enough(
    bench: Bench,
) -> None:
    bench.create(age_s=START_S - 1)
    bench.tell(NOBODY)
    async with asyncio.timeout(30):
        while not bench.said:
            await asyncio.sleep(PATIENCE_S)


async def test_failures_name_who_failed_and_a_driver_may_know_a_better_reason(bench: Bench) -> None:
    bench.tell(outcome=Outcome("refused", "no way to node2"))
    await bench.heard()
    bench.tell(outcome=Outcome("refused", "port taken", reason="FailedToStartServiceHealthcheck"))
    await bench.heard()
    assert bench.said == [
        ("SyncFailed", "gateway gw1: no way to node2", ""),
        ("FailedToStartServiceHealthcheck", "gateway gw1: port taken", ""),
    ]


async def test_what_is_on_its_way_is_not_said(bench: Bench) -> None:
    bench.tell(outcome=Outcome("waiting", "read again"))
    assert await bench.heard() == []


async def test_a_service_that_is_gone_is_forgotten(bench: Bench) -> None:
    bench.tell(FAILING)
    bench.report({}, {KEY: DONE})
    assert await bench.heard() == []


async def test_the_end_of_what_was_said_is_said_once(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.heard()
    for _ in range(2):
        bench.tell()
        await bench.heard()
    assert bench.ended == [
        "gateway gw1: HealthChecksFailing no longer holds, after less than a minute"
    ]
    assert bench.report.warned() == []


async def test_what_was_not_said_has_no_end_to_be_told(bench: Bench) -> None:
    bench.tell(FAILING)
    bench.tell()
    await bench.heard()
    assert bench.ended == []


async def test_what_comes_and_goes_has_not_ended(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.heard()
    bench.tell()
    bench.tell(FAILING)
    await bench.heard()
    assert bench.ended == []
    bench.tell()
    bench.tell(outcome=Outcome("waiting", "read again"))
    await bench.heard()
    assert len(bench.ended) == 1, "a pass on the way changes nothing"


async def test_of_several_only_what_has_ended_is_said(bench: Bench) -> None:
    flapping = Finding("HealthChecksFlapping", "node1 comes and goes")
    bench.tell(FAILING, flapping)
    await bench.heard()
    bench.tell(flapping)
    await bench.heard()
    assert bench.ended == [
        "gateway gw1: HealthChecksFailing no longer holds, after less than a minute"
    ]
    assert [each.reason for each in bench.report.warned()] == ["HealthChecksFlapping"]


async def test_another_process_says_the_end(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.heard()
    left = [
        msgspec.structs.replace(each, since="2020-01-01T00:00:00Z")
        for each in bench.report.warned()
    ]
    bench.report.close()
    successor = Bench()
    successor.report.resume(
        [*left, msgspec.structs.replace(left[0], reason="Older", uid="of a Service before")]
    )
    successor.tell(FAILING)
    await successor.heard()
    assert successor.ended == []
    successor.tell()
    await successor.heard()
    (said,) = successor.ended
    assert said.startswith("gateway gw1: HealthChecksFailing no longer holds, after ")
    assert said.endswith(" hours")


async def test_a_process_finds_what_was_said_before_it_knows_the_services(bench: Bench) -> None:
    """The Lease of the process is read with one request; the list of Services takes longer."""
    bench.tell(FAILING)
    await bench.heard()
    (left,) = bench.report.warned()
    successor = Bench()
    services = successor.state.services.copy()
    successor.state.update_services(dict.fromkeys((ObjectKey(*key) for key in services), None))
    successor.report.resume([left, msgspec.structs.replace(left, service="default/gone")])
    assert {each.service for each in successor.report.warned()} == {
        "default/web",
        "default/gone",
    }, "for the Lease"
    successor.create()
    successor.state.synced("services")
    assert successor.report.warned() == [left]
    successor.tell()
    await successor.heard()
    assert len(successor.ended) == 1


async def test_the_end_is_told_to_a_service_that_was_made_anew(bench: Bench) -> None:
    """The previous process has written the same Warning about an older Service of this name."""
    bench.tell(FAILING)
    await bench.heard()
    (left,) = bench.report.warned()
    successor = Bench()
    successor.report.resume([msgspec.structs.replace(left, uid="of a Service before")])
    successor.tell(FAILING)
    await successor.heard()
    successor.tell()
    await successor.heard()
    assert len(successor.ended) == 1


async def test_a_service_that_is_let_go_has_not_recovered(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.heard()
    bench.report({}, {KEY: DONE})
    await bench.heard()
    assert (bench.ended, bench.report.warned()) == ([], [])


def test_times_are_told_in_round_words() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    for passed, words in (
        (timedelta(seconds=29), "less than a minute"),
        (timedelta(seconds=59), "a minute"),
        (timedelta(minutes=12, seconds=3), "12 minutes"),
        (timedelta(hours=5, minutes=7), "5 hours"),
    ):
        assert rounded_duration(stamp(now - passed), now) == words
    assert rounded_duration("soon", now) == "less than a minute"
