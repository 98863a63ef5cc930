"""The cached plan of a gateway equals a new plan after any changes."""

import random
from typing import Any

import msgspec
from tests.makers import plan_gateway

from fairlead.config import Config
from fairlead.drivers.health_targets import render
from fairlead.errors import Refused
from fairlead.kube.objects import (
    EXCLUDE_LABEL,
    SERVICE_NAME_LABEL,
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Node,
    NodeAddress,
    NodeStatus,
    ObjectKey,
    ObjectMeta,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.kube.presence import OnLink
from fairlead.model import LoadBalancer, ServiceKey, Verdict
from fairlead.plan.classes import DIRECT, PROXY
from fairlead.plan.gateways import Gateways
from fairlead.plan.members import NODE_NOT_ANSWERING
from fairlead.roles.plan_cache import PlanCache
from fairlead.sections import AnnounceConfig, L2Config
from fairlead.state import State

CONFIG = msgspec.structs.replace(Config(), default_class=DIRECT.name)
NAMES = ("a", "b", "c", "d")
NODES = ("node1", "node2", "node3")
VERDICTS: tuple[Verdict | None, ...] = (
    "up",
    "up",
    "unready",
    "down",
    "flapping",
    "probe_failed",
    None,
)


def address(node: str) -> str:
    return f"10.0.0.{node[-1]}"


def some_service(draw: random.Random, name: str) -> Service:
    ranges = draw.choice(((), (), ("10.0.0.0/8",), ("nonsense",)))
    spec = ServiceSpec(
        type=draw.choice(("LoadBalancer", "LoadBalancer", "LoadBalancer", "ClusterIP")),
        ports=(ServicePort(draw.choice((80, 81)), "web"),),
        load_balancer_class=draw.choice((DIRECT.name, DIRECT.name, "example.com/other")),
        external_traffic_policy=draw.choice(("Local", "Cluster")),
        health_check_node_port=30000 + NAMES.index(name),
        load_balancer_source_ranges=ranges,
    )
    shown = LoadBalancerStatus(
        (LoadBalancerIngress(draw.choice(("203.0.113.1", "203.0.113.2"))),) * draw.choice((0, 1, 1))
    )
    since = f"2026-01-0{draw.choice('123')}T00:00:00Z"
    return Service(
        ServiceMeta(name, "default", uid=name, creation_timestamp=since), spec, ServiceStatus(shown)
    )


def some_slice(draw: random.Random, name: str) -> EndpointSlice:
    endpoints = tuple(
        Endpoint(
            (f"10.1.0.{number}",),
            EndpointConditions(draw.random() < 0.7, draw.random() < 0.8, draw.random() < 0.3),
            draw.choice((*NODES, None)),
        )
        for number in range(draw.randrange(4))
    )
    labels = {SERVICE_NAME_LABEL: draw.choice(NAMES)}
    return EndpointSlice(
        ObjectMeta(name, "default", labels=labels), "IPv4", endpoints, (EndpointPort("web", 8080),)
    )


def some_node(draw: random.Random, name: str) -> Node:
    labels = {EXCLUDE_LABEL: ""} if draw.random() < 0.2 else {}
    return Node(
        ObjectMeta(name, labels=labels),
        status=NodeStatus((NodeAddress("InternalIP", address(name)),)),
    )


def step(draw: random.Random, state: State) -> None:
    """Make a random change."""
    match draw.randrange(6):
        case 0:
            name = draw.choice(NAMES)
            state.update_services(
                {
                    ObjectKey("default", name): some_service(draw, name)
                    if draw.random() < 0.8
                    else None
                }
            )
        case 1 | 2:
            name = draw.choice(("s1", "s2", "s3", "s4"))
            state.update_slices(
                {
                    ObjectKey("default", name): some_slice(draw, name)
                    if draw.random() < 0.8
                    else None
                }
            )
        case 3:
            name = draw.choice(NODES)
            state.update_nodes(
                {ObjectKey("", name): some_node(draw, name) if draw.random() < 0.8 else None}
            )
        case 4:
            port = draw.choice((10256, *(30000 + number for number in range(len(NAMES)))))
            state.observe(address(draw.choice(NODES)), port, draw.choice(VERDICTS), [])
        case _:
            state.trust_api = draw.random() < 0.5


def shown(planned: Any) -> dict[ServiceKey, LoadBalancer | str]:
    return {key: str(each) if isinstance(each, Refused) else each for key, each in planned.items()}


def test_the_cached_plan_equals_a_new_plan_after_any_changes() -> None:
    draw = random.Random(4)
    state = State(())
    planned = PlanCache(state, CONFIG)
    keys = [ServiceKey("default", name) for name in NAMES]
    seen: set[str] = set()
    for _ in range(2000):
        step(draw, state)
        asked = draw.sample(keys, draw.randrange(1, len(keys) + 1))
        found = shown(planned.confirmed(asked))
        assert found == shown(plan_gateway(state, CONFIG, asked))
        unconfirmed = shown(planned.unconfirmed(asked))
        assert unconfirmed.keys() == found.keys()
        balancers = [each for each in found.values() if isinstance(each, LoadBalancer)]
        seen |= {
            member.state
            for each in balancers
            for listener in each.listeners
            for member in listener.members
        }
        seen |= {note.code for each in balancers for note in each.notes} | {
            type(each).__name__ for each in found.values()
        }
    assert {
        "active",
        "draining",
        "pending",
        "down",
        "PortConflict",
        "HealthChecksFailing",
        "str",
    } <= seen, "every case must occur"


def test_an_unchanged_service_is_planned_once() -> None:
    state = State(())
    planned = PlanCache(state, CONFIG)
    draw = random.Random(1)
    for name in NODES:
        state.update_nodes({ObjectKey("", name): some_node(draw, name)})
    key = ServiceKey("default", "a")
    spec = ServiceSpec(
        type="LoadBalancer", ports=(ServicePort(80, "web"),), load_balancer_class=DIRECT.name
    )
    status = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress("203.0.113.1"),)))
    state.update_services({ObjectKey(*key): Service(ServiceMeta("a", "default"), spec, status)})
    first = planned.unconfirmed([key])[key]
    assert planned.confirmed([key])[key] is first, "no member needs confirmation"
    state.observe("10.0.0.1", 10256, "up", [key])
    assert planned.unconfirmed([key])[key] is first, (
        "a verdict does not change the plan of the Service"
    )
    slice_ = EndpointSlice(
        ObjectMeta("s1", "default", labels={SERVICE_NAME_LABEL: "a"}),
        "IPv4",
        (),
        (EndpointPort("web", 1),),
    )
    state.update_slices({ObjectKey("default", "s1"): slice_})
    assert planned.unconfirmed([key])[key] is not first


