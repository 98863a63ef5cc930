"""The plan of each role over a state: who gets which address, who is claimed, who is let go."""

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
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.roles.controller import Planner
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
    asks: str = "",
    class_name: str | None = None,
    going: bool = False,
    kind: str = "LoadBalancer",
) -> Service:
    meta = ServiceMeta(
        name=name,
        namespace="default",
        uid=uid or f"uid-{name}",
        annotations=({"fairlead.io/class": "fairlead.io/direct"} if held or going else {})
        | ({"fairlead.io/addresses": asks} if asks else {}),
        deletion_timestamp="2026-01-01T00:00:00Z" if going else None,
        managed_fields=(FieldsManager("fairlead-claim"),) if held or going else (),
    )
    ingress = (LoadBalancerIngress(held, ip_mode="VIP"),) if held else ()
    spec = ServiceSpec(
        type=kind,  # type: ignore[arg-type]
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


def test_every_service_is_looked_at_before_any_new_address_is_given() -> None:
    state = state_of(service("a"), service("b", held="203.0.113.1"))
    planned = Planner(state, CONFIG)({A})
    assert address(planned[A]) == "203.0.113.2"


def test_a_grant_that_is_not_shown_yet_is_remembered() -> None:
    state = state_of(service("b"))
    planner = Planner(state, CONFIG)
    assert address(planner({B})[B]) == "203.0.113.1"
    put(state, service("a"))  # comes first by name, and must not take what b was just given
    assert address(planner({A})[A]) == "203.0.113.2"


def test_a_service_made_anew_under_its_name_starts_anew() -> None:
    state = state_of(service("b"))
    planner = Planner(state, CONFIG)
    planner({B})
    put(state, service("a", held="203.0.113.1"), service("b", uid="another"))
    assert address(planner({A, B})[B]) == "203.0.113.2"


def test_who_waits_for_an_address_gets_it_when_another_goes() -> None:
    state = state_of(
        service("a", held="203.0.113.1"), service("b", held="203.0.113.2"), service("c")
    )
    planner = Planner(state, CONFIG)
    assert isinstance(planner({C})[C], Refused)
    put(state, service("a", held="203.0.113.1", going=True))
    assert A not in planner({A}), "it is to be released"
    assert isinstance(planner({C})[C], Refused), "its address is held until it is gone"
    state.update_services({ObjectKey(*A): None})
    assert address(planner({A})[C]) == "203.0.113.1", (
        "a change of one Service touches who waited for it"
    )


@pytest.mark.parametrize("asks", ["nonsense", "203.0.113.2", "192.0.2.1", "2001:db8::1"])
def test_an_address_is_not_given_away_while_its_service_asks_for_what_cannot_be_had(
    asks: str,
) -> None:
    state = state_of(
        service("a", held="203.0.113.1", asks=asks), service("b", held="203.0.113.2"), service("c")
    )
    planned = Planner(state, CONFIG)({A, B, C})
    assert isinstance(planned[A], Refused)
    assert address(planned[B]) == "203.0.113.2"
    assert isinstance(planned[C], Refused), (
        "a still shows 203.0.113.1, and packets for it are still forwarded to its pods"
    )


def test_an_address_is_held_until_its_service_shows_it_no_more() -> None:
    state = state_of(
        service("a", held="203.0.113.1"),
        service("b", held="203.0.113.2"),
        service("c", class_name="fairlead.io/direct"),
    )
    planner = Planner(state, msgspec.structs.replace(CONFIG, default_class=None))
    planned = planner({A, B, C})
    assert set(planned) == {C}, "the others are to be released"
    assert isinstance(planned[C], Refused)
    put(state, service("a"))
    assert address(planner({A})[C]) == "203.0.113.1"


def test_a_service_that_asks_for_another_address_moves_and_then_gives_the_first_back() -> None:
    state = state_of(service("a", held="203.0.113.1", asks="203.0.113.2"), service("c"))
    planner = Planner(state, CONFIG)
    planned = planner({A, C})
    assert address(planned[A]) == "203.0.113.2"
    assert isinstance(planned[C], Refused)
    put(state, service("a", held="203.0.113.2", asks="203.0.113.2"))
    assert address(planner({A})[C]) == "203.0.113.1"


def test_other_classes_and_other_types_are_left_alone() -> None:
    state = state_of(service("a", class_name="example.com/other"), service("b", kind="ClusterIP"))
    assert Planner(state, CONFIG)({A, B}) == {}
    assert (
        Planner(state_of(service("a")), msgspec.structs.replace(CONFIG, default_class=None))({A})
        == {}
    )


def test_a_gateway_serves_what_has_an_address_and_is_ours() -> None:
    state = state_of(
        service("a", held="203.0.113.1"),
        service("b"),
        service("c", held="203.0.113.2", class_name="example.com/other"),
    )
    planned = plan_gateway(state, CONFIG, {A, B, C})
    assert set(planned) == {A}


def test_of_two_that_show_one_port_the_older_is_served_and_all_gateways_agree() -> None:
    """The controller never lets it come to this."""
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
        assert dirty._keys == {older.key, younger.key}, "who shares an address is concerned"
    planned = plan_gateway(state, CONFIG, state.services)
    alone = planned[younger.key]
    assert isinstance(alone, LoadBalancer)
    assert [listener.port for listener in alone.listeners] == [80, 443]
