"""Two concurrent controllers, whose calls arrive in any order and of which each may be lost before
or after it took effect.

Meanwhile Services and pools are created, changed and deleted, and controllers are killed and
restarted. At no time do two Services have the same port of an address in their status, nor do
gateways serve a port for two Services. When both controllers are idle, exactly the published and
the kept addresses are granted."""

import asyncio
import itertools
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.drivers.stepped_controller import CONFIG, Ending, SteppedController
from tests.makers import plan_gateway

from fairlead.kube.access import Access
from fairlead.kube.answers import NotFound
from fairlead.kube.client import Client
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.objects import NODES, SERVICES, ObjectKey, Service
from fairlead.lab import crds
from fairlead.lab.apiserver import ApiServer
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.addresses import shown_by
from fairlead.state import State

pytestmark = pytest.mark.soak

NAMES = ("a", "b", "c", "d")
RANGES = ("203.0.113.1-203.0.113.2", "203.0.113.2-203.0.113.3", "203.0.113.1-203.0.113.3")
ADDRESSES = ("203.0.113.1", "203.0.113.2")
PORTS = (80, 443)
ENDINGS: st.SearchStrategy[Ending] = st.sampled_from(
    ("well", "well", "well", "lost before", "lost after")
)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
MAX_STEPS = 1_000


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    annotations = {}
    if sharing := draw(st.sampled_from(("", "", "k", "l"))):
        annotations["fairlead.io/sharing-key"] = sharing
    if draw(st.booleans()):
        annotations["fairlead.io/keep-address"] = "true"
    if address := draw(st.sampled_from(("", "", *ADDRESSES))):
        annotations["fairlead.io/addresses"] = address
    ports = sorted(draw(st.sets(st.sampled_from(PORTS), min_size=1)))
    kind = draw(st.sampled_from(("LoadBalancer", "LoadBalancer", "LoadBalancer", "ClusterIP")))
    spec = {"type": kind, "ports": [{"name": f"p{port}", "port": port} for port in ports]}
    return {"metadata": {"annotations": annotations}, "spec": spec}


