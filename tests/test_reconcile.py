"""The loop with a store to which writes are fast, as to a kernel, or slow, as to a cloud."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from fairlead.drivers import Component
from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.model import Finding, Outcome, ServiceKey
from fairlead.reconcile import Loop, Pace
from fairlead.state import State


class Put(msgspec.Struct, frozen=True):
    service: ServiceKey
    value: str | None

    def __str__(self) -> str:
        return f"put {self.service} {self.value}"


class Store(Component):
    """A load balancer that stores one text for each Service. A call with a text that starts with
    `bad` is refused, and a call with a text that starts with `far` is unavailable. `failures`: the
    number of further calls that are unavailable. `conflicts`: the number of further calls that
    raise Conflict. `failing_reads`: the number of further reads of everything that fail. `log`: a
    list to which several stores append. `during_read`: called once during a read of everything."""

    name = "store"

    def __init__(self, delay_s: float = 0.0, log: list[str] | None = None, title: str = "") -> None:
        self.title = title
        self.log = log if log is not None else []
        self.failing_reads = 0
        self.during_read: Callable[[], Awaitable[None]] | None = None
        self.conflicts = 0
        self.held: dict[ServiceKey, str] = {}
        self.calls: list[tuple[ServiceKey, ...]] = []
        self.failures = 0
        self.running: list[ServiceKey] = []
        self.max_concurrent = 0
        self.delay_s = delay_s

    def render(self, intents: Mapping[ServiceKey, str]) -> Mapping[ServiceKey, str]:
        return intents

    def diff(
        self, desired: Mapping[ServiceKey, str], actual: Mapping[ServiceKey, str]
    ) -> Sequence[Put]:
        keys = sorted(desired.keys() | actual.keys())
        return [Put(key, desired.get(key)) for key in keys if desired.get(key) != actual.get(key)]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, str]:
        if keys is None and self.failing_reads:
            self.failing_reads -= 1
            raise Unavailable("the store cannot be read")
        found = {key: value for key, value in self.held.items() if keys is None or key in keys}
        if keys is None and (during_read := self.during_read) is not None:
            self.during_read = None
            await during_read()
        return found

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        services = tuple(change.service for change in changes)
        assert not set(services) & set(self.running), "two writers on one Service"
        self.calls.append(services)
        self.running += services
        self.max_concurrent = max(self.max_concurrent, len(self.running))
        try:
            await asyncio.sleep(self.delay_s)
            if self.failures:
                self.failures -= 1
                raise Unavailable("the store is away")
            if self.conflicts:
                self.conflicts -= 1
                raise Conflict("another writer was faster")
            if any(
                change.value is not None and change.value.startswith("far") for change in changes
            ):
                raise Unavailable("too far")
            for change in changes:
                if change.value is not None and change.value.startswith("bad"):
                    raise Refused(f"{change.value} is bad", fix="send something good")
            for change in changes:
                self.log.append(f"{self.title} {change.service.name} {change.value}")
                if change.value is None:
                    self.held.pop(change.service, None)
                else:
                    self.held[change.service] = change.value
        finally:
            for service in services:
                self.running.remove(service)
        return {}


class Setup:
    """A loop under test. In: `state`. Out: `store.held`. The intent of a Service is the text of its
    `intent` annotation. `parallel`: with 0, each call of a store contains all Services; with n,
    each call contains one Service, and n calls run in parallel."""

    def __init__(
        self, *stores: Store, parallel: int = 0, plan_slice: int = 0, large: str = ""
    ) -> None:
        self.parallel = parallel
        self.large = ServiceKey("default", large)
        self.plan_slice = plan_slice
        self.also_planned: dict[ServiceKey, str] = {}
        self.plans: list[int] = []
        """The number of Services in each call of the plan."""
        self.planned = 0
        """The number of planned Services; a Service counts each time."""
        self.state = State(("services",))
        self.stores = stores
        for store in stores:
            store.batch = 1 if parallel else 0
        self.outcomes: dict[ServiceKey, Outcome] = {}
        self.history: dict[str, list[Outcome]] = {}

    def plan(self, keys: Collection[ServiceKey]) -> Mapping[ServiceKey, str | Refused]:
        planned: dict[ServiceKey, str | Refused] = {}
        self.planned += len(keys)
        self.plans.append(len(keys))
        for key in keys:
            if (service := self.state.services.get(key)) is not None:
                text = service.metadata.annotations["intent"]
                planned[key] = Refused("the annotation is nonsense") if text == "nonsense" else text
        return planned | self.also_planned

    def put(self, **intents: str | None) -> None:
        changed: dict[ObjectKey, Service | None] = {}
        for name, text in intents.items():
            meta = ServiceMeta(name=name, namespace="default", annotations={"intent": text or ""})
            changed[ObjectKey("default", name)] = (
                Service(meta, ServiceSpec()) if text is not None else None
            )
        self.state.update_services(changed)

    @asynccontextmanager
    async def running(self, audit_interval_s: float = 60.0) -> AsyncIterator[None]:
        def report(_: Mapping[ServiceKey, str], outcomes: Mapping[ServiceKey, Outcome]) -> None:
            self.outcomes |= outcomes
            for key, outcome in outcomes.items():
                self.history.setdefault(key.name, []).append(outcome)

        self.loop = loop = Loop(
            "test",
            self.state,
            self.plan,
            self.stores,
            report,
            pace=Pace(
                parallel=self.parallel or 1,
                coalesce_s=0.001,
                audit_interval_s=audit_interval_s,
                plan_slice=self.plan_slice,
            ),
            large=lambda key: key == self.large and key in self.state.services,
        )
        task = asyncio.ensure_future(loop.run())
        self.state.mark_synced("services")
        async with asyncio.timeout(60):
            await loop.settled.wait()
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, store: Store, **held: str) -> None:
        expected = {ServiceKey("default", name): text for name, text in held.items()}
        async with asyncio.timeout(10):
            while store.held != expected:
                await asyncio.sleep(0.005)

    async def outcome(self, name: str, state: str) -> Outcome:
        """Wait until the Service has had an outcome with this state, and return the first one."""
        async with asyncio.timeout(10):
            while not (found := [e for e in self.history.get(name, ()) if e.state == state]):
                await asyncio.sleep(0.005)
        return found[0]


async def test_ten_thousand_services_are_applied_in_one_call_and_one_change_in_another() -> None:
    setup = Setup(store := Store())
    setup.put(**{f"s{i}": "a" for i in range(10_000)})
    async with setup.running():
        assert [len(call) for call in store.calls] == [10_000]
        assert setup.planned == 10_000, "each was planned once"
        setup.put(s7="b")
        await setup.until(store, **({f"s{i}": "a" for i in range(10_000)} | {"s7": "b"}))
        assert [len(call) for call in store.calls] == [10_000, 1]
        assert setup.planned == 10_001


async def test_many_changes_are_planned_in_slices_and_applied_in_one_call() -> None:
    setup = Setup(store := Store(), plan_slice=10)
    setup.put(**{f"s{i}": "a" for i in range(1000)})
    async with setup.running():
        assert max(setup.plans) == 10
        setup.plans.clear()
        setup.put(**{f"s{i}": "b" for i in range(1000)})
        plan_counts = list[int]()
        while len(setup.plans) < 100:
            await asyncio.sleep(0)
            plan_counts.append(len(setup.plans))
        assert set(plan_counts) - {0} == set(range(1, 101)), "other tasks run after each slice"
        await setup.until(store, **{f"s{i}": "b" for i in range(1000)})
        assert [len(call) for call in store.calls] == [1000, 1000]


class BlockingStore(Store):
    """A store that blocks on the Service `huge` until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = asyncio.Event(), asyncio.Event()

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        if any(change.service.name == "huge" for change in changes):
            self.waiting.set()
            await self.gate.wait()
        return await super().apply(changes)


