"""Audits run beside other work: readers and changes never see a half updated mirror."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.drivers.direct.conftest import NODE1, PINS, Run, driver, load_balancer, reconcile

from fairlead.drivers.direct.driver import BATCH_SIZE
from fairlead.drivers.direct.maps.records import pack_listener_key
from fairlead.drivers.direct.metrics import TrafficCollector
from fairlead.drivers.direct.spec import ListenerKey
from fairlead.model import Listener, LoadBalancer, Member, ServiceKey
from fairlead.net.bpf import Map

pytestmark = pytest.mark.root

COUNT = 300
AUDITS = 4


def intent(number: int, weight: int) -> LoadBalancer:
    key = ServiceKey("default", f"s{number}")
    members = (NODE1, Member("node2", "192.0.2.22", weight))
    listeners = (Listener("IPv4", 80, "TCP", "Local", 30080, members),)
    return LoadBalancer(
        key,
        f"uid-{number}",
        "fairlead.io/direct",
        (f"198.18.{number >> 8}.{number & 255}",),
        listeners,
    )


def test_audits_reads_and_changes_run_beside_each_other(run: Run) -> None:
    async def scenario() -> None:
        made = driver(arena_bytes=8 << 20)
        await made.open()
        intents = {each.service: each for each in (intent(i, 1) for i in range(COUNT))}
        await reconcile(made, intents)
        intents = {each.service: each for each in (intent(i, 2) for i in range(COUNT))}
        await reconcile(made, intents)  # now each listener has a previous table
        over = False

        async def settle(key: ServiceKey) -> list[str]:
            """Reconcile one Service, as a pass of the loop does."""
            mine = {key: intents[key]}
            changes = made.diff(made.render(mine), await made.read([key]))
            assert await made.apply(changes) == {}
            return [str(change) for change in changes]

        async def audit() -> None:
            nonlocal over
            try:
                for _ in range(AUDITS):
                    await made.read(None)
            finally:
                over = True

        async def look() -> int:
            looks = 0
            while not over:
                actual = await made.read(intents.keys())
                assert actual.keys() == intents.keys()
                key = list(intents)[looks % COUNT]
                assert len(made.diff(made.render({key: intents[key]}), {key: actual[key]})) == 0
                looks += 1
                await asyncio.sleep(0.001)
            return looks

        async def change() -> int:
            number = 0
            while not over:
                number += 1
                changed = intent(number % COUNT, 3 + number // COUNT)
                intents[changed.service] = changed
                assert len(await settle(changed.service)) == 1
                await asyncio.sleep(0.003)
                assert await settle(changed.service) == []
            return number

        _, _, looks = await asyncio.gather(audit(), audit(), look())
        over = False
        _, changes = await asyncio.gather(audit(), change())
        assert looks > AUDITS
        assert changes > 1
        assert await reconcile(made, intents) == []
        await made.close(remove=True)

    run(scenario)


def test_an_audit_finds_foreign_changes_while_other_changes_are_applied(run: Run) -> None:
    async def scenario() -> None:
        made = driver(arena_bytes=8 << 20)
        await made.open()
        intents = {each.service: each for each in (intent(i, 1) for i in range(COUNT))}
        await reconcile(made, intents)
        await made.read(None)  # the first complete read returns what `open` has read
        stray = next(iter(intents))
        (layout,) = PINS.glob("layout-*")
        with Map.open(layout / "listeners") as listeners:  # as another process would
            listeners.delete(pack_listener_key(ListenerKey("198.18.0.0", 80, "TCP")))
        done = 0

        async def change() -> None:
            nonlocal done
            while True:
                done += 1
                one = intent(done % (COUNT - 1) + 1, 2 + done % 2)
                await made.apply(
                    made.diff(made.render({one.service: one}), await made.read([one.service]))
                )
                await asyncio.sleep(0)

        task = asyncio.ensure_future(change())
        before = done
        assert stray not in await made.read(None)
        assert done > before
        task.cancel()
        await made.close(remove=True)

    run(scenario)


def test_other_tasks_run_between_the_batches_of_a_change(run: Run) -> None:
    async def scenario() -> None:
        made = driver(arena_bytes=8 << 20)
        await made.open()
        await reconcile(made, {each.service: each for each in (intent(i, 1) for i in range(COUNT))})
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        intents = {each.service: each for each in (intent(i, 2) for i in range(COUNT))}
        found = await made.read(intents.keys())
        assert turns == COUNT // BATCH_SIZE - 1
        changes = made.diff(made.render(intents), found)
        assert len(changes) == COUNT
        assert await made.apply(changes) == {}
        assert turns == 2 * (COUNT // BATCH_SIZE - 1)
        turns = 0
        assert await made.read(None) == await made.read(intents.keys())
        assert turns >= 2 * (COUNT // BATCH_SIZE - 1)
        task.cancel()
        await made.close(remove=True)

    run(scenario)


def test_counters_of_the_data_plane_can_be_scraped(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        registry = CollectorRegistry()
        registry.register(TrafficCollector(lambda: made.counters))
        lines = generate_latest(registry).decode().splitlines()
        assert 'fairlead_packets_total{service="default/web"} 0.0' in lines
        assert "fairlead_untracked_flows_total 0.0" in lines
        assert 'fairlead_flow_entries{table="connections"} 0.0' in lines
        assert 'fairlead_flow_entries_limit{table="connections"} 1024.0' in lines
        assert 'fairlead_flow_entries_limit{table="datagrams"} 1024.0' in lines
        used = {"table_memory": 2 * 2048, "listeners": 1, "retained_nodes": 0, "source_ranges": 0}
        limits = {
            "table_memory": 1 << 20,
            "listeners": 1024,
            "retained_nodes": 32 * 1024,
            "source_ranges": 1 << 20,
        }
        for metric, figures in (("used", used), ("limit", limits)):
            values = {line.partition("} ")[0]: line.partition("} ")[2] for line in lines}
            for resource, figure in figures.items():
                assert (
                    float(values[f'fairlead_gateway_resource_{metric}{{resource="{resource}"'])
                    == figure
                )
        await made.close(remove=True)

    run(scenario)
