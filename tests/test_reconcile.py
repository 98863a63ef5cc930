"""The loop with a store that accepts writes like a kernel, or like a slow cloud."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from fairlead.drivers import Component
from fairlead.errors import Conflict, Refused, Unavailable
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.model import Outcome, ServiceKey
from fairlead.reconcile import Loop, Pace
from fairlead.state import State


class Put(msgspec.Struct, frozen=True):
    service: ServiceKey
    value: str | None

    def __str__(self) -> str:
        return f"put {self.service} {self.value}"


class Store(Component):
    """A load balancer that stores one text for each Service. It refuses texts that start with
    `bad`, and cannot place texts that start with `far`, whatever else is in the call. `away`: the
    number of calls that fail. `changed`: the number of calls that raise Conflict. `diary`: a list
    to which several stores append. `meanwhile`: called once during a read of everything."""

    name = "store"

    def __init__(
        self, takes_s: float = 0.0, diary: list[str] | None = None, title: str = ""
    ) -> None:
        self.title = title
        self.diary = diary if diary is not None else []
        self.unreadable = 0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.changed = 0
        self.held: dict[ServiceKey, str] = {}
        self.calls: list[tuple[ServiceKey, ...]] = []
        self.away = 0
        self.running: list[ServiceKey] = []
        self.most_at_once = 0
        self.takes_s = takes_s

    def render(self, intents: Mapping[ServiceKey, str]) -> Mapping[ServiceKey, str]:
        return intents

    def diff(
        self, desired: Mapping[ServiceKey, str], actual: Mapping[ServiceKey, str]
    ) -> Sequence[Put]:
        keys = sorted(desired.keys() | actual.keys())
        return [Put(key, desired.get(key)) for key in keys if desired.get(key) != actual.get(key)]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, str]:
        if keys is None and self.unreadable:
            self.unreadable -= 1
            raise Unavailable("the store cannot be read")
        found = {key: value for key, value in self.held.items() if keys is None or key in keys}
        if keys is None and (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            await meanwhile()
        return found

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        services = tuple(change.service for change in changes)
        assert not set(services) & set(self.running), "two writers on one Service"
        self.calls.append(services)
        self.running += services
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await asyncio.sleep(self.takes_s)
            if self.away:
                self.away -= 1
                raise Unavailable("the store is away")
            if self.changed:
                self.changed -= 1
                raise Conflict("somebody else was quicker")
            if any(
                change.value is not None and change.value.startswith("far") for change in changes
            ):
                raise Unavailable("too far")
            for change in changes:
                if change.value is not None and change.value.startswith("bad"):
                    raise Refused(f"{change.value} is bad", fix="send something good")
            for change in changes:
                self.diary.append(f"{self.title} {change.service.name} {change.value}")
                if change.value is None:
                    self.held.pop(change.service, None)
                else:
                    self.held[change.service] = change.value
        finally:
            for service in services:
                self.running.remove(service)
        return {}


class Bench:
    """A loop under test. In: `state`. Out: `store.held`. The intent of a Service is the text of its
    `intent` annotation. `parallel`: 0: each store takes all Services at once; n: a store takes one
    Service at a time, and n calls run in parallel."""

    def __init__(
        self, *stores: Store, parallel: int = 0, plan_slice: int = 0, large: str = ""
    ) -> None:
        self.parallel = parallel
        self.large = ServiceKey("default", large)
        self.plan_slice = plan_slice
        self.touched: dict[ServiceKey, str] = {}
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
        return planned | self.touched

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
        async with asyncio.timeout(5):
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


async def test_ten_thousand_services_are_one_transaction_and_one_change_is_one_more() -> None:
    bench = Bench(store := Store())
    bench.put(**{f"s{i}": "a" for i in range(10_000)})
    async with bench.running():
        assert [len(call) for call in store.calls] == [10_000]
        assert bench.planned == 10_000, "each was planned once"
        bench.put(s7="b")
        await bench.until(store, **({f"s{i}": "a" for i in range(10_000)} | {"s7": "b"}))
        assert [len(call) for call in store.calls] == [10_000, 1]
        assert bench.planned == 10_001


async def test_many_changes_are_planned_in_slices_and_applied_as_one() -> None:
    bench = Bench(store := Store(), plan_slice=10)
    bench.put(**{f"s{i}": "a" for i in range(1000)})
    async with bench.running():
        assert max(bench.plans) == 10
        bench.plans.clear()
        bench.put(**{f"s{i}": "b" for i in range(1000)})
        seen = list[int]()
        while len(bench.plans) < 100:
            await asyncio.sleep(0)
            seen.append(len(bench.plans))
        assert set(seen) - {0} == set(range(1, 101)), "others had a turn after each slice"
        await bench.until(store, **{f"s{i}": "b" for i in range(1000)})
        assert [len(call) for call in store.calls] == [1000, 1000]


class Gated(Store):
    """A store that blocks on the Service `huge` until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = asyncio.Event(), asyncio.Event()

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        if any(change.service.name == "huge" for change in changes):
            self.waiting.set()
            await self.gate.wait()
        return await super().apply(changes)


