"""Who may cause a reload, and whose connections end with a worker: by tables, and with a real
HAProxy."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.drivers.proxy.site import (
    ClientConnection,
    balancer,
    new_answers,
    nodes,
    opened,
    reconcile,
    until,
)

from fairlead.drivers.proxy import ProxyDriver, runtime
from fairlead.drivers.proxy.reloads import (
    BURST,
    MAX_PAUSE_S,
    MAX_WAIT_S,
    OldWorker,
    ReloadRecord,
    Reloads,
)
from fairlead.model import LoadBalancer, Outcome, ProxySettings, ServiceKey
from fairlead.plan.proxying import RELOAD_DELAYED

OWN, OTHER = ServiceKey("noisy", "web"), ServiceKey("quiet", "web")


def test_a_namespace_waits_longer_after_each_reload_beyond_its_burst() -> None:
    reloads = Reloads(0, 10.0)
    for _ in range(BURST):
        assert reloads.wait_s("noisy", 0.0) == 0
        reloads.record(1, {"noisy"}, 0.0)
    assert reloads.wait_s("noisy", 0.0) == 10
    assert reloads.wait_s("noisy", 4.0) == 6
    assert reloads.wait_s("quiet", 0.0) == 0
    assert reloads.wait_s("noisy", 10.0) == 0
    reloads.record(2, {"noisy"}, 10.0)
    assert reloads.wait_s("noisy", 10.0) == 10


def test_changes_that_join_a_reload_of_another_namespace_delay_later_ones_no_further() -> None:
    reloads = Reloads(0, 10.0)
    for _ in range(5 * BURST):
        reloads.record(1, {"noisy"}, 0.0)
    assert reloads.wait_s("noisy", 0.0) == 10


def test_a_wait_is_new_once_until_it_ends_or_nobody_asks_for_it_any_more() -> None:
    reloads = Reloads(0, 10.0)
    assert reloads.begin_waits([OWN, OTHER], 0.0) == {OWN, OTHER}
    assert reloads.begin_waits([OWN], MAX_WAIT_S - 1) == set()
    assert reloads.begin_waits([OWN, OTHER], MAX_WAIT_S) == {OTHER}
    reloads.end_waits([OWN])
    assert reloads.begin_waits([OWN, OTHER], MAX_WAIT_S) == {OWN}


@pytest.mark.parametrize(
    ("limit", "held_by_others", "allowed"),
    [(20, 0, 10), (20, 10, 5), (20, 18, 1), (20, 20, 1), (1, 0, 1), (0, 50, 100)],
)
def test_a_namespace_gets_half_of_the_old_workers_that_others_leave(
    limit: int, held_by_others: int, allowed: int
) -> None:
    """All these workers have a connection of another namespace."""
    reloads = Reloads(limit, 0.0)
    old = [OldWorker(pid, 0, {f"third{pid}": 1}) for pid in range(held_by_others)]
    for worker in old:
        reloads.record(worker.pid, {f"other{worker.pid}"}, 0.0)
    caused, now_s = 0, MAX_PAUSE_S
    while caused < 100 and reloads.has_room("noisy", old, now_s):
        caused += 1
        reloads.record(1000 + caused, {"noisy"}, now_s)
        now_s += MAX_PAUSE_S
        old.append(OldWorker(1000 + caused, 0, {f"third{1000 + caused}": 1}))
    assert caused == allowed


def grown(
    reloads: Reloads, old: Sequence[OldWorker], pid: int, connections: Mapping[str, int]
) -> tuple[list[OldWorker], list[OldWorker]]:
    """Return the old workers after the reload that made this one old, and those that it ends."""
    now = [each._replace(reloads=each.reloads + 1) for each in old]
    now.append(OldWorker(pid, 1, connections))
    ended = reloads.surplus(now)
    return [each for each in now if each not in ended], ended


def test_a_namespace_that_only_holds_connections_delays_no_change_for_longer_than_the_limit() -> (
    None
):
    """The noisy namespace changes nothing and has a connection in every worker. The quiet one
    changes as often as it may. A third one has a single connection, in the first worker. When all
    workers have connections of others, reloads are rare."""
    reloads, now_s = Reloads(20, 0.0), 0.0
    old: list[OldWorker] = []
    ended: list[OldWorker] = []
    waits: list[float] = []
    for pid in range(60):
        waits.append(0.0)
        while not reloads.has_room("quiet", old, now_s):
            waits[-1] += 1
            now_s += 1
        reloads.record(pid, {"quiet"}, now_s)
        third = {"third": 1} if pid == 0 else {}
        old, more = grown(reloads, old, pid, {"noisy": 1, "quiet": 1} | third)
        ended += more
    growing = [max(MAX_WAIT_S, 30.0 * count) for count in range(10)]
    assert waits == pytest.approx([0.0] * 10 + growing + [MAX_PAUSE_S] * 40, abs=1)
    assert [each.pid for each in ended] == list(range(1, 41)), "none with others' connections"


def test_connections_in_more_than_half_of_the_old_workers_take_no_room_from_others() -> None:
    reloads = Reloads(20, 0.0)
    old: list[OldWorker] = []
    for pid in range(100):
        namespace = "first" if pid < 10 else "second"
        now_s = MAX_PAUSE_S * pid
        if not reloads.has_room(namespace, old, now_s):
            break
        reloads.record(pid, {namespace}, now_s)
        old, _ = grown(reloads, old, pid, {"noisy": 2})
    assert len(old) == 19, "it would be 15 if all of them counted"
    assert reloads.has_room("first", old, now_s)
    full = [*old, OldWorker(200, 1, {"third": 1}), OldWorker(201, 1, {"third": 1})]
    assert [each.pid for each in reloads.surplus(full)] == [0], "not one of the third"


def test_only_the_cause_pays_however_often_it_changes() -> None:
    """A quiet namespace has an idle connection in the first worker; the noisy one keeps a
    connection in every worker."""
    reloads, old, ended = Reloads(20, 0.0), [OldWorker(0, 0, {"quiet": 10, "noisy": 1})], []
    for pid in range(1, 200):
        assert reloads.has_room("noisy", old, 0.0)
        reloads.record(pid - 1, {"noisy"}, 0.0)
        old = [each._replace(reloads=each.reloads + 1) for each in old]
        surplus = reloads.surplus(old)
        ended += surplus
        old = [each for each in old if each not in surplus]
        old.append(OldWorker(pid, 0, {"noisy": 1}))
    assert len(old) == 21  # one of them is the current worker
    assert len(ended) == 179
    assert {namespace for each in ended for namespace in each.connections} == {"noisy"}
    assert [each.pid for each in ended] == list(range(1, 180)), "the oldest ends first"


@pytest.mark.parametrize("limit", [2, 20])
def test_however_many_namespaces_change_an_old_worker_of_others_stays_for_long(limit: int) -> None:
    """Each second another namespace that has caused nothing so far wants a reload. Each worker has
    an idle connection of another bystander; with two workers, each bystander counts as one that
    keeps connections in most of them."""
    reloads = Reloads(limit, 10.0)
    old: list[OldWorker] = []
    born_s: dict[int, float] = {}
    last_s, ages_s, pauses_s = 0.0, [], []
    for second in range(10_800):
        now_s = float(second)
        if reloads.has_room(f"noisy{second}", old, now_s):
            pauses_s.append(now_s - last_s)
            last_s = born_s[second] = now_s
            reloads.record(second, {f"noisy{second}"}, now_s)
            old, ended = grown(reloads, old, second, {f"quiet{second}": 1})
            ages_s += [now_s - born_s[each.pid] for each in ended]
    assert min(ages_s) >= (28 if limit == 20 else 30) * limit
    assert sorted(ages_s)[len(ages_s) // 2] >= 59 * limit
    assert max(pauses_s) <= MAX_WAIT_S
    assert len(old) == limit


HOLDS, BUSY = {"hoarder": 1}, {"busy": 1}


@pytest.mark.parametrize(
    ("held", "causes", "rare_s", "often_s"),
    [
        pytest.param([HOLDS] * 10, "", 0.0, 0.0, id="half of the workers"),
        pytest.param([HOLDS] * 11, "", 30.0, 30.0, id="one namespace holds 11"),
        pytest.param([HOLDS] * 15, "", 60.0, 60.0, id="one namespace holds 15"),
        pytest.param([HOLDS] * 20, "", 60.0, 60.0, id="one namespace holds all"),
        pytest.param([HOLDS] * 10 + [BUSY] * 10, "", 60.0, 60.0, id="each of two holds half"),
        pytest.param([HOLDS | BUSY] * 15, "", 60.0, 150.0, id="each of two holds 15"),
        pytest.param([HOLDS | BUSY] * 20, "", 60.0, MAX_PAUSE_S, id="each of two holds all"),
        pytest.param([HOLDS | BUSY] * 20, "hoarder", 60.0, 60.0, id="one of them caused all"),
        pytest.param([HOLDS | BUSY] * 20, "noisy", 60.0, 60.0, id="a third one caused all"),
        pytest.param([BUSY] * 20, "busy", 0.0, 0.0, id="one holds and caused all"),
        pytest.param([{"quiet": 1, "often": 1}] * 20, "noisy", 60.0, 60.0, id="their own"),
    ],
)
def test_the_pause_before_a_change_grows_for_a_namespace_that_changes_often(
    held: list[Mapping[str, int]], causes: str, rare_s: float, often_s: float
) -> None:
    """`rare_s`: the pause for a namespace that has caused no reload lately, since the last reload.
    `often_s`: that for one that has caused the last reload."""
    reloads = Reloads(20, 0.0)
    for pid in range(len(held)):
        reloads.record(pid, {causes} if causes else (), 0.0)
    reloads.record(20, {"often"}, 0.0)
    old = [OldWorker(pid, len(held) - pid, each) for pid, each in enumerate(held)]

    def pause_s(namespace: str) -> int:
        return next(second for second in range(301) if reloads.has_room(namespace, old, second))

    assert pause_s("quiet") == pytest.approx(rare_s, abs=1)
    assert pause_s("often") == pytest.approx(often_s, abs=1)


STEP_S, PERIOD_S, APART_S = 10, 120, 310


class Site:
    """One HAProxy. In each step some namespaces want a change, and share a reload as soon as one of
    them may cause it. Each current worker has the connections of the namespaces in `holding`."""

    def __init__(self) -> None:
        self.reloads = Reloads(20, 10.0)
        self.old: list[OldWorker] = []
        self.now_s = 0.0
        self.asked_s: dict[str, float] = {}
        self.waited_s: dict[str, float] = {}
        """The longest wait of each namespace."""
        self.ended_s: dict[str, list[float]] = {}
        """When a worker with connections of each namespace was ended."""

    def step(self, wanting: set[str], holding: set[str]) -> None:
        self.asked_s = dict.fromkeys(wanting, self.now_s) | self.asked_s
        allowed = [
            self.reloads.wait_s(each, self.now_s) == 0
            and self.reloads.has_room(each, self.old, self.now_s)
            for each in sorted(self.asked_s)
        ]
        if any(allowed):
            for each, asked_s in self.asked_s.items():
                wait_s = self.now_s - asked_s
                self.waited_s[each] = max(wait_s, self.waited_s.get(each, 0.0))
            pid = int(self.now_s)
            self.reloads.record(pid, self.asked_s.keys(), self.now_s)
            self.asked_s = {}
            self.old, ended = grown(self.reloads, self.old, pid, dict.fromkeys(holding, 1))
            for worker in ended:
                for each in worker.connections:
                    self.ended_s.setdefault(each, []).append(self.now_s)
        self.now_s += STEP_S

    def end(self, namespace: str) -> None:
        """End the connections of the namespace in the older half of the workers; a worker without
        connections ends."""
        half = len(self.old) // 2
        self.old = [
            each._replace(
                connections={
                    name: count
                    for name, count in each.connections.items()
                    if name != namespace or index >= half
                }
            )
            for index, each in enumerate(self.old)
        ]
        self.old = [each for each in self.old if each.connections]


tricks = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=60, max_size=60)
"""What a hostile namespace does in each period: change all the time, open connections to each
worker, end those in the older ones."""


@settings(max_examples=12, deadline=None)
@given(tricks, st.sampled_from([0, 3, 11, 40]))
@example([(False, True, False)] * 60, 3)
@example([(True, True, False)] * 60, 3)
@example([(True, False, False)] * 60, 3)
def test_no_namespace_delays_changes_of_another_or_ends_its_connections_whatever_it_does(
    done: list[tuple[bool, bool, bool]], first: int
) -> None:
    """The quiet namespace changes something every five minutes, and has connections in all workers.
    Another one has idle connections in five workers, and changes nothing."""
    site, idle = Site(), 0
    for changes, holds, ends in done:
        if ends:
            site.end("hostile")
        for _ in range(PERIOD_S // STEP_S):
            count = len(site.old)
            wanting = {"hostile"} if changes else set()
            if site.now_s % APART_S == 0:
                wanting.add("quiet")
            is_idle = idle < 5 and site.now_s >= first * PERIOD_S
            holding = {"quiet"} | ({"hostile"} if holds else set())
            before = {each.pid for each in site.old}
            site.step(wanting, holding | ({"idle"} if is_idle else set()))
            idle += is_idle and not {each.pid for each in site.old} <= before
            assert len(site.old) <= max(count + 1, 20)
    assert site.waited_s["quiet"] <= MAX_WAIT_S + STEP_S
    assert "idle" not in site.ended_s


@settings(max_examples=12, deadline=None)
@given(st.lists(tricks, min_size=2, max_size=4))
@example([[(True, False, False)] * 60, [(False, True, False)] * 60])
@example([[(True, True, False)] * 60, [(True, True, False)] * 60])
@example([[(False, True, False)] * 60, [(False, True, False)] * 60])
def test_namespaces_that_act_together_delay_a_rare_change_of_another_by_a_minute_at_most(
    done: list[list[tuple[bool, bool, bool]]],
) -> None:
    """Several bystanders have connections in all workers; one of them changes something every five
    minutes."""
    site = Site()
    for each in zip(*done, strict=True):
        for number, (_, _, ends) in enumerate(each):
            if ends:
                site.end(f"hostile{number}")
        for _ in range(PERIOD_S // STEP_S):
            wanting = {f"hostile{number}" for number, trick in enumerate(each) if trick[0]}
            holding = {f"hostile{number}" for number, trick in enumerate(each) if trick[1]}
            if site.now_s % APART_S == 0:
                wanting.add("quiet")
            site.step(wanting, {"quiet", "busy"} | holding)
    assert site.waited_s["quiet"] <= MAX_WAIT_S + STEP_S


@settings(max_examples=12, deadline=None)
@given(tricks)
@example([(True, False, False)] * 60)
@example([(True, True, False)] * 60)
def test_no_namespace_ends_connections_of_others_in_every_worker_more_often_than_the_limit(
    done: list[tuple[bool, bool, bool]],
) -> None:
    """The busy namespace has connections in every worker, and changes nothing."""
    site = Site()
    for changes, holds, ends in done:
        if ends:
            site.end("hostile")
        for _ in range(PERIOD_S // STEP_S):
            site.step(
                {"hostile"} if changes else set(), {"busy"} | ({"hostile"} if holds else set())
            )
    ended_s = site.ended_s.get("busy", [])
    assert all(after - before >= MAX_PAUSE_S for before, after in pairwise(ended_s))


def test_a_namespace_whose_connections_alone_are_at_stake_waits_for_nobody() -> None:
    """It loses them, and nobody else does."""
    reloads = Reloads(2, 0.0)
    reloads.record(1, {"noisy"}, 0.0)
    reloads.record(2, {"noisy"}, 0.0)
    old = [OldWorker(1, 2, {"third": 1}), OldWorker(2, 1, {"quiet": 9})]
    assert not reloads.has_room("noisy", old, 1.0)
    assert reloads.has_room("quiet", old, 1.0)
    reloads.record(3, {"quiet"}, 1.0)
    _, ended = grown(reloads, old, 3, {"fourth": 1})
    assert [each.pid for each in ended] == [2]


def test_what_a_process_knows_about_reloads_outlives_it() -> None:
    before, after, rebooted = (Reloads(2, 10.0) for _ in range(3))
    for pid in range(1, BURST + 2):
        before.record(pid, {"noisy"}, 1000.0)
    written = msgspec.json.encode(before.to_record())
    after.restore(msgspec.json.decode(written, type=ReloadRecord), 1001.0)
    old = [OldWorker(1, 2, {"noisy": 1}), OldWorker(2, 1, {"quiet": 1})]
    for each in (before, after):
        assert each.wait_s("noisy", 1001.0) == 9
        assert [worker.pid for worker in each.surplus([*old, OldWorker(3, 0, {})])] == [1]
        assert each.others_in(old) == {2: 1}
    # The clock of a host begins with its start.
    rebooted.restore(before.to_record(), 5.0)
    assert rebooted.wait_s("noisy", 5.0) == 0
    assert rebooted.has_room("third", [OldWorker(1, 1, {"quiet": 1})] * 2, 5.0)


def test_a_worker_that_two_namespaces_caused_is_not_at_the_mercy_of_one() -> None:
    reloads = Reloads(1, 0.0)
    reloads.record(1, {"noisy", "quiet"}, 0.0)
    reloads.record(2, {"noisy"}, 0.0)
    both = [OldWorker(1, 2, {"quiet": 1}), OldWorker(2, 1, {"noisy": 5})]
    assert reloads.surplus(both) == both[1:]
    assert not reloads.has_room("noisy", both, 0.0)
    assert not reloads.has_room("quiet", both, 0.0)


def test_a_worker_of_an_earlier_process_counts_for_others() -> None:
    reloads = Reloads(4, 0.0)
    reloads.record(2, {"noisy"}, 0.0)
    old = [OldWorker(1, 2, {"noisy": 1}), OldWorker(2, 1, {"quiet": 1})]
    assert not reloads.has_room("noisy", old, 0.0)
    reloads.keep({1})
    assert reloads.has_room("noisy", [OldWorker(2, 1, {"quiet": 1})], 0.0)


def changed(key: ServiceKey, client_ms: int) -> LoadBalancer:
    return balancer(
        {"node1": 1},
        key=key,
        port=80 if key == OWN else 81,
        settings=ProxySettings(client_ms=3_600_000 + client_ms),
    )


def at(key: ServiceKey, port: int) -> LoadBalancer:
    return balancer({"node1": 1}, key=key, port=port)


async def has_old_workers(driver: ProxyDriver, count: int) -> bool:
    found, _ = await runtime.workers(driver.haproxy.master)
    return sum(each.old for each in found) == count


TOGETHER = "all changes that wait are applied together"


async def attempt(driver: ProxyDriver, wanted: LoadBalancer) -> Outcome:
    """Apply this state once, as soon as the pause after the last reload is over, and the changes
    that wait could have joined."""
    keys = {wanted.service: wanted}
    while True:
        changes = driver.diff(driver.render(keys), await driver.read(list(keys)))
        outcomes = await driver.apply(changes)
        outcome = outcomes.get(wanted.service, Outcome("done"))
        if outcome.message not in ("HAProxy has just been reloaded", TOGETHER):
            return outcome


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_changes_of_one_namespace_close_no_connection_of_another(folder: Path) -> None:
    async with nodes("node1"), opened(folder, old_workers=4) as driver:
        await reconcile(driver, changed(OWN, 0), changed(OTHER, 0))
        idle = [await ClientConnection.start(port=81) for _ in range(10)]
        for talk in idle:
            assert await talk.request() == ["node1", "-", "x"]
        # Each worker gets a connection of the namespace that changes. Only the first has some of
        # the other namespace.
        own: list[ClientConnection] = []
        for count in range(1, 8):
            assert (await attempt(driver, changed(OWN, count))).state == "done"
            own.append(await ClientConnection.start())
            assert await own[-1].request()
            await driver.poll()
        await until(lambda: has_old_workers(driver, 4))
        assert [await talk.request() for talk in idle] == [["node1", "-", "x"]] * 10

        # A second such worker is half of the limit.
        idle.append(await ClientConnection.start(port=81))
        assert await idle[-1].request()
        assert (await attempt(driver, changed(OWN, 98))).state == "done"
        waiting = await attempt(driver, changed(OWN, 99))
        assert (waiting.state, [note.code for note in waiting.notes]) == (
            "waiting",
            [RELOAD_DELAYED],
        )
        assert (await attempt(driver, changed(OWN, 99))).notes == (), "it is reported once"
        assert (await attempt(driver, changed(OTHER, 1))).state == "done"
        await driver.poll()
        assert [await talk.request() for talk in idle] == [["node1", "-", "x"]] * len(idle)

        # When the connections of a worker end, the change is applied.
        for talk in idle:
            talk.end()

        async def is_applied() -> bool:
            return (await attempt(driver, changed(OWN, 99))).state == "done"

        await until(is_applied)
        assert await new_answers() == [["node1", "-", "x"]]
        for talk in own:
            talk.end()


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_a_port_that_a_delayed_service_gives_up_is_free_at_once(folder: Path) -> None:
    async with nodes("node1"), opened(folder, old_workers=1) as driver:
        await reconcile(driver, at(OWN, 80), at(OTHER, 81))
        talk = await ClientConnection.start(port=81)
        assert await talk.request()
        assert (await attempt(driver, changed(OWN, 1))).state == "done"
        waiting = await attempt(driver, at(OWN, 82))
        assert (waiting.state, [note.code for note in waiting.notes]) == (
            "waiting",
            [RELOAD_DELAYED],
        )
        assert (await attempt(driver, at(OTHER, 80))).state == "done"
        assert await new_answers() == [["node1", "-", "x"]]
        talk.end()


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_a_port_ends_together_with_the_pause_for_the_one_that_replaces_it(
    folder: Path,
) -> None:
    async with nodes("node1"):
        driver = ProxyDriver(folder, reload_pause_s=600.0)
        await driver.read(None)
        try:
            for wanted in (at(OWN, 80), changed(OWN, 1)):
                assert (await attempt(driver, wanted)).state == "done"
            moved = driver.render({OWN: at(OWN, 82)})
            outcomes = await driver.apply(driver.diff(moved, await driver.read([OWN])))
            assert outcomes[OWN].message == "HAProxy has just been reloaded"
            assert await new_answers() == [["node1", "-", "x"]]
        finally:
            await driver.remove()


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_a_new_process_knows_who_caused_the_old_workers(folder: Path) -> None:
    """Otherwise they would count for others, and the namespace could change again at once."""
    async with nodes("node1"), opened(folder, old_workers=4) as driver:
        await reconcile(driver, changed(OWN, 0), changed(OTHER, 0))
        talks = []
        for count in (1, 2):
            talks.append(await ClientConnection.start(port=81))
            assert await talks[-1].request()
            assert (await attempt(driver, changed(OWN, count))).state == "done"
        assert (await attempt(driver, changed(OWN, 3))).state == "waiting"

        successor = ProxyDriver(folder, reload_pause_s=0.1, old_workers=4)
        await successor.read(None)
        assert (await attempt(successor, changed(OWN, 3))).state == "waiting"
        assert (await attempt(successor, changed(OTHER, 3))).state == "done"
        for talk in talks:
            assert await talk.request() == ["node1", "-", "x"]
            talk.end()


@pytest.mark.root
@pytest.mark.usefixtures("inside")
async def test_changes_that_wait_share_the_next_reload_whoever_causes_it(folder: Path) -> None:
    marked: set[ServiceKey] = set()
    async with nodes("node1"), opened(folder, old_workers=2, requeue=marked.update) as driver:
        await reconcile(driver, changed(OWN, 0), changed(OTHER, 0))
        talk = await ClientConnection.start(port=81)
        assert await talk.request()
        for count in (1, 2):
            outcome = await attempt(driver, changed(OWN, count))
        assert outcome.state == "waiting"
        reloads, wanted = driver.reloads, (changed(OWN, 2), changed(OTHER, 1))
        alone = driver.render({OTHER: wanted[1]})
        outcomes = await driver.apply(driver.diff(alone, await driver.read([OTHER])))
        assert outcomes[OTHER].message == TOGETHER
        assert marked == {OWN, OTHER}
        await reconcile(driver, *wanted)
        assert driver.reloads == reloads + 1
        assert await talk.request() == ["node1", "-", "x"]
        talk.end()
