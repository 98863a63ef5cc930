"""An object of one user, whatever it contains, delays the plans of others only for a moment."""

import subprocess
import sys

import msgspec
import pytest
from tests.makers import make_service, make_slice
from tests.plan import hostile

from fairlead.errors import Refused
from fairlead.kube.objects import (
    EndpointSlice,
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectKey,
    Service,
    ServicePort,
    ServiceStatus,
)
from fairlead.plan.annotations import MAX_VALUE_LENGTH
from fairlead.plan.balancer import plan_load_balancer
from fairlead.plan.classes import CLASSES, DIRECT
from fairlead.plan.node import plan_node_service
from fairlead.plan.service import MAX_SOURCE_RANGES
from fairlead.roles.node import is_large
from fairlead.state import State

READY = [("10.0.1.1", "node1", "ready")]


@pytest.mark.long
def test_the_time_of_a_plan_is_bounded_at_the_limits_of_the_api_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", hostile.__name__], capture_output=True, text=True, check=False
    )
    planned = done.stdout.splitlines()
    assert done.returncode == 0, f"{planned[-1]}: {done.stderr}"
    assert len(planned) > len(CLASSES) * len(hostile.NAMES) * len(hostile.TEXTS)


def ports(count: int) -> tuple[ServicePort, ...]:
    return tuple(ServicePort(1 + i, f"p{i}", node_port=30000 + i) for i in range(count))


def slices(count: int, named: int) -> list[EndpointSlice]:
    """Return slices of 100 endpoints, with this number of ports."""
    rows = [(f"10.0.1.{i}", "node1", "ready") for i in range(100)]
    names = [(f"p{i}", 8000 + i) for i in range(named)]
    return [make_slice(rows, name=f"web-{i}", ports=names) for i in range(count)]


@pytest.mark.parametrize(
    ("service", "found", "why"),
    [
        (
            make_service(annotations={"fairlead.io/drain-timeout": "9" * 60_000 + "x"}),
            [],
            "fairlead.io/drain-timeout has 60,001 characters",
        ),
        (
            make_service(annotations={"metallb.io/allow-shared-ip": "x" * 2000}),
            [],
            "metallb.io/allow-shared-ip has 2,000 characters",
        ),
        (make_service(ports=ports(5000)), [], "5,000 ports, and its EndpointSlices have 0"),
        (
            make_service(ports=ports(100)),
            slices(60, 100),
            "100 ports, and its EndpointSlices have 6,000 endpoints with 6,000 ports",
        ),
        (
            make_service(load_balancer_source_ranges=("10.0.0.0/8",) * (MAX_SOURCE_RANGES + 1)),
            [],
            "10,001 source ranges",
        ),
        (
            make_service(
                annotations={"service.beta.kubernetes.io/load-balancer-source-ranges": "," * 20_000}
            ),
            [],
            "20,001 source ranges",
        ),
    ],
    ids=["value", "value of MetalLB", "ports", "endpoints", "ranges", "ranges of the annotation"],
)
def test_a_service_that_is_too_big_is_refused_with_the_part_that_is(
    service: Service, found: list[EndpointSlice], why: str
) -> None:
    with pytest.raises(Refused, match=why):
        plan_load_balancer(service, found, {}, ["203.0.113.10"], DIRECT)


def test_the_annotations_of_others_may_be_long() -> None:
    service = make_service(annotations={"example.com/anything": "x" * 100_000})
    assert plan_load_balancer(service, [make_slice(READY)], {}, ["203.0.113.10"], DIRECT)


def test_a_load_balancer_with_a_thousand_ports_and_250_endpoints_is_planned() -> None:
    service = make_service(ports=ports(1000))
    rows = [(f"10.0.1.{i}", "node1", "ready") for i in range(250)]
    names = [(f"p{i}", 8000 + i) for i in range(1000)]
    found = [make_slice(rows[at : at + 100], name=f"s{at}", ports=names) for at in (0, 100, 200)]
    planned = plan_load_balancer(service, found, {}, ["203.0.113.10"], DIRECT)
    assert len(planned.listeners) == 1000


def test_a_node_serves_a_service_with_a_thousand_ports_and_endpoints() -> None:
    assert plan_node_service(make_service(ports=ports(1000)), slices(10, 1000), "node1")
    with pytest.raises(Refused, match="combinations"):
        plan_node_service(make_service(ports=ports(1000)), slices(30, 1000), "node1")


@pytest.mark.parametrize(
    ("count", "ips", "ranges", "found", "why"),
    [
        (100, 250, 0, slices(1, 1), "100 ports and 251 external IPs"),
        (10, 1900, 0, slices(2, 1), "1,901 external IPs .* 200 endpoints"),
        (1000, 0, 2000, slices(1, 1), "1,000 ports.* 2,000 source ranges"),
    ],
    ids=["addresses", "endpoints of addresses", "ranges of addresses"],
)
def test_a_node_refuses_a_service_with_too_many_elements(
    count: int, ips: int, ranges: int, found: list[EndpointSlice], why: str
) -> None:
    def planned(count: int) -> object:
        service = make_service(
            ports=ports(count),
            external_ips=("192.0.2.1",) * ips,
            load_balancer_source_ranges=("198.51.100.0/24",) * ranges,
        )
        shown = ServiceStatus(LoadBalancerStatus((LoadBalancerIngress("203.0.113.10"),)))
        service = msgspec.structs.replace(service, status=shown)
        state = State(())
        state.update_services({ObjectKey(*service.key): service})
        state.update_slices({ObjectKey("default", each.metadata.name): each for each in found})
        assert is_large(state, service.key), "other Services do not wait for it"
        return plan_node_service(service, found, "node1")

    assert planned(count // 2)
    with pytest.raises(Refused, match=why):
        planned(count)


def test_a_value_of_the_longest_length_is_read() -> None:
    text = "1h" * (MAX_VALUE_LENGTH // 2)
    service = make_service(annotations={"fairlead.io/drain-timeout": text})
    planned = plan_load_balancer(service, [], {}, ["203.0.113.10"], DIRECT)
    assert msgspec.to_builtins(planned.settings)["drain_timeout_s"] == 3600 * len(text) / 2


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "h", "1h5", "h", "1.h", "5 m", "-5m"])
def test_a_text_that_is_not_a_duration_is_refused(text: str) -> None:
    service = make_service(annotations={"fairlead.io/drain-timeout": text})
    with pytest.raises(Refused, match=r"drain-timeout is "):
        plan_load_balancer(service, [], {}, ["203.0.113.10"], DIRECT)
