"""Which controller serves a Service, by what each controller writes on it."""

from typing import Any

import pytest
from tests.doctor.clusters import make_service

from fairlead.doctor.objects import FieldsOwner
from fairlead.doctor.owners import Owner, owner_of
from fairlead.kube.objects import CLEANUP_FINALIZER, Condition


def status_of(manager: str) -> dict[str, Any]:
    return {"managed_fields": (FieldsOwner(manager, subresource="status"),)}


def finalizer_by(manager: str) -> dict[str, Any]:
    """Return the metadata that a controller with the cloud-provider library writes first."""
    fields: dict[str, Any] = {
        "f:metadata": {"f:finalizers": {".": {}, f'v:"{CLEANUP_FINALIZER}"': {}}}
    }
    writer = FieldsOwner(manager, fields_v1=fields)
    return {"finalizers": (CLEANUP_FINALIZER,), "managed_fields": (writer,)}


MARKS: dict[str, tuple[Owner, dict[str, Any]]] = {
    "annotation of MetalLB": (
        "MetalLB",
        {"meta": {"annotations": {"metallb.io/ip-allocated-from-pool": "lan"}}},
    ),
    "annotation of an older MetalLB": (
        "MetalLB",
        {"meta": {"annotations": {"metallb.universe.tf/ip-allocated-from-pool": "lan"}}},
    ),
    "annotation of OpenStack's controller": (
        "OpenStack cloud controller",
        {
            "meta": {
                "annotations": {"loadbalancer.openstack.org/load-balancer-id": "1"},
                "finalizers": (CLEANUP_FINALIZER,),
            }
        },
    ),
    "manager of OpenStack's controller": (
        "OpenStack cloud controller",
        {"meta": status_of("openstack-cloud-controller-manager")},
    ),
    "annotation of kube-vip": ("kube-vip", {"meta": {"annotations": {"kube-vip.io/vipHost": "n"}}}),
    "condition of Cilium": (
        "Cilium",
        {"conditions": (Condition("cilium.io/IPAMRequestSatisfied", "True"),)},
    ),
    "manager of Cilium": ("Cilium", {"meta": status_of("cilium-operator-lb-ipam")}),
    "manager of Cilium for addresses of nodes": (
        "Cilium",
        {"meta": status_of("cilium-operator-generic")},
    ),
    "finalizer of an older klipper": (
        "klipper",
        {"meta": {"finalizers": ("svccontroller.k3s.cattle.io/daemonset", CLEANUP_FINALIZER)}},
    ),
    "manager of k3s": ("klipper", {"meta": status_of("k3s")}),
    "annotation of OpenStack's controller that users write too": (
        "none",
        {"meta": {"annotations": {"loadbalancer.openstack.org/load-balancer-id": "1"}}},
    ),
    "finalizer by OpenStack's controller": (
        "OpenStack cloud controller",
        {"meta": finalizer_by("openstack-cloud-controller-manager")},
    ),
    "finalizer by k3s": ("klipper", {"meta": finalizer_by("k3s")}),
    "finalizer of an older rke2": (
        "klipper",
        {"meta": {"finalizers": ("svccontroller.rke2.cattle.io/daemonset",)}},
    ),
    "finalizer of Amazon": ("a cloud", {"meta": {"finalizers": ("service.k8s.aws/resources",)}}),
    "finalizer of Google": (
        "a cloud",
        {"meta": {"finalizers": ("gke.networking.io/l4-netlb-v2",)}},
    ),
    "finalizer of a cloud": ("a cloud", {"meta": {"finalizers": (CLEANUP_FINALIZER,)}}),
    "manager of a cloud": ("a cloud", {"meta": status_of("aws-cloud-controller-manager")}),
    "an address": ("an unknown controller", {"addresses": ("192.0.2.99",)}),
    "somebody's status": ("an unknown controller", {"meta": status_of("other-lb")}),
    "a class that nobody serves": ("none", {"load_balancer_class": "example.com/none"}),
    "an annotation that a user writes": (
        "none",
        {"meta": {"annotations": {"metallb.io/address-pool": "lan"}}},
    ),
    "another writer of the spec": (
        "none",
        {"meta": {"managed_fields": (FieldsOwner("kubectl"),)}},
    ),
}


@pytest.mark.parametrize("name", MARKS)
def test_a_controller_is_recognized_by_what_it_writes(name: str) -> None:
    owner, fields = MARKS[name]
    service = make_service(**({"addresses": (), "class_": ""} | fields))
    assert owner_of(service, has_events=False) == owner


def test_a_claim_of_fairlead_takes_precedence_over_what_the_former_controller_left() -> None:
    meta = {"annotations": {"metallb.io/ip-allocated-from-pool": "lan"}}
    assert owner_of(make_service(meta=meta), has_events=False) == "Fairlead"


def test_without_a_mark_and_without_events_the_controller_is_not_known() -> None:
    service = make_service(addresses=(), class_="")
    assert owner_of(service, has_events=None) == "not known"


def test_an_event_tells_that_somebody_serves_it() -> None:
    service = make_service(addresses=(), class_="")
    assert owner_of(service, has_events=True) == "an unknown controller"