async def test_other_services_do_not_wait_for_a_large_one() -> None:
    setup = Setup(store := BlockingStore(), plan_slice=10, large="huge")
    store.gate.set()
    setup.put(huge="a", web="0")
    async with setup.running():
        for turn, (huge, before) in enumerate((("b", "a"), (None, "b"), ("c", None)), 1):
            store.gate.clear()
            store.waiting.clear()
            setup.put(huge=huge)
            async with asyncio.timeout(10):
                await store.waiting.wait()
            setup.put(web=str(turn))
            # The large Service becomes dirty again while its pass runs.
            setup.put(huge=huge)
            await setup.until(store, web=str(turn), **({"huge": before} if before else {}))
            store.gate.set()
            await setup.until(store, web=str(turn), **({"huge": huge} if huge else {}))


async def test_after_an_idle_time_other_tasks_may_mark_services_before_the_pass() -> None:
    setup = Setup(Store(), plan_slice=10)
    setup.put(web="a")
    async with setup.running():
        setup.plans.clear()
        setup.put(web="b")
        await asyncio.sleep(0)
        assert setup.plans == []
        await asyncio.sleep(0)
        assert setup.plans == [1]


async def test_after_an_idle_time_a_loop_with_patience_starts_after_other_loops() -> None:
    state = State(("services",))
    with state.subscribers.subscription() as prompt, state.subscribers.subscription() as patient:
        first, second = ServiceKey("default", "a"), ServiceKey("default", "b")
        later = asyncio.ensure_future(patient.take(0.0, idle_delay_s=0.02))
        state.subscribers.mark((first,))
        assert await prompt.take(0.0) == {first}
        assert not later.done()
        state.subscribers.mark((second,))
        assert await later == {first, second}


