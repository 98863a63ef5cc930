"""The plan of each role for a state: which address each Service gets, and which Services are
claimed, released or not planned at all."""

from collections.abc import Callable
from itertools import product

import msgspec
import pytest
from tests.makers import plan_gateway

from fairlead.config import Config, PoolConfig
from fairlead.errors import Refused
from fairlead.kube.objects import (
    FieldsManager,
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectKey,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.kube.presence import Claimed, OnLink
from fairlead.model import Finding, LoadBalancer, ServiceKey
from fairlead.plan.announce import announcers_of, owner_of
from fairlead.plan.direct import DIRECT
from fairlead.plan.gateways import Gateways, gateway_notes
from fairlead.plan.proxying import PROXY
from fairlead.roles.controller import Planner
from fairlead.sections import AnnounceConfig, L2Config
from fairlead.state import State

CONFIG = Config(
    default_class="fairlead.io/direct", pools=(PoolConfig("main", ("203.0.113.1-203.0.113.2",)),)
)
A, B, C = (ServiceKey("default", name) for name in "abc")


def service(
    name: str,
    *,
    uid: str = "",
    held: str = "",
    requested: str = "",
    class_name: str | None = None,
    deleted: bool = False,
    type_: str = "LoadBalancer",
) -> Service:
    """Return a Service. `held`: the address in its status. A Service that has an address or is in
    deletion is claimed. `requested`: the address that its annotation requests. `deleted`: whether
    it is in deletion."""
    meta = ServiceMeta(
        name=name,
        namespace="default",
        uid=uid or f"uid-{name}",
        annotations=({"fairlead.io/class": "fairlead.io/direct"} if held or deleted else {})
        | ({"fairlead.io/addresses": requested} if requested else {}),
        deletion_timestamp="2026-01-01T00:00:00Z" if deleted else None,
        managed_fields=(FieldsManager("fairlead-claim"),) if held or deleted else (),
    )
    ingress = (LoadBalancerIngress(held, ip_mode="VIP"),) if held else ()
    spec = ServiceSpec(
        type=type_,  # type: ignore[arg-type]
        cluster_ips=("10.96.0.1",),
        ports=(ServicePort(80),),
        load_balancer_class=class_name,
    )
    return Service(meta, spec, ServiceStatus(LoadBalancerStatus(ingress)))


def state_of(*services: Service) -> State:
    state = State(())
    put(state, *services)
    return state


def put(state: State, *services: Service) -> None:
    state.update_services({ObjectKey(*each.key): each for each in services})


def address(planned: object) -> str:
    assert isinstance(planned, LoadBalancer), planned
    return planned.addresses[0]


def test_an_address_in_the_status_of_a_clean_service_is_not_given_to_another_service() -> None:
    state = state_of(service("a"), service("b", held="203.0.113.1"))
    planned = Planner(state, CONFIG)({A})
    assert address(planned[A]) == "203.0.113.2"


def test_an_address_that_another_controller_serves_is_not_given_to_a_service() -> None:
    """During a migration: the pool of MetalLB is an AddressPool already."""
    theirs = service("b", held="203.0.113.1", class_name="metallb.io/metallb")
    unclaimed = msgspec.structs.replace(theirs.metadata, annotations={}, managed_fields=())
    state = state_of(msgspec.structs.replace(theirs, metadata=unclaimed), service("a"))
    planner = Planner(state, CONFIG)
    assert address(planner({A})[A]) == "203.0.113.2"
    put(state, service("b", class_name="metallb.io/metallb"), service("c"))
    assert address(planner({B, C})[C]) == "203.0.113.1", "the other controller has released it"


def test_an_assigned_address_is_not_given_to_another_service_before_it_is_published() -> None:
    state = state_of(service("b"))
    planner = Planner(state, CONFIG)
    assert address(planner({B})[B]) == "203.0.113.1"
    put(state, service("a"))  # precedes b by name, but the address of b is assigned
    assert address(planner({A})[A]) == "203.0.113.2"


def test_a_service_that_is_recreated_with_its_name_does_not_inherit_the_assigned_address() -> None:
    state = state_of(service("b"))
    planner = Planner(state, CONFIG)
    planner({B})
    put(state, service("a", held="203.0.113.1"), service("b", uid="another"))
    assert address(planner({A, B})[B]) == "203.0.113.2"


def test_a_waiting_service_gets_the_address_of_a_service_that_is_deleted() -> None:
    state = state_of(
        service("a", held="203.0.113.1"), service("b", held="203.0.113.2"), service("c")
    )
    planner = Planner(state, CONFIG)
    assert isinstance(planner({C})[C], Refused)
    put(state, service("a", held="203.0.113.1", deleted=True))
    assert A not in planner({A}), "a Service in deletion is released, not planned"
    assert isinstance(planner({C})[C], Refused), "the address is held until its Service is gone"
    state.update_services({ObjectKey(*A): None})
    assert address(planner({A})[C]) == "203.0.113.1", (
        "the plan of one Service includes the Services that waited for its address"
    )


@pytest.mark.parametrize("requested", ["203.0.113.2", "192.0.2.1", "2001:db8::1"])
def test_a_service_keeps_its_address_while_it_requests_an_address_that_it_cannot_get(
    requested: str,
) -> None:
    state = state_of(
        service("a", held="203.0.113.1", requested=requested),
        service("b", held="203.0.113.2"),
        service("c"),
    )
    planned = Planner(state, CONFIG)({A, B, C})
    assert isinstance(planned[A], Refused)
    assert address(planned[B]) == "203.0.113.2"
    assert isinstance(planned[C], Refused), (
        "Service a still shows 203.0.113.1, and gateways still forward packets for it to its pods"
    )


def test_an_address_is_given_to_another_service_only_after_its_service_no_longer_shows_it() -> None:
    state = state_of(
        service("a", held="203.0.113.1"),
        service("b", held="203.0.113.2"),
        service("c", class_name="fairlead.io/direct"),
    )
    planner = Planner(state, msgspec.structs.replace(CONFIG, default_class=None))
    planned = planner({A, B, C})
    assert set(planned) == {C}, "the other Services are released"
    assert isinstance(planned[C], Refused)
    put(state, service("a"))
    assert address(planner({A})[C]) == "203.0.113.1"


def test_a_service_that_requests_another_address_releases_its_first_address_after_the_change() -> (
    None
):
    state = state_of(service("a", held="203.0.113.1", requested="203.0.113.2"), service("c"))
    planner = Planner(state, CONFIG)
    planned = planner({A, C})
    assert address(planned[A]) == "203.0.113.2"
    assert isinstance(planned[C], Refused)
    put(state, service("a", held="203.0.113.2", requested="203.0.113.2"))
    assert address(planner({A})[C]) == "203.0.113.1"


def test_services_of_other_classes_and_types_are_not_planned() -> None:
    state = state_of(service("a", class_name="example.com/other"), service("b", type_="ClusterIP"))
    assert Planner(state, CONFIG)({A, B}) == {}
    assert (
        Planner(state_of(service("a")), msgspec.structs.replace(CONFIG, default_class=None))({A})
        == {}
    )


def test_a_gateway_serves_only_services_of_its_classes_that_have_an_address() -> None:
    state = state_of(
        service("a", held="203.0.113.1"),
        service("b"),
        service("c", held="203.0.113.2", class_name="example.com/other"),
    )
    planned = plan_gateway(state, CONFIG, {A, B, C})
    assert set(planned) == {A}


def test_if_two_services_show_one_port_gateways_serve_the_port_of_the_older_service() -> None:
    """The controller never publishes one port of an address for two Services."""
    older, younger = service("z", held="203.0.113.1"), service("a", held="203.0.113.1")
    younger = msgspec.structs.replace(
        younger,
        metadata=msgspec.structs.replace(
            younger.metadata, creation_timestamp="2026-01-02T00:00:00Z"
        ),
        spec=msgspec.structs.replace(
            younger.spec, ports=(ServicePort(80, "web"), ServicePort(443, "tls"))
        ),
    )
    older = msgspec.structs.replace(
        older,
        metadata=msgspec.structs.replace(older.metadata, creation_timestamp="2026-01-01T00:00:00Z"),
    )
    state = state_of(younger, older)
    planned = plan_gateway(state, CONFIG, state.services)
    first, second = planned[older.key], planned[younger.key]
    assert isinstance(first, LoadBalancer)
    assert isinstance(second, LoadBalancer)
    assert [listener.port for listener in first.listeners] == [80]
    assert [listener.port for listener in second.listeners] == [443]
    assert [note.code for note in second.notes] == ["PortConflict"]
    with state.subscribers.subscription() as dirty:
        state.update_services({ObjectKey(*older.key): None})
        assert dirty._keys == {older.key, younger.key}, (
            "a Service that shares the address becomes dirty, too"
        )
    planned = plan_gateway(state, CONFIG, state.services)
    alone = planned[younger.key]
    assert isinstance(alone, LoadBalancer)
    assert [listener.port for listener in alone.listeners] == [80, 443]


def gateways_of(key: ServiceKey, *states: str) -> Gateways:
    """Return gateways gw0, gw1, ... in these states. One that refuses refuses this Service."""
    named = [(f"gw{number}", state) for number, state in enumerate(states)]
    refusals = {name: "no room" for name, state in named if state == "refuses"}
    return Gateways(
        frozenset(name for name, state in named if state not in ("absent", "gone")),
        {key: refusals} if refusals else {},
        {name: "it is down" for name, state in named if state in ("down", "half down")},
        frozenset(name for name, state in named if state == "gone"),
        problem_classes={name: PROXY for name, state in named if state == "half down"},
    )


def test_a_service_is_dirty_when_its_findings_about_gateways_change() -> None:
    state = state_of(service("a"))
    values = [
        gateways_of(A, *states)
        for states in product(
            ("absent", "gone", "serves", "refuses", "down", "half down"), repeat=2
        )
    ]

    def notes(gateways: Gateways) -> list[tuple[Finding, ...]]:
        return [gateway_notes(gateways, A, name) for name in (DIRECT, PROXY)]

    for before, after in product(values, repeat=2):
        state.update_gateways(before)
        with state.subscribers.subscription() as dirty:
            state.update_gateways(after)
            if notes(before) != notes(after):
                assert A in dirty, (before, after)
            if before == after:
                assert A not in dirty


def test_only_services_whose_address_has_another_owner_or_heir_are_dirty_when_a_gateway_comes() -> (
    None
):
    services = [service(name, held=f"192.0.2.{number}") for number, name in enumerate("abcdefgh")]
    state = state_of(*services)
    names = ("gw1", "gw2", "gw3", "gw4")
    links = {name: (OnLink("eth0", "192.0.2.0/24"),) for name in names}
    three = {name: links[name] for name in names[:3]}
    before, after = (Gateways(frozenset(each), announcers=each) for each in (three, links))
    moving = {
        each.key
        for number, each in enumerate(services)
        if (found := owner_of(f"192.0.2.{number}", announcers_of(after, {})))
        and "gw4" in (found.owner, found.heir)
    }
    assert 0 < len(moving) < len(services)

    def dirty_after(update: Callable[[Gateways], None], value: Gateways) -> set[ServiceKey]:
        with (
            state.subscribers.subscription() as dirty,
            state.objects_only.subscribers.subscription() as of_objects,
        ):
            update(value)
            assert not of_objects._keys, "which nodes are probed does not depend on it"
            return dirty._keys

    assert dirty_after(state.update_announcers, before) == {each.key for each in services}
    for update in (state.update_announcers, state.update_gateways):
        assert dirty_after(update, before) == set()
        assert dirty_after(update, after) == moving
        assert dirty_after(update, before) == moving


def test_the_controller_reports_addresses_that_nobody_announces_only_if_gateways_announce() -> None:
    announcing = msgspec.structs.replace(CONFIG, announce=AnnounceConfig(L2Config()))
    state = state_of(service("a", held="203.0.113.1"))

    def codes(config: Config) -> list[str]:
        planned = Planner(state, config)([A])[A]
        assert isinstance(planned, LoadBalancer)
        return [each.code for each in planned.notes]

    before = codes(CONFIG)
    assert codes(announcing) == before, "the gateways are not known yet"
    links = {"gw1": (OnLink("eth0", "192.0.2.0/24"),)}
    state.update_gateways(Gateways(frozenset(links), announcers=links))
    assert codes(CONFIG) == before
    assert codes(announcing) == ["AddressNotOnSegment", *before]
    links = {"gw1": (OnLink("eth0", "203.0.113.0/24"),)}
    served = Gateways(frozenset(links), announcers=links)
    state.update_gateways(served)
    assert codes(announcing) == before
    claims = {"203.0.113.1": ("gw1", Claimed("203.0.113.1", "eth0", "02:00:00:00:00:99"))}
    for claimed, more in ((claims, ["AddressConflict"]), ({}, [])):
        with state.subscribers.subscription() as dirty:
            state.update_gateways(msgspec.structs.replace(served, claimed=claimed))
            assert dirty._keys == {A}
        assert codes(announcing) == [*more, *before]
        assert codes(CONFIG) == [*more, *before]
