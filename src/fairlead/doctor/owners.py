"""Which controller serves a Service. Pure.

In: a Service with the owners of its fields, and whether Events about it exist. Out: an `Owner`. A
controller is recognized by what it writes on the Services that it serves: annotations, finalizers,
conditions, and the names by which it owns fields of the status. A class alone proves nothing,
because there may be no controller for it. Names follow MetalLB 0.16, cloud-provider-openstack 1.34,
kube-vip 1.0, Cilium 1.18, k3s 1.33, and the cloud-provider library of Kubernetes."""

from collections.abc import Callable, Iterable
from typing import Literal

from fairlead.doctor.objects import OwnedService
from fairlead.kube.objects import CLEANUP_FINALIZER
from fairlead.plan.service import claimed_class

Owner = Literal[
    "Fairlead",
    "MetalLB",
    "OpenStack cloud controller",
    "kube-vip",
    "Cilium",
    "klipper",
    "a cloud",
    "an unknown controller",
    "none",
    "not known",
]
"""`a cloud`: a controller that uses the cloud-provider library. `an unknown controller`: a
controller that is not in this list has written the status of the Service, or an Event about it.
`none`: no controller has written either. `not known`: no controller has written the status, and
Events could not be read."""

_ANNOTATIONS: tuple[tuple[str, Owner], ...] = (
    ("metallb.io/ip-allocated-from-pool", "MetalLB"),
    ("metallb.universe.tf/ip-allocated-from-pool", "MetalLB"),
    ("loadbalancer.openstack.org/load-balancer-id", "OpenStack cloud controller"),
    ("loadbalancer.openstack.org/load-balancer-address", "OpenStack cloud controller"),
    ("kube-vip.io/vipHost", "kube-vip"),
)
_FINALIZERS: tuple[tuple[str, Owner], ...] = (
    ("svccontroller.k3s.cattle.io/", "klipper"),
    ("service.k8s.aws/", "a cloud"),
)
_CONDITIONS: tuple[tuple[str, Owner], ...] = (("cilium.io/", "Cilium"),)
_MANAGERS: tuple[tuple[str, Owner], ...] = (
    ("openstack-cloud-controller", "OpenStack cloud controller"),
    ("kube-vip", "kube-vip"),
    ("cilium", "Cilium"),
    ("k3s", "klipper"),
)
"""Beginnings of the names of field managers of the status. MetalLB's is `controller`, which is too
common a name to prove anything."""


def owner_of(service: OwnedService, *, has_events: bool | None) -> Owner:
    """Return the controller that serves the Service. `has_events`: whether there are Events about
    it; None if that is not known."""
    if claimed_class(service):
        return "Fairlead"
    meta = service.metadata
    writers = {each.manager for each in meta.managed_fields if each.subresource == "status"}
    for names, table, same in (
        (meta.annotations, _ANNOTATIONS, str.__eq__),
        ([each.type for each in service.status.conditions], _CONDITIONS, str.startswith),
        (writers, _MANAGERS, str.startswith),
        (meta.finalizers, _FINALIZERS, str.startswith),
    ):
        if (found := _first(names, table, same)) is not None:
            return found
    if CLEANUP_FINALIZER in meta.finalizers or any("cloud-controller" in each for each in writers):
        return "a cloud"
    if writers or has_events or service.status.load_balancer.ingress or service.status.conditions:
        return "an unknown controller"
    return "none" if has_events is False else "not known"


def _first(
    names: Iterable[str],
    table: Iterable[tuple[str, Owner]],
    same: Callable[[str, str], bool],
) -> Owner | None:
    return next((owner for mark, owner in table for name in names if same(name, mark)), None)