async def test_an_audit_in_slices_equals_a_whole_audit() -> None:
    setup = Setup(store := Store(), plan_slice=3)
    setup.put(**{f"s{number}": "x" for number in range(10)})
    async with setup.running(audit_interval_s=0.02):
        for _ in range(3):
            store.held[ServiceKey("default", "s4")] = "edited"
            store.held[ServiceKey("default", "stray")] = "x"
            await setup.until(store, **{f"s{number}": "x" for number in range(10)})
            setup.outcomes.clear()
            async with asyncio.timeout(60):
                while len(setup.outcomes.keys() & setup.state.services.keys()) < 10:
                    await asyncio.sleep(0.001)
        assert setup.loop.drift >= 3


@pytest.mark.parametrize("parallel", [0, 4])
async def test_a_change_during_the_first_read_of_everything_is_not_lost(parallel: int) -> None:
    """A plan that is older than the change must not be applied. The first pass contains all
    differences, because a driver may treat it as complete, and replace everything that a previous
    process left."""
    setup = Setup(store := Store(), parallel=parallel)
    setup.put(same="a", other="a", deleted="a")
    store.held[ServiceKey("default", "stray")] = "x"

    async def change() -> None:
        setup.put(other="b", deleted=None, new="a")
        # Passes with the old plan would happen in this time.
        await asyncio.sleep(0.1)

    store.during_read = change
    async with setup.running():
        await setup.until(store, same="a", other="b", new="a")
        assert setup.planned <= 3 + 2 * 3 + 1, "`same` was planned once, the other Services twice"
    passes = [text for text in store.log if text.startswith((" other", " deleted"))]
    assert " other a" not in passes
    assert " deleted a" not in passes
    if not parallel:
        first = {service.name for service in store.calls[0]}
        assert first >= {"same", "other", "new"}