async def test_others_do_not_wait_for_a_large_service() -> None:
    bench = Bench(store := Gated(), plan_slice=10, large="huge")
    store.gate.set()
    bench.put(huge="a", web="0")
    async with bench.running():
        for turn, (huge, before) in enumerate((("b", "a"), (None, "b"), ("c", None)), 1):
            store.gate.clear()
            store.waiting.clear()
            bench.put(huge=huge)
            async with asyncio.timeout(10):
                await store.waiting.wait()
            bench.put(web=str(turn))
            # It is marked again while its pass runs.
            bench.put(huge=huge)
            await bench.until(store, web=str(turn), **({"huge": before} if before else {}))
            store.gate.set()
            await bench.until(store, web=str(turn), **({"huge": huge} if huge else {}))


async def test_a_change_after_an_idle_time_lets_other_tasks_mark_it_too() -> None:
    bench = Bench(Store(), plan_slice=10)
    bench.put(web="a")
    async with bench.running():
        bench.plans.clear()
        bench.put(web="b")
        await asyncio.sleep(0)
        assert bench.plans == []
        await asyncio.sleep(0)
        assert bench.plans == [1]


async def test_a_loop_with_an_idle_delay_lets_other_loops_run_first_after_an_idle_time() -> None:
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
    bench = Bench(store := Store(), plan_slice=3)
    bench.put(**{f"s{number}": "x" for number in range(10)})
    async with bench.running(audit_interval_s=0.02):
        for _ in range(3):
            store.held[ServiceKey("default", "s4")] = "edited"
            store.held[ServiceKey("default", "stray")] = "x"
            await bench.until(store, **{f"s{number}": "x" for number in range(10)})
            bench.outcomes.clear()
            async with asyncio.timeout(5):
                while len(bench.outcomes.keys() & bench.state.services.keys()) < 10:
                    await asyncio.sleep(0.001)
        assert bench.loop.drift >= 3


@pytest.mark.parametrize("parallel", [0, 4])
async def test_no_change_is_lost_while_all_is_read_at_the_start(parallel: int) -> None:
    """A plan from before the change must not be applied after it. The first pass carries all
    differences, because a driver may treat it as complete, and replace what its predecessor left.
    """
    bench = Bench(store := Store(), parallel=parallel)
    bench.put(same="a", other="a", going="a")
    store.held[ServiceKey("default", "stray")] = "x"

    async def change() -> None:
        bench.put(other="b", going=None, new="a")
        # Enough time for passes that must not happen.
        await asyncio.sleep(0.1)

    store.meanwhile = change
    async with bench.running():
        await bench.until(store, same="a", other="b", new="a")
        assert bench.planned <= 3 + 2 * 3 + 1, "`same` was planned once, the others again"
    passes = [text for text in store.diary if text.startswith((" other", " going"))]
    assert " other a" not in passes
    assert " going a" not in passes
    if not parallel:
        first = {service.name for service in store.calls[0]}
        assert first >= {"same", "other", "new"}


