"""The requests by which another system gives Services the addresses that they have."""

from typing import Any

import msgspec
import pytest

from fairlead.kube.objects import Service
from fairlead.plan.handback import Next, requests


def served(*addresses: str, by: str = "direct", **fields: Any) -> Service:
    annotations = {"fairlead.io/class": f"fairlead.io/{by}"} | fields.pop("annotations", {})
    body = {
        "metadata": {"name": "web", "namespace": "shop", "annotations": annotations},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]} | fields,
        "status": {"loadBalancer": {"ingress": [{"ip": each} for each in addresses]}},
    }
    return msgspec.convert(body, Service)


BOTH = ("203.0.113.7", "2001:db8::7")
NEW, OLD = "metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs"


@pytest.mark.parametrize(
    ("service", "to", "annotations", "in_spec"),
    [
        (served("203.0.113.7"), "metallb", {NEW: "203.0.113.7"}, ""),
        (served(*BOTH), "metallb", {NEW: "203.0.113.7,2001:db8::7"}, ""),
        (served(*BOTH), "kube-vip", {"kube-vip.io/loadbalancerIPs": ",".join(BOTH)}, ""),
        (served(*BOTH), "cilium", {"lbipam.cilium.io/ips": ",".join(BOTH)}, ""),
        (served("203.0.113.7"), "openstack", {}, "203.0.113.7"),
        # The addresses are requested already, or others are.
        (served(*BOTH, annotations={OLD: "2001:db8::7, 203.0.113.7"}), "metallb", {}, ""),
        (
            served("203.0.113.7", annotations={OLD: "203.0.113.8"}),
            "metallb",
            {OLD: "203.0.113.7"},
            "",
        ),
        (served("203.0.113.7", loadBalancerIP="203.0.113.7"), "metallb", {}, ""),
        (served("203.0.113.7", loadBalancerIP="203.0.113.8"), "metallb", {}, "203.0.113.7"),
        (served("203.0.113.7", loadBalancerIP="203.0.113.7"), "openstack", {}, ""),
        # A Service that an older MetalLB served, which knows only the older prefix.
        (
            served(
                "203.0.113.7", annotations={"metallb.universe.tf/ip-allocated-from-pool": "main"}
            ),
            "metallb",
            {OLD: "203.0.113.7"},
            "",
        ),
        (
            served("203.0.113.7", annotations={"fairlead.io/sharing-key": "dns"}),
            "metallb",
            {NEW: "203.0.113.7", "metallb.io/allow-shared-ip": "dns"},
            "",
        ),
        (
            served("203.0.113.7", annotations={"metallb.universe.tf/allow-shared-ip": "dns"}),
            "cilium",
            {"lbipam.cilium.io/ips": "203.0.113.7", "lbipam.cilium.io/sharing-key": "dns"},
            "",
        ),
    ],
)
def test_a_service_requests_its_addresses_from_the_next_system(
    service: Service, to: Next, annotations: dict[str, str], in_spec: str
) -> None:
    bodies, remarks = requests([service], to)
    assert remarks == []
    if not annotations and not in_spec:
        assert bodies == []
        return
    [body] = bodies
    assert (body["apiVersion"], body["kind"]) == ("v1", "Service")
    metadata = {"name": "web", "namespace": "shop"}
    assert body["metadata"] == metadata | ({"annotations": annotations} if annotations else {})
    assert body.get("spec", {}) == ({"loadBalancerIP": in_spec} if in_spec else {})


def test_services_that_nobody_takes_back_need_no_request() -> None:
    for service in (
        served("203.0.113.7", annotations={"fairlead.io/class": ""}),
        served(),
        served("203.0.113.7", type="NodePort"),
    ):
        assert requests([service], "metallb") == ([], [])


@pytest.mark.parametrize(
    ("service", "to", "words"),
    [
        (
            served("203.0.113.7", loadBalancerClass="fairlead.io/direct"),
            "metallb",
            "Service shop/web names class fairlead.io/direct and stays with Fairlead",
        ),
        (served("203.0.113.7", by="octavia"), "openstack", "stop Fairlead's controller first"),
        (
            served(*BOTH, loadBalancerIP="203.0.113.7"),
            "metallb",
            "kubectl patch service -n shop web --type=merge -p "
            """'{"spec":{"loadBalancerIP":null}}'""",
        ),
        (
            served("203.0.113.7", clusterIPs=["10.96.0.7", "2001:db8:96::7"]),
            "metallb",
            "set spec.ipFamilyPolicy to SingleStack",
        ),
        (served(*BOTH), "openstack", "openstack is not asked for 2001:db8::7"),
    ],
)
def test_a_service_that_needs_something_else_is_named(
    service: Service, to: Next, words: str
) -> None:
    _, [remark] = requests([service], to)
    assert words in remark
