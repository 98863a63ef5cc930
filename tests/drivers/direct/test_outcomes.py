"""A problem of one Service does not affect other Services: unreachable nodes, listeners of other
Services, and resources that are used up."""

import asyncio
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import pytest
from tests.drivers.direct.conftest import NODE1, WEB, Run, driver, ip, load_balancer, reconcile

from fairlead.drivers import Component
from fairlead.drivers.direct import DirectDriver
from fairlead.drivers.direct.maps.arena import GRACE_S
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta, ServiceSpec
from fairlead.model import Listener, LoadBalancer, Member, Outcome, ServiceKey
from fairlead.reconcile import Loop
from fairlead.state import State

pytestmark = pytest.mark.root

NODE2 = Member("node2", "192.0.2.22", 1)
FAR = Member("far", "198.51.100.21", 1)
BEHIND = Member("behind", "203.0.113.99", 1)
NO_ROUTE = "there is no route to node far at 198.51.100.21; check the gateway's routes"

SPEC = ServiceSpec()


class Announce(NamedTuple):
    service: ServiceKey
    uid: str


def service(name: str, address: str, *members: Member) -> dict[ServiceKey, LoadBalancer]:
    key = ServiceKey("default", name)
    listeners = (Listener("IPv4", 80, "TCP", "Local", 30080, members),)
    return {key: LoadBalancer(key, f"uid-{name}", "fairlead.io/direct", (address,), listeners)}


async def outcomes(
    made: DirectDriver, intents: dict[ServiceKey, LoadBalancer]
) -> dict[str, Outcome]:
    """Reconcile these Services once, and return the outcomes by name."""
    changes = made.diff(made.render(intents), await made.read(intents.keys()))
    return {key.name: outcome for key, outcome in (await made.apply(changes)).items()}


async def shares(made: DirectDriver, name: str) -> set[str]:
    """Return the nodes that get new connections of the Service."""
    (listener,) = (await made.read(None))[ServiceKey("default", name)].listeners
    return {listener.slots.nodes[i] for i in array("H", listener.slots.current)}