@pytest.mark.parametrize("parallel", [0, 4])
async def test_an_audit_does_not_repeat_a_refusal_that_has_ended_since_it_planned(
    parallel: int,
) -> None:
    bench = Bench(store := Store(), parallel=parallel)
    bench.put(web="nonsense")
    later_audit = asyncio.Event()

    async def mend() -> None:
        bench.put(web="a")
        await bench.outcome("web", "done")
        store.meanwhile = read_again

    async def read_again() -> None:
        later_audit.set()

    async with bench.running(audit_interval_s=0.02), asyncio.timeout(10):
        await bench.outcome("web", "refused")
        store.meanwhile = mend
        await later_audit.wait()
    states = [each.state for each in bench.history["web"]]
    assert "refused" not in states[states.index("done") :]


async def test_unknown_services_of_the_store_are_removed_at_start() -> None:
    bench = Bench(store := Store())
    store.held[ServiceKey("default", "gone")] = "a"
    bench.put(kept="a")
    async with bench.running():
        await bench.until(store, kept="a")


class Hourglass(Store):
    """A store that applies texts at once, and in which they expire by themselves."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        new = {change.service for change in changes if change.service not in self.held}
        await super().apply(changes)
        self.held |= dict.fromkeys(new, "runs")
        return dict.fromkeys(new, Outcome("done", again_s=0.2))


async def test_a_driver_can_requeue_a_service_that_is_done() -> None:
    bench = Bench(first := Hourglass(), second := Store())
    async with bench.running():
        bench.put(web="over")
        await bench.until(first, web="runs")
        await bench.until(second, web="over")
        # A pass in between does not delay it.
        bench.put(other="x")
        await bench.until(first, web="over", other="x")
        assert {outcome.state for outcome in bench.outcomes.values()} == {"done"}
        calls = len(first.calls)
        await asyncio.sleep(0.3)
        assert len(first.calls) == calls, "it is asked once"


async def test_a_slow_cloud_gets_single_services_in_parallel_and_none_twice() -> None:
    bench = Bench(store := Store(takes_s=0.02), parallel=4)
    async with bench.running():
        for text in "abc":
            bench.put(**{f"s{i}": text for i in range(20)})
            await asyncio.sleep(0.03)
        await bench.until(store, **{f"s{i}": "c" for i in range(20)})
    assert {len(call) for call in store.calls} == {1}
    assert 1 < store.most_at_once <= 4


async def test_one_bad_service_fails_alone_and_costs_few_calls() -> None:
    bench = Bench(store := Store())
    async with bench.running():
        bench.put(**({f"s{i}": "a" for i in range(100)} | {"s50": "bad"}))
        await bench.until(store, **{f"s{i}": "a" for i in range(100) if i != 50})
        assert bench.outcomes[ServiceKey("default", "s50")].state == "refused"
        assert bench.outcomes[ServiceKey("default", "s51")].state == "done"
        assert len(store.calls) <= 15
        bench.put(s50="good")
        await bench.until(store, **({f"s{i}": "a" for i in range(100)} | {"s50": "good"}))


async def test_an_unavailable_service_is_retried() -> None:
    bench = Bench(store := Store())
    store.away = 2
    bench.put(web="a")
    async with bench.running():
        await bench.until(store, web="a")
    assert len(store.calls) == 3


async def test_a_refused_service_keeps_what_it_has() -> None:
    bench = Bench(store := Store())
    bench.put(web="a", other="a")
    async with bench.running():
        bench.put(web="nonsense", other="b")
        await bench.until(store, web="a", other="b")
        assert bench.outcomes[ServiceKey("default", "web")] == Outcome(
            "refused", "the annotation is nonsense"
        )


async def test_a_service_that_fails_in_one_driver_is_withheld_from_the_next() -> None:
    rules, announcement = Store(), Store()
    bench = Bench(rules, announcement)
    async with bench.running():
        bench.put(web="a")
        await bench.until(announcement, web="a")
        bench.put(web="bad", other="a")
        await bench.until(announcement, web="a", other="a")
        assert rules.held[ServiceKey("default", "web")] == "a"


class Rationed(Store):
    """A store that holds its texts, and reports a part that it cannot serve."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        return {
            change.service: Outcome("unavailable", "there is no more", in_part=True)
            for change in changes
        }


