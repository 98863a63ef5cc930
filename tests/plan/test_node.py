"""The plan of one Service on one node."""

import msgspec
from tests.makers import make_service, make_slice

from fairlead.kube.objects import (
    EndpointPort,
    LoadBalancerIngress,
    LoadBalancerStatus,
    PortStatus,
    ServicePort,
    ServiceStatus,
)
from fairlead.model import HealthCheck
from fairlead.plan.node import plan_node_service


def test_the_health_check_node_port_counts_a_dual_stack_pod_once() -> None:
    service = make_service(cluster_ips=("10.96.0.10", "2001:db8:96::10"))
    slices = [
        make_slice(
            [
                ("10.0.1.1", "node1", "ready"),
                ("10.0.1.2", "node1", "ready"),
                ("10.0.2.1", "node2", "ready"),
            ]
        ),
        make_slice([("2001:db8::1", "node1", "ready")], name="web-2", family="IPv6"),
    ]
    planned = plan_node_service(service, slices, "node1")
    assert planned is not None
    assert planned.health_check == HealthCheck(32000, 2, ("10.0.1.1", "10.0.1.2", "2001:db8::1"))


def test_a_node_does_not_serve_a_port_whose_published_status_is_an_error() -> None:
    """The same port number of the other protocol is served."""
    service = make_service(
        ports=(ServicePort(53, name="tcp"), ServicePort(53, name="udp", protocol="UDP"))
    )
    failed = PortStatus(53, "TCP", error="example.com/Taken")
    ingress = LoadBalancerIngress(ip="203.0.113.10", ports=(failed, PortStatus(53, "UDP")))
    service = msgspec.structs.replace(service, status=ServiceStatus(LoadBalancerStatus((ingress,))))
    slice_ = make_slice([("10.0.1.1", "node1", "ready")])
    slice_ = msgspec.structs.replace(
        slice_, ports=(EndpointPort("tcp", 53, "TCP"), EndpointPort("udp", 53, "UDP"))
    )
    planned = plan_node_service(service, [slice_], "node1")
    assert planned is not None
    assert {each.protocol: each.load_balancer_ips for each in planned.ports} == {
        "TCP": (),
        "UDP": ("203.0.113.10",),
    }


def test_a_node_does_not_answer_for_an_address_with_ip_mode_proxy() -> None:
    """KEP-1860: packets to the address must pass the load balancer, also packets from pods."""
    ingress = (
        LoadBalancerIngress(ip="203.0.113.10", ip_mode="Proxy"),
        LoadBalancerIngress(ip="203.0.113.11", ip_mode="VIP"),
        LoadBalancerIngress(ip="203.0.113.12"),
    )
    service = msgspec.structs.replace(
        make_service(), status=ServiceStatus(LoadBalancerStatus(ingress))
    )
    slices = [make_slice([("10.0.1.1", "node1", "ready")])]
    planned = plan_node_service(service, slices, "node1")
    assert planned is not None
    assert planned.ports[0].load_balancer_ips == ("203.0.113.11", "203.0.113.12")
