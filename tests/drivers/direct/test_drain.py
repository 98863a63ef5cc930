"""A drain ends after its time, without any other event of the Service."""

import asyncio
from collections.abc import Collection, Mapping

import msgspec
import pytest
from tests.drivers.direct.conftest import NODE1, WEB, Run, driver, load_balancer

from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.model import DirectSettings, LoadBalancer, Member, Outcome, ServiceKey
from fairlead.reconcile import Loop
from fairlead.state import State

pytestmark = pytest.mark.root

NODE2, NODE2_DRAINS = Member("node2", "192.0.2.22", 1), Member("node2", "192.0.2.22", 0, "draining")


def test_a_drain_ends_by_itself(run: Run) -> None:
    async def scenario() -> None:
        made, state, outcomes = driver(), State(("services",)), list[Outcome]()
        intents = load_balancer(NODE1, NODE2)

        def plan(keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer]:
            return {key: intents[key] for key in keys}

        def report(
            _: Mapping[ServiceKey, LoadBalancer], outcome_of: Mapping[ServiceKey, Outcome]
        ) -> None:
            outcomes.extend(outcome_of.values())

        async def retained(*nodes: str) -> None:
            while (await made.read([WEB]))[WEB].listeners[0].retained_nodes != nodes:
                await asyncio.sleep(0.01)

        await made.open()
        service = Service(ServiceMeta(name="web", namespace="default"), ServiceSpec())
        state.update_services({ObjectKey("default", "web"): service})
        loop = Loop("forwarding", state, plan, [made], report)
        task = asyncio.ensure_future(loop.run())
        state.mark_synced("services")
        await loop.settled.wait()
        await retained("node1", "node2")
        drains = load_balancer(NODE1, NODE2_DRAINS)[WEB]
        intents = {WEB: msgspec.structs.replace(drains, settings=DirectSettings(1.0))}
        state.subscribers.mark([WEB])
        while not made.draining():
            await asyncio.sleep(0.01)
        assert (await made.read([WEB]))[WEB].listeners[0].retained_nodes == ("node1", "node2")
        await retained("node1")
        assert made.draining() == []
        assert {outcome.state for outcome in outcomes} == {"done"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.close(remove=True)

    run(scenario)