class Race(RuleBasedStateMachine):
    """Every rule makes at most one call of one controller, so that the invariants see each state on
    the server."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.controllers: list[SteppedController] = []
        self.run(self._begin())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _begin(self) -> None:
        # A separate clock, so that equal choices give equal runs.
        ticks = itertools.count()
        self.server = await ApiServer(
            now=lambda: BEGIN + timedelta(seconds=next(ticks) // 40)
        ).__aenter__()
        self.user = await Client(Access(self.server.url)).__aenter__()
        await crds.install(self.user)

    @initialize(
        ranges=st.sampled_from(RANGES), shown=st.sampled_from(("", "203.0.113.1", "192.0.2.9"))
    )
    def start(self, ranges: str, shown: str) -> None:
        """Create a pool, perhaps a Service that another system has served, and two controllers."""

        async def work() -> None:
            await self.user.create(
                ADDRESS_POOLS, {"metadata": {"name": "main"}, "spec": {"addresses": [ranges]}}
            )
            if shown:
                spec = {"type": "LoadBalancer", "ports": [{"port": 80}]}
                await self.user.create(
                    SERVICES, {"metadata": {"name": "d", "namespace": "default"}, "spec": spec}
                )
                status = {"status": {"loadBalancer": {"ingress": [{"ip": shown}]}}}
                await self.user.patch(SERVICES, ("default", "d"), status, subresource="status")
            self.controllers = [await self._start_controller(), await self._start_controller()]

        self.run(work())

    async def _start_controller(self) -> SteppedController:
        controller = SteppedController(self.server)
        await controller.client.__aenter__()
        return controller

    @rule(name=st.sampled_from(NAMES), body=bodies())
    def create_or_edit(self, name: str, body: dict[str, Any]) -> None:
        async def work() -> None:
            try:
                await self.user.get(SERVICES, ("default", name))
            except NotFound:
                body["metadata"] |= {"name": name, "namespace": "default"}
                await self.user.create(SERVICES, body)
                return
            ours = ("sharing-key", "keep-address", "addresses")
            annotations = {f"fairlead.io/{each}": None for each in ours} | body["metadata"][
                "annotations"
            ]
            patch = {"metadata": {"annotations": annotations}, "spec": body["spec"]}
            await self.user.patch(SERVICES, ("default", name), patch)

        self.run(work())

    @rule(name=st.sampled_from(NAMES), forced=st.booleans())
    def delete(self, name: str, forced: bool) -> None:
        """Delete the Service. `forced`: a user also removes the finalizer of Fairlead."""

        async def work() -> None:
            try:
                await self.user.delete(SERVICES, ("default", name))
                if forced:
                    await self.user.patch(
                        SERVICES, ("default", name), {"metadata": {"finalizers": None}}
                    )
            except NotFound:
                return

        self.run(work())

    @rule(ranges=st.sampled_from(RANGES))
    def edit_pool(self, ranges: str) -> None:
        self.run(self.user.patch(ADDRESS_POOLS, ("", "main"), {"spec": {"addresses": [ranges]}}))

    @rule(number=st.integers(0, 3))
    def release_what_is_kept(self, number: int) -> None:
        async def work() -> None:
            kept = [
                grant
                for grant in await self.user.list(ADDRESS_GRANTS)
                if not any(h.uid for h in grant.spec.holders)
            ]
            if kept:
                grant = kept[number % len(kept)]
                await self.user.delete(
                    ADDRESS_GRANTS,
                    ("", grant.metadata.name),
                    version=grant.metadata.resource_version,
                )

        self.run(work())

    @rule(
        which=st.integers(0, 1),
        limit=st.integers(1, 5),
        kind=st.sampled_from(("services", "addressgrants", "addresspools")),
    )
    def receive(self, which: int, limit: int, kind: str) -> None:
        self.run(self.controllers[which].receive(limit, [kind]))

    @rule(which=st.integers(0, 1), ending=ENDINGS, choice=st.integers(0, 3))
    def step(self, which: int, ending: Ending, choice: int) -> None:
        self.run(self.controllers[which].step(ending, choice))

    @rule(which=st.integers(0, 1), choices=st.lists(st.integers(0, 3), min_size=2, max_size=8))
    def run_steps(self, which: int, choices: list[int]) -> None:
        """Run several steps without receiving changes. The invariants check each step."""
        for choice in choices:
            self.run(self.controllers[which].step("well", choice))
            self.no_port_is_published_twice()

    @rule(which=st.integers(0, 1))
    def serve_all(self, which: int) -> None:
        """One controller receives everything and does all its work, while the other one has
        stopped."""
        for number in range(100):
            self.run(self.controllers[which].receive(1_000))
            if not (self.controllers[which].is_before_call or self.controllers[which].has_work):
                return
            self.run(self.controllers[which].step("well", number))
            self.no_port_is_published_twice()

    @rule(which=st.integers(0, 1))
    def kill_and_restart(self, which: int) -> None:
        async def work() -> None:
            await self.controllers[which].stop()
            await self.controllers[which].client.__aexit__(None, None, None)
            self.controllers[which] = await self._start_controller()

        self.run(work())

    async def _state(self) -> State:
        """Return the present state of the server."""
        state = State(())
        state.update_services(
            {ObjectKey(*each.key): each for each in await self.user.list(SERVICES)}
        )
        state.update_nodes(
            {ObjectKey("", each.metadata.name): each for each in await self.user.list(NODES)}
        )
        return state

    @invariant()
    def no_port_is_published_twice(self) -> None:
        state: State = self.run(self._state())
        shown: dict[tuple[str, str], ServiceKey] = {}
        for key, service in state.services.items():
            for address, ports in shown_by(service).items():
                for port in ports:
                    other = shown.setdefault((address, port), key)
                    assert other == key, f"{address} {port} is shown by {other} and {key}"
        served: dict[tuple[str, int], ServiceKey] = {}
        for key, planned in plan_gateway(state, CONFIG, state.services).items():
            assert isinstance(planned, LoadBalancer)
            for listener in planned.listeners:
                for address in planned.listening(listener):
                    assert served.setdefault((address, listener.port), key) == key

    def teardown(self) -> None:
        try:
            if self.controllers:
                self.run(self._run_until_idle())
        finally:
            self.run(self._end())
            self.runner.close()

    async def _run_until_idle(self) -> None:
        """Both controllers receive everything, and no call is lost. In the end every Service has
        the addresses to which it is entitled, and nothing leaks."""
        await self._settle()
        refused = {key for controller in self.controllers for key in controller.refused}
        services = {each.key: each for each in await self.user.list(SERVICES)}
        granted, shown = await self._granted(), _shown(services)
        for place in granted.keys() | shown.keys():
            # A Service whose request cannot be fulfilled keeps its previous address.
            assert place[1] in refused or granted.get(place) == shown.get(place), place
        for key in services:
            await self.user.delete(SERVICES, key)
        await self._settle()
        assert await self.user.list(SERVICES) == []
        assert await self._granted() == {}
        for grant in await self.user.list(ADDRESS_GRANTS):
            assert grant.spec.keep
            assert grant.spec.holders

    async def _settle(self) -> None:
        for controller in self.controllers:
            controller.audit()
        for number in range(MAX_STEPS):
            controller = self.controllers[number % 2]
            await controller.receive(1_000)
            await controller.step("well", number)
            if number % 2 and not any(
                each.is_before_call or each.has_work for each in self.controllers
            ):
                return
        pytest.fail("the two controllers do not become idle")

    async def _granted(self) -> dict[tuple[str, ServiceKey], frozenset[str]]:
        """Return the granted ports by (address, Service)."""
        return {
            (grant.spec.address, holder.key): frozenset(holder.ports)
            for grant in await self.user.list(ADDRESS_GRANTS)
            for holder in grant.spec.holders
            if holder.uid
        }

    async def _end(self) -> None:
        for controller in self.controllers:
            await controller.stop()
            await controller.client.__aexit__(None, None, None)
        await self.user.__aexit__(None, None, None)
        await self.server.__aexit__(None, None, None)


def _shown(services: dict[ServiceKey, Service]) -> dict[tuple[str, ServiceKey], frozenset[str]]:
    return {
        (address, key): ports
        for key, service in services.items()
        for address, ports in shown_by(service).items()
    }


TestRace = Race.TestCase
TestRace.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)


SLOW_ACTS = ("one step", "one step", "one step", "one sees", "one all")
FAST_ACTS = ("two all", "two all", "two step", "two sees")
ACTS = (*SLOW_ACTS, *FAST_ACTS, "a asks 1", "a asks 2", "b asks 1", "b asks 2")
"""Most acts of the first controller are single steps, those of the second are complete."""


class Exchange:
    """Two Services that alternately request two addresses, and two controllers. Nearly every run
    therefore has one controller that has stopped before a call while the other one has long
    continued."""

    def __init__(self, server: ApiServer, user: Client) -> None:
        self.server = server
        self.user = user
        self.controllers: list[SteppedController] = []

    async def act(self, act: str) -> None:
        who, what, *address = act.split()
        if what == "asks":
            patch = {
                "metadata": {"annotations": {"fairlead.io/addresses": f"203.0.113.{address[0]}"}}
            }
            await self.user.patch(SERVICES, ("default", who), patch)
            return
        controller = self.controllers[("one", "two").index(who)]
        match what:
            case "sees":
                await controller.receive(1_000)
            case "step":
                await controller.step("well")
            case _:
                await self.serve_all(controller)
        await self.check()

    async def serve_all(self, controller: SteppedController) -> None:
        for number in range(60):
            await controller.receive(1_000)
            if not (controller.is_before_call or controller.has_work):
                return
            await controller.step("well", number)
            await self.check()

    async def check(self) -> None:
        shown = _shown({each.key: each for each in await self.user.list(SERVICES)})
        assert len({address for address, _ in shown}) == len(shown), shown


async def exchange(acts: list[str]) -> None:
    async with ApiServer() as server, Client(Access(server.url)) as user:
        await crds.install(user)
        await user.create(
            ADDRESS_POOLS,
            {"metadata": {"name": "main"}, "spec": {"addresses": ["203.0.113.1-203.0.113.2"]}},
        )
        for name in ("a", "b"):
            spec = {"type": "LoadBalancer", "ports": [{"port": 80}]}
            metadata = {
                "name": name,
                "namespace": "default",
                "annotations": {"fairlead.io/addresses": "203.0.113.1"},
            }
            await user.create(SERVICES, {"metadata": metadata, "spec": spec})
        made = Exchange(server, user)
        try:
            for _ in range(2):
                made.controllers.append(SteppedController(server))
                await made.controllers[-1].client.__aenter__()
            for act in acts:
                await made.act(act)
        finally:
            for controller in made.controllers:
                await controller.stop()
                await controller.client.__aexit__(None, None, None)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(ACTS), min_size=20, max_size=50))
def test_a_slow_controller_publishes_no_address_of_another_service(acts: list[str]) -> None:
    asyncio.run(exchange(acts))
