"""Which of several Services gets a port of an address. All processes use one rule."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.makers import plan_gateway

from fairlead.config import Config, PoolConfig
from fairlead.kube.objects import (
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectKey,
    PortStatus,
    Service,
    ServiceMeta,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
)
from fairlead.model import LoadBalancer, ServiceKey
from fairlead.plan.addresses import AddressRequest, Assigned, Facts, HeldAddress
from fairlead.plan.conflicts import Basis, Precedence, first, precedence_of, rivals_of
from fairlead.plan.ledger import Ledger
from fairlead.plan.pools import read_pools
from fairlead.state import State

ADDRESS = "203.0.113.1"
POOL = PoolConfig("main", (ADDRESS,))
A, B, C = (ServiceKey("default", name) for name in "abc")


def service(
    name: str, since: str, *, ports: tuple[int, ...] = (80,), shown: tuple[int, ...] = ()
) -> Service:
    """Return a Service of class direct whose status shows the ports `shown` at ADDRESS, or no
    address if there are none."""
    statuses = tuple(PortStatus(port) for port in shown)
    ingress = (LoadBalancerIngress(ADDRESS, ports=statuses),) if shown else ()
    return Service(
        ServiceMeta(
            name=name, namespace="default", uid=f"uid-{name}", creation_timestamp=since or None
        ),
        ServiceSpec(
            type="LoadBalancer",
            load_balancer_class="fairlead.io/direct",
            cluster_ips=("10.96.0.1",),
            ports=tuple(ServicePort(port, f"port-{port}") for port in ports),
        ),
        ServiceStatus(LoadBalancerStatus(ingress)),
    )


@given(
    st.lists(
        st.builds(
            Precedence, st.sampled_from(Basis), st.sampled_from("123"), st.sampled_from([A, B])
        ),
        min_size=1,
    ),
    st.randoms(),
)
def test_the_service_that_comes_first_does_not_depend_on_the_order(
    among: list[Precedence], random: object
) -> None:
    best = first(among)
    random.shuffle(among)  # type: ignore[attr-defined]
    assert first(among) == best


def test_a_grant_precedes_the_older_service_and_the_older_service_precedes_the_order_of_names() -> (
    None
):
    granted, shown = Precedence(Basis.GRANTED, "3", C), Precedence(Basis.SHOWN, "2", A)
    assert first([shown, granted]) == C
    assert first([shown, Precedence(Basis.SHOWN, "1", B)]) == B
    assert first([shown, Precedence(Basis.SHOWN, "2", B)]) == A
    assert rivals_of(granted, [shown]) == []
    assert rivals_of(shown, [granted]) == [C]


def test_a_request_alone_does_not_take_a_port_from_another_service() -> None:
    assert (
        rivals_of(Precedence(Basis.REQUESTED, "2", A), [Precedence(Basis.REQUESTED, "1", B)]) == []
    )


def test_an_older_service_that_adds_a_port_takes_it_from_no_service_that_shows_it() -> None:
    """A node sees the edit before the controller has marked the port as failed."""
    younger = service("a", "2", ports=(443,), shown=(443,))
    older = service("b", "1", ports=(80, 443), shown=(80,))
    among = [precedence_of(each.key, each, ADDRESS, "TCP/443") for each in (younger, older)]
    assert first(among) == A
    assert precedence_of(B, older, ADDRESS, "TCP/80").basis is Basis.SHOWN


def test_an_external_ip_comes_after_a_status_and_a_node_port_counts_as_shown() -> None:
    named = service("a", "1")
    named = Service(
        named.metadata, ServiceSpec(type="ClusterIP", external_ips=("203.0.113.001",)), named.status
    )
    shown = service("b", "2", shown=(80,))
    assert first(precedence_of(each.key, each, ADDRESS, "TCP/80") for each in (named, shown)) == B
    assert precedence_of(B, shown, "192.0.2.1", "TCP/30080").basis is Basis.SHOWN


PORTS = st.sets(st.sampled_from([80, 443, 8080]), min_size=1).map(lambda each: tuple(sorted(each)))


@given(st.fixed_dictionaries({each: st.tuples(st.sampled_from("123"), PORTS) for each in "abc"}))
def test_controller_gateways_and_nodes_agree_if_several_statuses_show_one_port(
    rows: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    services = [
        service(name, since, ports=ports, shown=ports) for name, (since, ports) in rows.items()
    ]
    state = State(())
    state.update_services({ObjectKey(*each.key): each for each in services})
    planned = plan_gateway(state, Config(), state.services)
    ledger = Ledger()
    ledger.use(read_pools([POOL], ()))
    request = {each.key: frozenset(f"TCP/{p.port}" for p in each.spec.ports) for each in services}
    ledger.assign(
        {
            key: Facts(
                AddressRequest(
                    ("IPv4",),
                    since=state.services[key].metadata.creation_timestamp or "",
                    ports=ports,
                    sharing_key="k",
                ),
                {ADDRESS: HeldAddress(shown=ports)},
            )
            for key, ports in request.items()
        }
    )
    for port in (80, 443, 8080):
        wanting = [each for each in services if f"TCP/{port}" in request[each.key]]
        if not wanting:
            continue
        by_node = first(precedence_of(each.key, each, ADDRESS, f"TCP/{port}") for each in wanting)
        by_gateway = [
            key
            for key, each in planned.items()
            if isinstance(each, LoadBalancer) and port in {one.port for one in each.listeners}
        ]
        by_controller = [
            key
            for key in request
            if isinstance(result := ledger.result(key), Assigned)
            and f"TCP/{port}" in result.grants[0].ports
        ]
        assert [by_node] == by_gateway == by_controller


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_a_port_that_is_granted_twice_belongs_to_the_older_service(
    order: tuple[ServiceKey, ServiceKey],
) -> None:
    """Only a manual edit of an AddressGrant leads to this. Two Services never have one port."""
    web = frozenset({"TCP/80"})
    ledger = Ledger()
    ledger.use(read_pools([POOL], ()))
    for key in order:
        since = "2" if key == A else "1"
        request = AddressRequest(("IPv4",), since=since, ports=web, sharing_key="k")
        ledger.assign({key: Facts(request, {ADDRESS: HeldAddress(granted=web, pool="main")})})
    assert isinstance(ledger.result(B), Assigned)
    assert not isinstance(ledger.result(A), Assigned)
