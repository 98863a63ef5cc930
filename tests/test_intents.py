"""The plan of each role over a state: who gets which address, who is claimed, who is let go."""

import msgspec

from fairlead.config import Config, PoolConfig
from fairlead.errors import Refused
from fairlead.intents import Balancers, Publications
from fairlead.kube.objects import (
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectKey,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.model import Publication, ServiceKey
from fairlead.state import State

CONFIG = Config(default_class="fairlead.io/direct", pools=(PoolConfig("main", ("203.0.113.1-203.0.113.2",)),))
A, B, C = (ServiceKey("default", name) for name in "abc")


def service(
    name: str, *, uid: str = "", held: str = "", class_name: str | None = None, going: bool = False, kind: str = "LoadBalancer"
) -> Service:
    meta = ObjectMeta(
        name=name,
        namespace="default",
        uid=uid or f"uid-{name}",
        annotations={"fairlead.io/class": "fairlead.io/direct"} if held or going else {},
        deletion_timestamp="2026-01-01T00:00:00Z" if going else None,
    )
    ingress = (LoadBalancerIngress(held, ip_mode="VIP"),) if held else ()
    spec = ServiceSpec(type=kind, cluster_ips=("10.96.0.1",), ports=(ServicePort(80),), load_balancer_class=class_name)  # type: ignore[arg-type]
    return Service(meta, spec, ServiceStatus(LoadBalancerStatus(ingress)))


def state_of(*services: Service) -> State:
    state = State(())
    put(state, *services)
    return state


def put(state: State, *services: Service) -> None:
    state.update_services({ObjectKey(*each.key): each for each in services})


def address(planned: object) -> str:
    assert isinstance(planned, Publication), planned
    return planned.ingress[0].ip


def test_every_service_is_looked_at_before_any_new_address_is_given() -> None:
    state = state_of(service("a"), service("b", held="203.0.113.1"))
    planned = Publications(state, CONFIG)({A})
    assert address(planned[A]) == "203.0.113.2"


def test_a_grant_that_is_not_shown_yet_is_remembered() -> None:
    state = state_of(service("b"))
    publications = Publications(state, CONFIG)
    assert address(publications({B})[B]) == "203.0.113.1"
    put(state, service("a"))  # comes first by name, and must not take what b was just given
    assert address(publications({A})[A]) == "203.0.113.2"


def test_a_service_made_anew_under_its_name_starts_anew() -> None:
    state = state_of(service("b"))
    publications = Publications(state, CONFIG)
    publications({B})
    put(state, service("a", held="203.0.113.1"), service("b", uid="another"))
    assert address(publications({B})[B]) == "203.0.113.2"


def test_who_waits_for_an_address_gets_it_when_another_goes() -> None:
    state = state_of(service("a", held="203.0.113.1"), service("b", held="203.0.113.2"), service("c"))
    publications = Publications(state, CONFIG)
    assert isinstance(publications({C})[C], Refused)
    put(state, service("a", held="203.0.113.1", going=True))
    assert A not in publications({A}), "it is to be released"
    assert isinstance(publications({C})[C], Refused), "its address is held until it is gone"
    state.update_services({ObjectKey(*A): None})
    assert address(publications({A})[C]) == "203.0.113.1", "a change of one Service touches who waited for it"


def test_other_classes_and_other_types_are_left_alone() -> None:
    state = state_of(service("a", class_name="example.com/other"), service("b", kind="ClusterIP"))
    assert Publications(state, CONFIG)({A, B}) == {}
    assert Publications(state_of(service("a")), msgspec.structs.replace(CONFIG, default_class=None))({A}) == {}


def test_a_gateway_serves_what_has_an_address_and_is_ours() -> None:
    state = state_of(
        service("a", held="203.0.113.1"),
        service("b"),
        service("c", held="203.0.113.2", class_name="example.com/other"),
    )
    planned = Balancers(state, CONFIG)({A, B, C})
    assert set(planned) == {A}