@pytest.mark.parametrize("parallel", [0, 4])
async def test_an_audit_does_not_report_a_refusal_that_ended_during_the_audit(
    parallel: int,
) -> None:
    setup = Setup(store := Store(), parallel=parallel)
    setup.put(web="nonsense")
    later_audit = asyncio.Event()

    async def correct() -> None:
        setup.put(web="a")
        await setup.outcome("web", "done")
        store.during_read = note_audit

    async def note_audit() -> None:
        later_audit.set()

    async with setup.running(audit_interval_s=0.02), asyncio.timeout(10):
        await setup.outcome("web", "refused")
        store.during_read = correct
        await later_audit.wait()
    states = [each.state for each in setup.history["web"]]
    assert "refused" not in states[states.index("done") :]


async def test_unknown_services_of_the_store_are_removed_at_start() -> None:
    setup = Setup(store := Store())
    store.held[ServiceKey("default", "gone")] = "a"
    setup.put(kept="a")
    async with setup.running():
        await setup.until(store, kept="a")


class ExpiringStore(Store):
    """A store in which the text of a new Service is `runs` until the Service is requeued."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        new = {change.service for change in changes if change.service not in self.held}
        await super().apply(changes)
        self.held |= dict.fromkeys(new, "runs")
        return dict.fromkeys(new, Outcome("done", again_s=0.2))


async def test_a_driver_can_requeue_a_service_that_is_done() -> None:
    setup = Setup(first := ExpiringStore(), second := Store())
    async with setup.running():
        setup.put(web="over")
        await setup.until(first, web="runs")
        await setup.until(second, web="over")
        # A pass of another Service does not delay it.
        setup.put(other="x")
        await setup.until(first, web="over", other="x")
        assert {outcome.state for outcome in setup.outcomes.values()} == {"done"}
        calls = len(first.calls)
        await asyncio.sleep(0.3)
        assert len(first.calls) == calls, "the Service is requeued once"


async def test_a_slow_store_gets_single_services_in_parallel_and_none_twice_at_a_time() -> None:
    setup = Setup(store := Store(delay_s=0.02), parallel=4)
    async with setup.running():
        for text in "abc":
            setup.put(**{f"s{i}": text for i in range(20)})
            await asyncio.sleep(0.03)
        await setup.until(store, **{f"s{i}": "c" for i in range(20)})
    assert {len(call) for call in store.calls} == {1}
    assert 1 < store.max_concurrent <= 4


async def test_one_refused_service_does_not_affect_the_others_and_takes_few_calls() -> None:
    setup = Setup(store := Store())
    async with setup.running():
        setup.put(**({f"s{i}": "a" for i in range(100)} | {"s50": "bad"}))
        await setup.until(store, **{f"s{i}": "a" for i in range(100) if i != 50})
        assert setup.outcomes[ServiceKey("default", "s50")].state == "refused"
        assert setup.outcomes[ServiceKey("default", "s51")].state == "done"
        assert len(store.calls) <= 15
        setup.put(s50="good")
        await setup.until(store, **({f"s{i}": "a" for i in range(100)} | {"s50": "good"}))


async def test_an_unavailable_service_is_retried() -> None:
    setup = Setup(store := Store())
    store.failures = 2
    setup.put(web="a")
    async with setup.running():
        await setup.until(store, web="a")
    assert len(store.calls) == 3


async def test_a_refused_service_keeps_its_previous_state() -> None:
    setup = Setup(store := Store())
    setup.put(web="a", other="a")
    async with setup.running():
        setup.put(web="nonsense", other="b")
        await setup.until(store, web="a", other="b")
        assert setup.outcomes[ServiceKey("default", "web")] == Outcome(
            "refused", "the annotation is nonsense"
        )


async def test_services_that_are_not_served_as_planned_are_known_from_the_first_pass_on() -> None:
    """Drivers that adopt what a previous process left ask for them."""
    setup = Setup(rules := Store(), announcement := Store())
    rules.failing_reads = 1
    setup.put(web="nonsense", api="bad", other="a")
    async with setup.running():
        web, api = ServiceKey("default", "web"), ServiceKey("default", "api")
        assert setup.loop.undone == {web, api}
        setup.put(web="a", api=None)
        await setup.until(announcement, web="a", other="a")
        await setup.outcome("web", "done")
        await setup.outcome("api", "done")
        assert setup.loop.undone == set()


async def test_a_service_that_fails_in_one_driver_is_withheld_from_the_next() -> None:
    rules, announcement = Store(), Store()
    setup = Setup(rules, announcement)
    async with setup.running():
        setup.put(web="a")
        await setup.until(announcement, web="a")
        setup.put(web="bad", other="a")
        await setup.until(announcement, web="a", other="a")
        assert rules.held[ServiceKey("default", "web")] == "a"


class LimitedStore(Store):
    """A store that stores its texts, and reports that it serves every Service only in part."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        return {
            change.service: Outcome("unavailable", "there is no more", in_part=True)
            for change in changes
        }