def test_members_of_class_proxy_and_direct_are_confirmed_separately() -> None:
    """Connections of class proxy and forwarded packets take different paths to the node if
    forwarded packets go through a tunnel."""
    state = State(())
    planned = PlanCache(state, CONFIG)
    for name in NODES[:2]:
        node = Node(
            ObjectMeta(name), status=NodeStatus((NodeAddress("InternalIP", address(name)),))
        )
        state.update_nodes({ObjectKey("", name): node})
    status = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress("203.0.113.1"),)))
    keys = {
        name: ServiceKey("default", name.rpartition("/")[2]) for name in (DIRECT.name, PROXY.name)
    }
    for class_name, key in keys.items():
        ports = (ServicePort(80 + len(class_name), "web", node_port=30080),)
        spec = ServiceSpec(type="LoadBalancer", ports=ports, load_balancer_class=class_name)
        state.update_services(
            {ObjectKey(*key): Service(ServiceMeta(key.name, "default"), spec, status)}
        )
        endpoints = tuple(
            Endpoint((f"10.1.0.{number}",), EndpointConditions(), name)
            for number, name in enumerate(NODES[:2])
        )
        labels = {SERVICE_NAME_LABEL: key.name}
        slice_ = EndpointSlice(
            ObjectMeta(key.name, "default", labels=labels),
            "IPv4",
            endpoints,
            (EndpointPort("web", 1),),
        )
        state.update_slices({ObjectKey("default", key.name): slice_})
    state.observe(address(NODES[0]), 10256, "up", keys.values())
    state.observe(address(NODES[1]), 10256, "down", keys.values())
    for name in NODES[:2]:
        state.observe(address(name), 10256, "up", keys.values(), True)
    state.tunnels = {address(NODES[1]): "ipip"}
    found = planned.confirmed(keys.values())

    def states_and_notes(class_name: str) -> tuple[list[str], list[str]]:
        balancer = found[keys[class_name]]
        assert isinstance(balancer, LoadBalancer)
        return [member.state for member in balancer.listeners[0].members], [
            note.code for note in balancer.notes
        ]

    assert states_and_notes(DIRECT.name) == (["active", "down"], [NODE_NOT_ANSWERING])
    assert states_and_notes(PROXY.name) == (["active", "active"], [])
    asked = render({key: each for key, each in found.items() if isinstance(each, LoadBalancer)})
    assert {key: {target.routed for target in probes.targets} for key, probes in asked.items()} == {
        keys[DIRECT.name]: {False},
        keys[PROXY.name]: {True},
    }
    assert state.probed() == {
        address(NODES[0]): {"route": "up"},
        address(NODES[1]): {"ipip": "down", "route": "up"},
    }