async def test_a_service_that_is_served_in_part_is_passed_to_the_next_driver() -> None:
    rules, announcement = Rationed(), Store()
    bench = Bench(rules, announcement)
    async with bench.running():
        bench.put(web="a")
        await bench.until(announcement, web="a")
        assert bench.outcomes[ServiceKey("default", "web")].message == "there is no more"


class Partly(Store):
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
    forwarding, announcement = Partly(), Store()
    bench = Bench(forwarding, announcement)
    bench.put(web="a", other="a", third="far away")
    async with bench.running():
        # No change of `third` was applied.
        await bench.until(announcement, web="a", other="a")
        assert (await bench.outcome("web", "unavailable")).message == "no way to node1"
        assert (await bench.outcome("third", "unavailable")).message == "too far"


class Reluctant(Store):
    """A store that serves in part what it removes late."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        if self.away and any(change.value is None for change in changes):
            self.away -= 1
            return {
                change.service: Outcome("unavailable", "not yet", in_part=True)
                for change in changes
            }
        return await super().apply(changes)


async def test_a_partial_removal_keeps_the_service_in_the_drivers_before() -> None:
    diary: list[str] = []
    first, last = Store(diary=diary, title="claim"), Reluctant(diary=diary, title="cloud")
    bench = Bench(first, last)
    async with bench.running():
        bench.put(web="a")
        await bench.until(last, web="a")
        last.away = 1
        bench.put(web=None)
        await bench.until(first)
    assert diary == ["claim web a", "cloud web a", "cloud web None", "claim web None"]


class Waiting(Store):
    """A cloud whose load balancers take some time, so nothing is served yet."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        return {
            change.service: Outcome("waiting", "it is being made", again_s=60.0)
            for change in changes
        }


async def test_a_service_that_is_not_served_yet_is_not_published() -> None:
    claim, cloud, publication = Store(), Waiting(), Store()
    bench = Bench(claim, cloud, publication)
    async with bench.running():
        bench.put(web="a")
        await bench.outcome("web", "waiting")
        assert publication.held == {}


class Refusing(Store):
    """A store that serves every Service, but refuses one port of it."""

    async def apply(self, changes: Sequence[Put]) -> Mapping[ServiceKey, Outcome]:
        await super().apply(changes)
        return {change.service: Outcome("refused", "no room", in_part=True) for change in changes}


async def test_outcomes_of_two_drivers_are_reported_together_and_retried_if_one_requests_it() -> (
    None
):
    rules, announcement = Refusing(), Store()
    bench = Bench(rules, announcement)
    announcement.away = 1
    async with bench.running():
        bench.put(web="a")
        outcome = await bench.outcome("web", "unavailable")
        assert (outcome.message, outcome.in_part) == ("no room; the store is away", False)
        await bench.until(announcement, web="a")


async def test_a_driver_of_one_transaction_stands_between_drivers_of_single_writes() -> None:
    claim, network, publication = Store(takes_s=0.001), Store(), Store(takes_s=0.001)
    bench = Bench(claim, network, publication, parallel=4)
    network.batch = 0
    names = [f"s{i}" for i in range(40)]
    bench.put(**dict.fromkeys(names, "a"))
    async with bench.running():
        assert [len(call) for call in network.calls] == [40]
        for store in (claim, publication):
            assert [len(call) for call in store.calls] == [1] * 40
            assert 1 < store.most_at_once <= 4
            assert len(store.held) == 40
        publication.away = 1
        bench.put(s0="b", s1="b")
        wanted = dict.fromkeys(names, "a") | {"s0": "b", "s1": "b"}
        await bench.until(publication, **wanted)
        assert max(len(call) for call in network.calls[1:]) <= 2


async def test_a_driver_gets_no_more_services_at_once_than_its_batch() -> None:
    bench = Bench(store := Store(), parallel=1)
    store.batch = 3
    bench.put(**{f"s{i}": "a" for i in range(10)})
    async with bench.running():
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

    bench = Bench(store := Behind())
    async with bench.running(), asyncio.timeout(10):
        while store.reads < 3:
            await asyncio.sleep(0.005)