async def test_a_service_that_is_served_in_part_is_passed_to_the_next_driver() -> None:
    rules, announcement = LimitedStore(), Store()
    setup = Setup(rules, announcement)
    async with setup.running():
        setup.put(web="a")
        await setup.until(announcement, web="a")
        assert setup.outcomes[ServiceKey("default", "web")].message == "there is no more"


class PartialStore(Store):
    """A store that serves each Service, but `web` only in part: one of its nodes is unreachable,
    and is retried in each pass."""

    def diff(
        self, desired: Mapping[ServiceKey, str], actual: Mapping[ServiceKey, str]
    ) -> Sequence[Put]:
        again = {key: text for key, text in actual.items() if key.name != "web"}
        return super().diff(desired, again)

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        lacking = {change.service for change in changes if change.service.name == "web"}
        return dict.fromkeys(lacking, Outcome("unavailable", "no way to node1", in_part=True))


async def test_a_service_that_one_driver_serves_in_part_is_not_withheld_from_the_next() -> None:
    forwarding, announcement = PartialStore(), Store()
    setup = Setup(forwarding, announcement)
    setup.put(web="a", other="a", third="far failures")
    async with setup.running():
        # No change of `third` was applied.
        await setup.until(announcement, web="a", other="a")
        assert (await setup.outcome("web", "unavailable")).message == "no way to node1"
        assert (await setup.outcome("third", "unavailable")).message == "too far"


class SlowRemovalStore(Store):
    """A store that reports a removal in part as unavailable while `failures` is not 0."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        if self.failures and any(change.value is None for change in changes):
            self.failures -= 1
            return {
                change.service: Outcome("unavailable", "not yet", in_part=True)
                for change in changes
            }
        return await super().apply(changes)


class PendingStore(Store):
    """A cloud whose load balancers take some time, so that no Service is served yet."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        return {
            change.service: Outcome("waiting", "it is being created", again_s=60.0)
            for change in changes
        }


async def test_a_service_that_is_not_served_yet_is_not_published() -> None:
    claim, cloud, publication = Store(), PendingStore(), Store()
    setup = Setup(claim, cloud, publication)
    async with setup.running():
        setup.put(web="a")
        await setup.outcome("web", "waiting")
        assert publication.held == {}