def test_the_plan_of_a_gateway_that_announces_names_the_owners_of_addresses() -> None:
    announcing = msgspec.structs.replace(CONFIG, announce=AnnounceConfig(L2Config()))
    state = State(())
    key = ServiceKey("default", "a")
    spec = ServiceSpec(
        type="LoadBalancer", ports=(ServicePort(80, "web"),), load_balancer_class=DIRECT.name
    )
    status = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress("203.0.113.1"),)))
    state.update_services({ObjectKey(*key): Service(ServiceMeta("a", "default"), spec, status)})
    planned, silent = PlanCache(state, announcing), PlanCache(state, CONFIG)

    def owners() -> list[str]:
        found = planned.confirmed([key])[key]
        assert isinstance(found, LoadBalancer)
        return [each.owner for each in found.announcements]

    assert owners() == [], "the gateways are not known yet"
    for name in ("gw1", "gw2"):
        links = {name: (OnLink("eth0", "203.0.113.0/24"),)}
        with state.subscribers.subscription() as dirty:
            state.update_announcers(Gateways(frozenset(links), announcers=links))
            assert key in dirty
        assert owners() == [name]
    both = dict.fromkeys(("gw1", "gw2"), (OnLink("eth0", "203.0.113.0/24"),))
    state.update_announcers(Gateways(frozenset(both), announcers=both))
    (first,) = owners()
    with state.subscribers.subscription() as dirty:
        state.observe_silent(frozenset([(first, "eth0")]))
        assert key in dirty
    assert {*owners(), first} == {*both}, "its heir has taken over"
    state.observe_silent(frozenset())
    assert owners() == [first]
    other = ServiceKey("default", "b")
    sharing = Service(ServiceMeta("b", "default"), spec, status)
    state.update_services({ObjectKey(*other): sharing})
    owned: dict[str, list[str]] = {}
    for refusing in ("gw1", "gw2"):
        with state.subscribers.subscription() as dirty:
            refusals = {other: {refusing: "no room"}}
            state.update_announcers(Gateways(frozenset(both), refusals, announcers=both))
            assert {key, other} <= dirty._keys, "all Services at the address move together"
        owned[refusing] = owners()
    assert owned == {"gw1": ["gw2"], "gw2": ["gw1"]}
    assert planned.announced_although_refused() == {}
    invalid = msgspec.structs.replace(spec, load_balancer_source_ranges=("nonsense",))
    for wrong in (True, False):
        changed = Service(ServiceMeta("a", "default"), invalid if wrong else spec, status)
        state.update_services({ObjectKey(*key): changed})
        assert isinstance(planned.confirmed([key])[key], Refused) == wrong
        planned.mark([key])
        kept = planned.announced_although_refused()
        assert [each.owner for each in kept.get(key, ())] == (["gw1"] if wrong else [])
        shown = {each.ip for each in status.load_balancer.ingress}
        assert planned.shown_although_refused() == (shown if wrong else set())
    assert silent.confirmed([key])[key] == planned.unconfirmed([key])[key]
    assert planned.unconfirmed([key])[key] is planned.unconfirmed([key])[key], "it stays cached"