async def test_the_audit_repairs_changes_by_others() -> None:
    bench = Bench(store := Store())
    bench.put(web="a")
    async with bench.running(audit_interval_s=0.02):
        store.held.clear()
        store.held[ServiceKey("default", "stray")] = "x"
        await bench.until(store, web="a")
        assert bench.loop.drift >= 2


async def test_changes_in_progress_do_not_count_as_drift() -> None:
    """Audits run one after the other, beside changes that take longer than any of them."""
    bench = Bench(store := Store())
    bench.put(web="a", other="a")
    async with bench.running(audit_interval_s=0.002):
        store.takes_s = 0.02
        for number in range(10):
            bench.put(web=str(number), other=f"far {number}")
            await bench.until(store, web=str(number), other="a")
        assert bench.loop.drift == 0


async def test_deleted_services_go() -> None:
    bench = Bench(store := Store())
    bench.put(web="a")
    async with bench.running():
        bench.put(web=None)
        await bench.until(store)


async def test_removals_run_in_the_opposite_order() -> None:
    diary: list[str] = []
    bench = Bench(
        Store(diary=diary, title="rules"), last := Store(diary=diary, title="announcement")
    )
    async with bench.running():
        bench.put(web="a")
        await bench.until(last, web="a")
        bench.put(web=None)
        await bench.until(bench.stores[0])
    assert diary == ["rules web a", "announcement web a", "announcement web None", "rules web None"]


async def test_a_failed_removal_keeps_the_service_in_the_drivers_before() -> None:
    diary: list[str] = []
    bench = Bench(
        first := Store(diary=diary, title="claim"), last := Store(diary=diary, title="cloud")
    )
    async with bench.running():
        bench.put(web="a")
        await bench.until(last, web="a")
        last.away = 1
        bench.put(web=None)
        await bench.until(first)
    assert diary == ["claim web a", "cloud web a", "cloud web None", "claim web None"]


async def test_a_start_in_parallel_is_parallel() -> None:
    bench = Bench(store := Store(takes_s=0.02), parallel=4)
    bench.put(**{f"s{i}": "a" for i in range(20)})
    async with bench.running():
        await bench.until(store, **{f"s{i}": "a" for i in range(20)})
    assert {len(call) for call in store.calls} == {1}
    assert store.most_at_once == 4


async def test_services_that_the_plan_affects_get_their_own_pass() -> None:
    bench = Bench(store := Store(takes_s=0.01), parallel=4)
    bench.put(web="a", other="a")
    async with bench.running():
        await bench.until(store, web="a", other="a")
        bench.touched = {ServiceKey("default", "other"): "b"}
        for text in "cdefg":
            bench.put(web=text)
            await asyncio.sleep(0.005)
        await bench.until(store, web="g", other="b")
    assert {len(call) for call in store.calls} == {1}, (
        "the store itself sees to it that no Service has two writers"
    )


async def test_a_failed_audit_does_not_end_the_loop() -> None:
    bench = Bench(store := Store())
    store.unreadable = 2
    bench.put(web="a")
    async with bench.running(audit_interval_s=0.02):
        await bench.until(store, web="a")
        store.unreadable = 2
        store.held.clear()
        await bench.until(store, web="a")
    assert bench.loop.drift == 1


async def test_a_conflict_is_read_again_and_not_reported() -> None:
    bench = Bench(store := Store())
    store.changed = 1
    bench.put(web="a")
    async with bench.running():
        await bench.until(store, web="a")
    assert bench.outcomes[ServiceKey("default", "web")].state == "done"


async def test_unavailable_services_do_not_delay_the_others() -> None:
    bench = Bench(store := Store())
    async with bench.running():
        bench.put(**({f"s{i:03}": "a" for i in range(1000)} | {"s123": "far", "s777": "far"}))
        good = {f"s{i:03}": "a" for i in range(1000) if i not in (123, 777)}
        await bench.until(store, **good)
        assert len(store.calls) <= 2 * 2 * 11
        assert bench.outcomes[ServiceKey("default", "s123")].state == "unavailable"


async def test_a_loop_that_ends_leaves_nothing_behind() -> None:
    bench = Bench(Store())
    async with bench.running():
        pass
    async with bench.running():
        assert len(bench.state.subscribers) == 1