def test_the_next_hop_of_a_node_in_use_is_not_looked_up_again(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        assert await outcomes(made, service("first", "203.0.113.1", NODE1)) == {}
        # `run` would notice this, for all Services at once.
        ip("route", "delete", "192.0.2.0/24", "dev", "eth0")
        assert await outcomes(made, service("second", "203.0.113.2", NODE1)) == {}
        assert await shares(made, "second") == {"node1"}
        await made.close(remove=True)

    run(scenario)


def test_an_unreachable_node_is_left_out_and_named_and_other_services_are_served(run: Run) -> None:
    async def scenario() -> None:
        ip("route", "add", "203.0.113.96/28", "via", "192.0.2.1")
        made = driver()
        await made.open()
        intents = service("well", "203.0.113.1", NODE1)
        intents |= service("partly", "203.0.113.2", FAR, NODE1)
        intents |= service("not", "203.0.113.3", FAR)
        intents |= service("refused", "203.0.113.4", BEHIND, NODE1)
        for _ in range(2):  # each pass has the same result
            found = await outcomes(made, intents)
            assert found.keys() == {"partly", "not", "refused"}
            assert found["partly"] == Outcome("unavailable", NO_ROUTE, in_part=True)
            assert found["not"] == Outcome("unavailable", NO_ROUTE)
            assert (found["refused"].state, found["refused"].in_part) == ("refused", True)
            words = (
                "node behind at 203.0.113.99 is not on a link with this gateway: the route "
                "leads through 192.0.2.1"
            )
            assert words in found["refused"].message
            assert (
                await shares(made, "well")
                == await shares(made, "partly")
                == await shares(made, "refused")
                == {"node1"}
            )
            # The Service has no other node. Its traffic flows as soon as there is a route.
            assert await shares(made, "not") == {"far"}
        ip("route", "add", "198.51.100.0/24", "dev", "eth0")
        assert (await outcomes(made, intents)).keys() == {"refused"}
        assert await shares(made, "partly") == {"far", "node1"}
        await made.close(remove=True)

    run(scenario)


class Announcement(Component):
    """A driver after `direct` in the chain, which records the Services that reach it."""

    name = "announcement"

    def __init__(self) -> None:
        self.shown: dict[ServiceKey, str] = {}

    def render(self, intents: Mapping[ServiceKey, LoadBalancer]) -> Mapping[ServiceKey, str]:
        return {key: intent.uid for key, intent in intents.items()}

    def diff(
        self, desired: Mapping[ServiceKey, str], actual: Mapping[ServiceKey, str]
    ) -> Sequence[Announce]:
        return [Announce(key, uid) for key, uid in desired.items() if actual.get(key) != uid]

    async def read(self, keys: Collection[ServiceKey] | None) -> Mapping[ServiceKey, str]:
        return dict(self.shown)

    async def apply(self, changes: Sequence[Announce]) -> Mapping[ServiceKey, Outcome]:
        self.shown |= {change.service: change.uid for change in changes}
        return {}


def test_a_service_with_an_unreachable_node_still_reaches_the_next_driver(run: Run) -> None:
    async def scenario() -> None:
        made, announcement, state = driver(), Announcement(), State(("services",))
        intents = service("well", "203.0.113.1", NODE1)
        intents |= service("partly", "203.0.113.2", FAR, NODE1)
        intents |= service("not", "203.0.113.3", FAR)
        outcome_of: dict[str, Outcome] = {}

        def report(
            _: Mapping[ServiceKey, LoadBalancer], outcomes: Mapping[ServiceKey, Outcome]
        ) -> None:
            outcome_of.update({key.name: outcome for key, outcome in outcomes.items()})

        def plan(keys: Collection[ServiceKey]) -> Mapping[ServiceKey, LoadBalancer]:
            return {key: intents[key] for key in keys}

        await made.open()
        state.update_services(
            {
                ObjectKey(*key): Service(ServiceMeta(name=key.name, namespace="default"), SPEC)
                for key in intents
            }
        )
        loop = Loop("forwarding", state, plan, [made, announcement], report)
        task = asyncio.ensure_future(loop.run())
        state.mark_synced("services")
        await loop.settled.wait()
        assert {key.name for key in announcement.shown} == {"well", "partly"}
        assert {name: each.state for name, each in outcome_of.items()} == {
            "well": "done",
            "partly": "unavailable",
            "not": "unavailable",
        }
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.close(remove=True)

    run(scenario)


def test_the_share_of_an_unreachable_node_goes_to_others_until_it_is_back(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        intents = load_balancer(NODE1, NODE2) | service("api", "203.0.113.11", NODE1, NODE2)
        await reconcile(made, intents)
        before = await made.read(None)
        ip("route", "add", "unreachable", "192.0.2.22")
        await made.read(None)
        outcome_of = await outcomes(made, intents)
        assert outcome_of.keys() == {"web", "api"}
        assert "no route to node node2 at 192.0.2.22" in outcome_of["web"].message
        for name in ("web", "api"):
            assert await shares(made, name) == {"node1"}
            (listener,) = (await made.read(None))[ServiceKey("default", name)].listeners
            assert "node2" in listener.retained_nodes, "open connections stay"
        ip("route", "delete", "unreachable", "192.0.2.22")
        assert await outcomes(made, intents) == {}
        after = await made.read(None)
        assert {key: each.listeners[0].slots.current for key, each in after.items()} == {
            key: each.listeners[0].slots.current for key, each in before.items()
        }
        await made.close(remove=True)

    run(scenario)


def test_a_listener_that_another_service_holds_is_not_taken(run: Run) -> None:
    async def scenario() -> None:
        made = driver()
        await made.open()
        await reconcile(made, load_balancer(NODE1))
        late = service("late", "203.0.113.10", NODE2)
        also = service("also", "203.0.113.12", NODE2)
        outcome_of = await outcomes(made, late | also)
        assert outcome_of.keys() == {"late"}
        assert outcome_of["late"].state == "unavailable"
        assert (
            "listener 203.0.113.10:80/TCP is held by Service default/web"
            in outcome_of["late"].message
        )
        assert await shares(made, "web") == {"node1"}
        # The loop removes the listener before another Service gets it.
        await made.apply(made.diff({}, await made.read([WEB])))
        assert await outcomes(made, late) == {}
        assert await shares(made, "late") == {"node2"}
        await made.close(remove=True)

    run(scenario)


def test_if_not_all_services_fit_some_are_served_and_no_memory_is_lost(run: Run) -> None:
    """1 MiB of table memory holds 512 tables of 2 KiB. A listener counts as two tables, and an
    eighth of the memory is the reserve for changes."""
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        made = driver(clock=lambda: now_s)
        await made.open()
        intents = load_balancer(NODE1)
        for i in range(519):
            intents |= service(f"s{i}", f"198.18.{i >> 8}.{i & 255}", NODE1)
        for _ in range(2):
            outcome_of = await outcomes(made, intents)
            assert len(outcome_of) == 520 - 224
            assert {outcome.state for outcome in outcome_of.values()} == {"unavailable"}
            assert all(
                "table memory is used up except for the reserve" in outcome.message
                for outcome in outcome_of.values()
            )
            assert len(await made.read(None)) == 224
            await made.apply(made.diff({}, await made.read(None)))
            now_s += GRACE_S
        await made.close(remove=True)

    run(scenario)
