"""A role as a process, without its real drivers: reflectors, state, plan, loop, report, and a
driver that records its calls.

In: a role; on the first line of standard input, as JSON, the API server's `Access`. Out: the stages
and figures of `figures`: `started`, `synced` (all objects have been read), `planned` (the
driver was called for every Service), then the requested figures. The data plane is left out,
because its cost depends on the kernel's interfaces; everything else is the role's own code.
"""

import argparse
import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from bench.figures import Figures

from bench import fixture
from fairlead.config import Config, PoolConfig
from fairlead.drivers import Component
from fairlead.kube.access import Access
from fairlead.kube.client import Client
from fairlead.kube.freshness import Freshness
from fairlead.model import LoadBalancer, NodeService, Outcome, ServiceKey
from fairlead.plan.cluster import plan_node
from fairlead.plan.projection import CONTROLLER, GATEWAY, NODE
from fairlead.reconcile import Loop, Plan
from fairlead.role_state import Role
from fairlead.roles.controller import Planner
from fairlead.roles.plan_cache import PlanCache
from fairlead.roles.process import ADDRESS_SOURCES, SOURCES, AddressFeed, Feed
from fairlead.roles.report import Reporter
from fairlead.state import State
from fairlead.telemetry import configure_logging
from fairlead.web import View

Intent = LoadBalancer | NodeService
PROJECTIONS = {"controller": CONTROLLER, "gateway": GATEWAY, "node": NODE}


class Start(msgspec.Struct, frozen=True):
    """The first line of standard input."""

    access: Access


class Call(msgspec.Struct, frozen=True, gc=False):
    """The change that makes this Service be as planned."""

    service: ServiceKey
    intent: Intent | None

    def __str__(self) -> str:
        return (
            f"serve {self.service}" if self.intent is not None else f"stop serving {self.service}"
        )


class RecordingDriver(Component):
    """A driver that serves nothing and records the time of its calls."""

    name = "recording"

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._known: dict[ServiceKey, Intent] = {}

    def render(self, intents: Mapping[ServiceKey, Intent]) -> Mapping[ServiceKey, Intent]:
        return intents

    def diff(
        self, desired: Mapping[ServiceKey, Intent], actual: Mapping[ServiceKey, Intent]
    ) -> Sequence[Call]:
        changed = [
            Call(key, intent) for key, intent in desired.items() if actual.get(key) != intent
        ]
        return [*changed, *(Call(key, None) for key in actual if key not in desired)]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, Intent]:
        return (
            dict(self._known)
            if keys is None
            else {key: self._known[key] for key in keys if key in self._known}
        )

    async def apply(self, changes: Sequence[Call]) -> Mapping[ServiceKey, Outcome]:
        self._figures.applied([change.service.name for change in changes])
        for change in changes:
            if change.intent is None:
                del self._known[change.service]
            else:
                self._known[change.service] = change.intent
        return {}


class NoEvents:
    """A recorder that fails: no event is expected in a measurement."""

    def event(self, key: ServiceKey, uid: str, kind: str, reason: str, message: str) -> None:
        raise AssertionError(f"{key}: {reason}: {message}")


def plan_of(role: str, state: State, config: Config) -> Plan[ServiceKey, Intent]:
    match role:
        case "controller":
            return Planner(state, config)
        case "gateway":
            return PlanCache(state, config).confirmed
        case _:
            return partial(plan_node, state, fixture.node_name(0))


async def measure(role: Role, access: Access) -> None:
    """Run until a command on standard input ends the process."""
    config = Config(pools=(PoolConfig("main", (fixture.VIP_POOL,)),))
    figures = Figures()
    state = State((*SOURCES, *ADDRESS_SOURCES) if role == "controller" else SOURCES)
    view = View(role, fixture.node_name(0))
    report: Reporter[Any] = Reporter(view, state, NoEvents(), reason="SyncFailed")
    loop: Loop[ServiceKey, Intent] = Loop(
        role, state, plan_of(role, state, config), [RecordingDriver(figures)], report
    )
    figures.stage("started")
    async with Client(access) as client, asyncio.TaskGroup() as group:
        freshness = Freshness(lambda: client.answered_s)
        group.create_task(Feed(client, state, freshness, PROJECTIONS[role]).run())
        if role == "controller":
            group.create_task(AddressFeed(client, state, freshness).run())
        running = group.create_task(loop.run())
        await state.has_synced.wait()
        figures.stage("synced")
        await loop.settled.wait()
        figures.stage("planned")
        while figures.answer(await asyncio.to_thread(sys.stdin.readline)):
            pass
        running.cancel()
        raise SystemExit


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.reading", description=__doc__)
    parser.add_argument("role", choices=PROJECTIONS)
    chosen = parser.parse_args().role
    configure_logging()
    asyncio.run(measure(chosen, msgspec.json.decode(sys.stdin.readline(), type=Start).access))
