"""The Events about a Service, and their timing: each Event is written once, and only for problems
that last."""

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
GRACE_PERIOD_S = 0.05
SETTLE_S = 2 * GRACE_PERIOD_S


class Bench:
    """A reporter, and the Events that it wrote: the warnings, and in `ended` the Events that report
    the end of a warning."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, str, str]] = []
        self.ended: list[str] = []
        self.notes: list[tuple[str, str]] = []
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
            grace_period_s=GRACE_PERIOD_S,
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
            self.warnings.append((reason, message, ""))
        elif reason == "Recovered":
            assert kind == "Normal"
            self.ended.append(message)
        else:
            assert kind == "Normal"
            self.notes.append((reason, message))

    def tell(self, *notes: Finding, outcome: Outcome = DONE) -> None:
        self.report(
            {KEY: LoadBalancer(KEY, "uid", "fairlead.io/direct", (), (), notes=notes)},
            {KEY: outcome},
        )

    async def reasons(self) -> list[str]:
        await asyncio.sleep(4 * GRACE_PERIOD_S)
        return [reason for reason, _, _ in self.warnings]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_problem_that_lasts_is_reported_once(bench: Bench) -> None:
    for _ in range(3):
        bench.tell(FAILING)
    assert await bench.reasons() == ["HealthChecksFailing"]
    bench.tell(FAILING)
    assert await bench.reasons() == ["HealthChecksFailing"]


async def test_a_note_of_a_driver_is_an_event_each_time_and_at_once(
    bench: Bench,
) -> None:
    """The type of the Event follows from the severity, and its text has the remedy."""
    switched = Finding("Switched", "it has a header now", severity="info", remedy="expect it")
    cut = Finding("Cut", "1 connection was ended")
    for times in (1, 2):
        bench.tell(outcome=Outcome("done", notes=(switched, cut)))
        assert bench.notes == [("Switched", "it has a header now; expect it")] * times
        assert bench.warnings == [("Cut", "1 connection was ended", "")] * times
    assert bench.report.warned() == [], "it does not last, so nothing ends"


async def test_a_short_problem_is_not_reported(bench: Bench) -> None:
    bench.tell(FAILING)
    bench.tell()
    assert await bench.reasons() == []


async def test_a_problem_that_returns_is_reported_again(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.reasons()
    bench.tell()
    bench.tell(FAILING)
    assert await bench.reasons() == ["HealthChecksFailing"] * 2


async def test_a_changed_number_is_the_same_problem(bench: Bench) -> None:
    """The Event is written although the number changes before the problem has lasted long enough,
    and shows each later number."""
    while not bench.warnings:
        for number in range(10):
            bench.tell(Finding("Full", f"{number} of 10 entries are taken"))
            await asyncio.sleep(GRACE_PERIOD_S / 4)
    bench.warnings.clear()
    bench.tell(Finding("Full", "10 of 10 entries are taken"))
    assert bench.warnings == [("Full", "10 of 10 entries are taken", "")]
    bench.tell(Finding("Full", "10 of 10 entries are taken"))
    bench.tell()
    assert len(bench.warnings) == 1


NO_ENDPOINT = Finding(
    "NoReadyEndpoints", "it has no endpoint: see `kubectl get pods`", at_start=True
)


async def test_starting_pods_of_a_new_service_are_not_reported(bench: Bench) -> None:
    """Another note is reported when it has lasted long enough, although the note about the start
    waits longer."""
    bench.create(age_s=0)
    bench.tell(NO_ENDPOINT, FAILING)
    assert await bench.reasons() == ["HealthChecksFailing"]
    bench.tell(FAILING)
    bench.create(age_s=START_S)
    bench.tell(NO_ENDPOINT, FAILING)
    assert await bench.reasons() == ["HealthChecksFailing", "NoReadyEndpoints"]


async def test_a_note_about_the_start_is_reported_when_the_service_is_old_enough(
    bench: Bench,
) -> None:
    bench.create(age_s=START_S - 1)
    bench.tell(NO_ENDPOINT)
    async with asyncio.timeout(30):
        while not bench.warnings:
            await asyncio.sleep(GRACE_PERIOD_S)


async def test_failures_name_the_role_and_a_driver_may_give_a_reason(bench: Bench) -> None:
    bench.tell(outcome=Outcome("refused", "no way to node2"))
    await bench.reasons()
    bench.tell(outcome=Outcome("refused", "port taken", reason="FailedToStartServiceHealthcheck"))
    await bench.reasons()
    assert bench.warnings == [
        ("SyncFailed", "gateway gw1: no way to node2", ""),
        ("FailedToStartServiceHealthcheck", "gateway gw1: port taken", ""),
    ]


async def test_waiting_is_not_reported(bench: Bench) -> None:
    bench.tell(outcome=Outcome("waiting", "read again"))
    assert await bench.reasons() == []


async def test_a_service_that_is_gone_is_forgotten(bench: Bench) -> None:
    bench.tell(FAILING)
    bench.report({}, {KEY: DONE})
    assert await bench.reasons() == []


async def test_the_end_of_a_problem_is_reported_once(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.reasons()
    for _ in range(2):
        bench.tell()
        await bench.reasons()
    assert bench.ended == [
        "gateway gw1: HealthChecksFailing no longer holds, after less than a minute"
    ]
    assert bench.report.warned() == []


async def test_the_end_of_an_unreported_problem_is_not_reported(bench: Bench) -> None:
    bench.tell(FAILING)
    bench.tell()
    await bench.reasons()
    assert bench.ended == []


async def test_a_problem_that_comes_and_goes_has_not_ended(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.reasons()
    bench.tell()
    bench.tell(FAILING)
    await bench.reasons()
    assert bench.ended == []
    bench.tell()
    bench.tell(outcome=Outcome("waiting", "read again"))
    await bench.reasons()
    assert len(bench.ended) == 1, "a pass on the way changes nothing"


async def test_of_several_problems_only_the_ended_one_is_reported_as_ended(bench: Bench) -> None:
    flapping = Finding("HealthChecksFlapping", "node1 comes and goes")
    bench.tell(FAILING, flapping)
    await bench.reasons()
    bench.tell(flapping)
    await bench.reasons()
    assert bench.ended == [
        "gateway gw1: HealthChecksFailing no longer holds, after less than a minute"
    ]
    assert [each.reason for each in bench.report.warned()] == ["HealthChecksFlapping"]


async def test_another_process_reports_the_end(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.reasons()
    left = [
        msgspec.structs.replace(each, since="2020-01-01T00:00:00Z")
        for each in bench.report.warned()
    ]
    bench.report.close()
    successor = Bench()
    successor.report.resume(
        [*left, msgspec.structs.replace(left[0], reason="Older", uid="of an earlier Service")]
    )
    successor.tell(FAILING)
    await successor.reasons()
    assert successor.ended == []
    successor.tell()
    await successor.reasons()
    (message,) = successor.ended
    assert message.startswith("gateway gw1: HealthChecksFailing no longer holds, after ")
    assert message.endswith(" hours")


async def test_a_process_resumes_warnings_before_it_knows_the_services(bench: Bench) -> None:
    """The Lease of the process is read with one request; the list of Services takes longer."""
    bench.tell(FAILING)
    await bench.reasons()
    (left,) = bench.report.warned()
    successor = Bench()
    services = successor.state.services.copy()
    successor.state.update_services(dict.fromkeys((ObjectKey(*key) for key in services), None))
    successor.report.resume([left, msgspec.structs.replace(left, service="default/gone")])
    assert {each.service for each in successor.report.warned()} == {
        "default/web",
        "default/gone",
    }, "the Lease contains the reported warnings"
    successor.create()
    successor.state.mark_synced("services")
    assert successor.report.warned() == [left]
    successor.tell()
    await successor.reasons()
    assert len(successor.ended) == 1


async def test_the_end_is_reported_for_a_recreated_service(bench: Bench) -> None:
    """The previous process has written the same Warning about an older Service of this name."""
    bench.tell(FAILING)
    await bench.reasons()
    (left,) = bench.report.warned()
    successor = Bench()
    successor.report.resume([msgspec.structs.replace(left, uid="of an earlier Service")])
    successor.tell(FAILING)
    await successor.reasons()
    successor.tell()
    await successor.reasons()
    assert len(successor.ended) == 1


async def test_a_released_service_has_not_recovered(bench: Bench) -> None:
    bench.tell(FAILING)
    await bench.reasons()
    bench.report({}, {KEY: DONE})
    await bench.reasons()
    assert (bench.ended, bench.report.warned()) == ([], [])


def test_durations_are_rounded() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    for passed, words in (
        (timedelta(seconds=29), "less than a minute"),
        (timedelta(seconds=59), "a minute"),
        (timedelta(minutes=12, seconds=3), "12 minutes"),
        (timedelta(hours=5, minutes=7), "5 hours"),
    ):
        assert rounded_duration(stamp(now - passed), now) == words
    assert rounded_duration("soon", now) == "less than a minute"


async def test_a_fact_that_needs_no_action_is_a_normal_event_without_an_end(bench: Bench) -> None:
    fact = Finding("ConnectionsNotKept", "connections break", severity="info")
    bench.tell(fact)
    assert await bench.reasons() == []
    assert bench.notes == [("ConnectionsNotKept", "connections break")]
    bench.tell()
    await asyncio.sleep(2 * SETTLE_S)
    assert (bench.report.warned(), bench.ended) == ([], [])
