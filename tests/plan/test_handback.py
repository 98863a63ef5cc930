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


def test_a_service_that_is_younger_than_an_old_metallb_requests_by_the_prefix_that_it_knows() -> (
    None
):
    old = served(
        "203.0.113.6",
        annotations={"metallb.universe.tf/ip-allocated-from-pool": "main", OLD: "203.0.113.6"},
    )
    [body], _ = requests(
        [msgspec.structs.replace(old, metadata=named(old, "a")), served(*BOTH)], "metallb"
    )
    assert body["metadata"]["annotations"] == {OLD: ",".join(BOTH)}


def named(service: Service, name: str) -> Any:
    return msgspec.structs.replace(service.metadata, name=name)


POOL = {
    "apiVersion": "metallb.io/v1beta1",
    "kind": "IPAddressPool",
    "metadata": {"name": "main"},
    "spec": {"addresses": ["203.0.113.0/29", "bad"]},
}


def test_an_address_that_metallb_does_not_have_is_named() -> None:
    _, remarks = requests([served("203.0.113.7")], "metallb", [POOL])
    assert remarks == []
    bodies, [remark] = requests([served("203.0.113.9")], "metallb", [POOL])
    assert "203.0.113.9 is in no pool of MetalLB, which would refuse the request" in remark
    assert len(bodies) == 1
    assert requests([served("203.0.113.9")], "kube-vip", [POOL])[1] == []
    requests([served("127.0.0.1")], "metallb", [POOL])


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({}, {}, True),
        ({"selector": {"app": "a"}}, {"selector": {"app": "b"}}, True),
        (
            {"externalTrafficPolicy": "Local", "selector": {"app": "a"}},
            {"externalTrafficPolicy": "Local", "selector": {"app": "a"}},
            True,
        ),
        (
            {"externalTrafficPolicy": "Local", "selector": {"app": "a"}},
            {"externalTrafficPolicy": "Local", "selector": {"app": "b"}},
            False,
        ),
        (
            {"externalTrafficPolicy": "Local", "selector": {"app": "a"}},
            {"selector": {"app": "a"}},
            False,
        ),
    ],
)
def test_services_whose_address_metallb_does_not_share_are_named(
    one: dict[str, Any], other: dict[str, Any], shared: bool
) -> None:
    key = {"fairlead.io/sharing-key": "dns"}
    first = served("203.0.113.7", annotations=key, **one)
    second = served("203.0.113.7", annotations=key, **other)
    second = msgspec.structs.replace(second, metadata=named(second, "z"))
    _, remarks = requests([first, second], "metallb")
    assert bool(remarks) is not shared
    if not shared:
        assert (
            "Services shop/web and shop/z have 203.0.113.7, which MetalLB gives to both"
            in remarks[0]
        )