class RefusingStore(Store):
    """A store that serves every Service, but refuses one port of it."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        return {change.service: Outcome("refused", "no room", in_part=True) for change in changes}


async def test_outcomes_of_two_drivers_are_reported_together_and_retried_if_one_requests_it() -> (
    None
):
    rules, announcement = RefusingStore(), Store()
    setup = Setup(rules, announcement)
    announcement.failures = 1
    async with setup.running():
        setup.put(web="a")
        outcome = await setup.outcome("web", "unavailable")
        assert (outcome.message, outcome.in_part) == ("no room; the store is away", False)
        await setup.until(announcement, web="a")


async def test_a_driver_with_one_call_for_all_services_works_between_others_with_single_calls() -> (
    None
):
    claim, network, publication = Store(delay_s=0.001), Store(), Store(delay_s=0.001)
    setup = Setup(claim, network, publication, parallel=4)
    network.batch = 0
    names = [f"s{i}" for i in range(40)]
    setup.put(**dict.fromkeys(names, "a"))
    async with setup.running():
        assert [len(call) for call in network.calls] == [40]
        for store in (claim, publication):
            assert [len(call) for call in store.calls] == [1] * 40
            assert 1 < store.max_concurrent <= 4
            assert len(store.held) == 40
        publication.failures = 1
        setup.put(s0="b", s1="b")
        wanted = dict.fromkeys(names, "a") | {"s0": "b", "s1": "b"}
        await setup.until(publication, **wanted)
        assert max(len(call) for call in network.calls[1:]) <= 2


async def test_a_driver_gets_no_more_services_at_once_than_its_batch() -> None:
    setup = Setup(store := Store(), parallel=1)
    store.batch = 3
    setup.put(**{f"s{i}": "a" for i in range(10)})
    async with setup.running():
        assert [len(call) for call in store.calls] == [3, 3, 3, 1]


async def test_an_incomplete_read_is_repeated_soon() -> None:
    class Behind(Store):
        reads = 0

        @property
        def read_incomplete(self) -> bool:
            return 0 < self.reads < 3

        async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, str]:
            self.reads += keys is None
            return await super().read(keys)

    setup = Setup(store := Behind())
    async with setup.running(), asyncio.timeout(10):
        while store.reads < 3:
            await asyncio.sleep(0.005)


async def test_the_audit_repairs_changes_by_others() -> None:
    setup = Setup(store := Store())
    setup.put(web="a")
    async with setup.running(audit_interval_s=0.02):
        store.held.clear()
        store.held[ServiceKey("default", "stray")] = "x"
        await setup.until(store, web="a")
        assert setup.loop.drift >= 2


async def test_changes_in_progress_do_not_count_as_drift() -> None:
    """Changes take longer than an audit, and audits run continuously."""
    setup = Setup(store := Store())
    setup.put(web="a", other="a")
    async with setup.running(audit_interval_s=0.002):
        store.delay_s = 0.02
        for number in range(10):
            setup.put(web=str(number), other=f"far {number}")
            await setup.until(store, web=str(number), other="a")
        assert setup.loop.drift == 0


async def test_a_refused_service_does_not_count_as_drift() -> None:
    setup = Setup(store := Store())
    setup.put(web="bad", other="a")
    async with setup.running(audit_interval_s=0.02):
        for _ in range(3):
            store.held.pop(ServiceKey("default", "other"), None)
            await setup.until(store, other="a")
        assert setup.outcomes[ServiceKey("default", "web")].state == "refused"
        assert setup.loop.drift == 3


async def test_deleted_services_are_removed() -> None:
    setup = Setup(store := Store())
    setup.put(web="a")
    async with setup.running():
        setup.put(web=None)
        await setup.until(store)


async def test_removals_run_in_the_opposite_order() -> None:
    log: list[str] = []
    setup = Setup(Store(log=log, title="rules"), last := Store(log=log, title="announcement"))
    async with setup.running():
        setup.put(web="a")
        await setup.until(last, web="a")
        setup.put(web=None)
        await setup.until(setup.stores[0])
    assert log == ["rules web a", "announcement web a", "announcement web None", "rules web None"]


NOTE = Finding("Moved", "the address has moved")


class AnnouncingStore(Store):
    """A store whose texts are lists of addresses. It takes an address back before the other stores
    change."""

    withdraws_first = True

    def withdrawals(
        self, intents: Mapping[ServiceKey, str], actual: Mapping[ServiceKey, str]
    ) -> Sequence[Put]:
        kept = {
            key: ",".join(
                each for each in actual[key].split(",") if each in intents[key].split(",")
            )
            for key in intents
            if key in actual
        }
        return [Put(key, text) for key, text in kept.items() if text != actual[key]]


async def test_what_a_service_loses_is_withdrawn_before_the_previous_drivers_change() -> None:
    log: list[str] = []
    setup = Setup(Store(log=log, title="rules"), last := AnnouncingStore(log=log, title="routes"))
    async with setup.running():
        setup.put(web="a,b")
        await setup.until(last, web="a,b")
        log.clear()
        setup.put(web="b,c")
        await setup.until(last, web="b,c")
    assert log == ["routes web b", "rules web b,c", "routes web b,c"]


class TellingStore(AnnouncingStore):
    """An announcing store that has something to report about its first change of a Service."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        new = len(self.log) == 1
        return {each.service: Outcome("done", notes=(NOTE,)) for each in changes if new}


async def test_what_a_withdrawal_reports_is_not_lost() -> None:
    setup = Setup(Store(), last := TellingStore(log=(log := ["before"]), title="routes"))
    async with setup.running():
        setup.put(web="a,b")
        await setup.until(last, web="a,b")
        log.clear()
        setup.put(web="b,c")
        await setup.until(last, web="b,c")
        async with asyncio.timeout(10):
            while setup.history["web"][-1].notes != (NOTE,):
                await asyncio.sleep(0.005)


async def test_a_withdrawal_that_fails_holds_up_no_other_driver() -> None:
    log: list[str] = []
    setup = Setup(Store(log=log, title="rules"), last := AnnouncingStore(log=log, title="routes"))
    async with setup.running():
        setup.put(web="a,b")
        await setup.until(last, web="a,b")
        log.clear()
        last.failures = 1
        setup.put(web="a")
        await setup.until(last, web="a")
    assert log == ["rules web a", "routes web a"]


class HangingStore(AnnouncingStore):
    """An announcing store that does not answer while `answers` is not set, and for which a pass
    waits for a moment only. `notes`: those of the next call."""

    patience_s = 0.05

    def __init__(self, log: list[str] | None = None, title: str = "") -> None:
        super().__init__(log=log, title=title)
        self.answers = asyncio.Event()
        self.answers.set()
        self.notes: tuple[Finding, ...] = ()

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await self.answers.wait()
        notes, self.notes = self.notes, ()
        return {
            **dict.fromkeys((each.service for each in changes), Outcome("done", notes=notes)),
            **await super().apply(changes),
        }


async def test_a_driver_that_hangs_holds_up_no_table_and_withdraws_later() -> None:
    setup = Setup(rules := Store(), last := HangingStore())
    setup.put(web="a,b", other="a", more="a")
    async with setup.running():
        last.answers.clear()
        setup.put(web="a")
        await setup.until(rules, web="a", other="a", more="a")
        late = await setup.outcome("web", "unavailable")
        assert late.in_part
        assert late.coarse
        assert "has not ended yet" in late.message
        # The withdrawal goes on. Nothing else waits for it, and nothing else begins.
        for number in range(20):
            setup.put(other=str(number))
            await setup.until(rules, web="a", other=str(number), more="a")
        calls = len(last.calls)
        last.answers.set()
        await setup.until(last, web="a", other="19", more="a")
        await setup.until(rules, web="a", other="19", more="a")
        assert last.calls[calls] == (ServiceKey("default", "web"),)
        # A Service is removed only after its withdrawal, others go on.
        last.answers.clear()
        setup.put(more=None, other="b")
        await setup.until(rules, web="a", other="b", more="a")
        last.answers.set()
        await setup.until(rules, web="a", other="b")


async def test_what_a_call_reports_for_which_no_pass_has_waited_is_not_lost() -> None:
    setup = Setup(Store(), last := HangingStore())
    setup.put(web="a")
    async with setup.running():
        last.answers.clear()
        last.notes = (NOTE,)
        setup.put(web="b")
        await setup.outcome("web", "unavailable")
        last.answers.set()
        async with asyncio.timeout(10):
            while setup.history["web"][-1].state != "done":
                await asyncio.sleep(0.005)
        told = [note for each in setup.history["web"] for note in each.notes]
        assert told == [NOTE]


async def test_why_a_call_has_failed_for_which_no_pass_has_waited_is_reported() -> None:
    """The driver hangs again when it is asked again, so no call ends in time."""
    setup = Setup(Store(), last := HangingStore())
    setup.put(web="a")
    async with setup.running():
        last.answers.clear()
        last.failures = 1
        setup.put(web="b")
        await setup.outcome("web", "unavailable")
        last.answers.set()
        async with asyncio.timeout(10):
            while last.failures:
                await asyncio.sleep(0)
        last.answers.clear()
        async with asyncio.timeout(10):
            while setup.history["web"][-1].message != "the store is away":
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", [Store, SlowRemovalStore], ids=["failed", "incomplete"])
async def test_a_failed_or_incomplete_removal_keeps_the_service_in_the_previous_drivers(
    kind: type[Store],
) -> None:
    log: list[str] = []
    first, last = Store(log=log, title="claim"), kind(log=log, title="cloud")
    setup = Setup(first, last)
    async with setup.running():
        setup.put(web="a")
        await setup.until(last, web="a")
        last.failures = 1
        setup.put(web=None)
        await setup.until(first)
    assert log == ["claim web a", "cloud web a", "cloud web None", "claim web None"]


async def test_services_are_applied_in_parallel_at_the_start() -> None:
    setup = Setup(store := Store(delay_s=0.02), parallel=4)
    setup.put(**{f"s{i}": "a" for i in range(20)})
    async with setup.running():
        await setup.until(store, **{f"s{i}": "a" for i in range(20)})
    assert {len(call) for call in store.calls} == {1}
    assert store.max_concurrent == 4


async def test_other_services_whose_plan_changes_get_their_own_pass() -> None:
    setup = Setup(store := Store(delay_s=0.01), parallel=4)
    setup.put(web="a", other="a")
    async with setup.running():
        await setup.until(store, web="a", other="a")
        setup.also_planned = {ServiceKey("default", "other"): "b"}
        for text in "cdefg":
            setup.put(web=text)
            await asyncio.sleep(0.005)
        await setup.until(store, web="g", other="b")
    assert {len(call) for call in store.calls} == {1}, (
        "no call contains two Services; the store checks that no Service has two writers"
    )


async def test_a_failed_audit_does_not_end_the_loop() -> None:
    setup = Setup(store := Store())
    store.failing_reads = 2
    setup.put(web="a")
    async with setup.running(audit_interval_s=0.02):
        await setup.until(store, web="a")
        store.failing_reads = 2
        store.held.clear()
        await setup.until(store, web="a")
    assert setup.loop.drift == 1


async def test_after_a_conflict_the_service_is_read_again_and_no_failure_is_reported() -> None:
    setup = Setup(store := Store())
    store.conflicts = 1
    setup.put(web="a")
    async with setup.running():
        await setup.until(store, web="a")
    assert setup.outcomes[ServiceKey("default", "web")].state == "done"


async def test_unavailable_services_do_not_delay_the_others() -> None:
    setup = Setup(store := Store())
    async with setup.running():
        setup.put(**({f"s{i:03}": "a" for i in range(1000)} | {"s123": "far", "s777": "far"}))
        good = {f"s{i:03}": "a" for i in range(1000) if i not in (123, 777)}
        await setup.until(store, **good)
        assert len(store.calls) <= 2 * 2 * 11
        assert setup.outcomes[ServiceKey("default", "s123")].state == "unavailable"


async def test_a_loop_that_ends_leaves_no_subscription() -> None:
    setup = Setup(Store())
    async with setup.running():
        pass
    async with setup.running():
        assert len(setup.state.subscribers) == 1
