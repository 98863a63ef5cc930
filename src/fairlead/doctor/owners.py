"""Which controller serves a Service. Pure.

In: a Service with the owners of its fields, and whether Events about it exist. Out: an `Owner`. A
controller is recognized by what it writes on the Services that it serves: annotations, finalizers,
conditions, and the names by which it owns fields of the status. A class alone proves nothing,
because there may be no controller for it. A controller that gives no name to its writes is named
after its program.

Sources, each with the version that was read:

* MetalLB 0.13.12 to 0.16.1, controller/service.go: the annotation, since 0.14 with the prefix
  metallb.io.
* cloud-provider-openstack 1.36.0, pkg/openstack/loadbalancer.go: both annotations. Users write that
  of the load balancer's ID too, to share it, so it counts only with the finalizer. Dockerfile: the
  name of the program.
* kube-vip 0.8.9 to 1.2.3, pkg/services/services.go: the annotation, in ARP and BGP mode only.
  Dockerfile: the name of the program.
* Cilium at 079d974, operator/pkg/lbipam/lbipam.go: the condition, and the manager
  cilium-operator-lb-ipam. At 0267401, operator/pkg/nodeipam/nodesvclb.go: no name, so that of the
  program.
* k3s at 0821db5, pkg/cloudprovider/servicelb.go: the finalizer, which contains the name of the
  distribution and is of versions before 1.26. Later versions use the finalizer of clouds, and their
  program is k3s or rke2.
* k8s.io/cloud-provider 0.36.3, service/helpers/helper.go: the finalizer of clouds.
* aws-load-balancer-controller at 043f39b, controllers/service/service_controller.go, and
  ingress-gce at ffd5b5d, pkg/utils/common/finalizer.go: the finalizers of these clouds."""

from collections.abc import Callable, Iterable
from typing import Literal

from fairlead.doctor.objects import FieldsOwner, OwnedService
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
    ("loadbalancer.openstack.org/load-balancer-address", "OpenStack cloud controller"),
    ("kube-vip.io/vipHost", "kube-vip"),
)
_OCTAVIA_ID = "loadbalancer.openstack.org/load-balancer-id"
_FINALIZERS: tuple[tuple[str, Owner], ...] = (
    ("svccontroller.k3s.cattle.io/", "klipper"),
    ("svccontroller.rke2.cattle.io/", "klipper"),
    ("service.k8s.aws/", "a cloud"),
    ("gke.networking.io/", "a cloud"),
)
_CONDITIONS: tuple[tuple[str, Owner], ...] = (("cilium.io/", "Cilium"),)
_MANAGERS: tuple[tuple[str, Owner], ...] = (
    ("openstack-cloud-controller", "OpenStack cloud controller"),
    ("kube-vip", "kube-vip"),
    ("cilium", "Cilium"),
    ("k3s", "klipper"),
    ("rke2", "klipper"),
)
"""Beginnings of the names of field managers of the status, or of the finalizer of clouds. MetalLB's
is `controller`, which is too common a name to prove anything."""
_CLEANUP_FIELD = f'v:"{CLEANUP_FINALIZER}"'
"""The finalizer of clouds in FieldsV1."""


def owner_of(service: OwnedService, *, has_events: bool | None) -> Owner:
    """Return the controller that serves the Service. `has_events`: whether there are Events about
    it; None if that is not known."""
    if claimed_class(service):
        return "Fairlead"
    meta = service.metadata
    writers = {each.manager for each in meta.managed_fields if _serves(each)}
    for names, table, same in (
        (meta.annotations, _ANNOTATIONS, str.__eq__),
        ([each.type for each in service.status.conditions], _CONDITIONS, str.startswith),
        (writers, _MANAGERS, str.startswith),
        (meta.finalizers, _FINALIZERS, str.startswith),
    ):
        if (found := _first(names, table, same)) is not None:
            return found
    if CLEANUP_FINALIZER in meta.finalizers:
        return "OpenStack cloud controller" if _OCTAVIA_ID in meta.annotations else "a cloud"
    if any("cloud-controller" in each for each in writers):
        return "a cloud"
    if writers or has_events or service.status.load_balancer.ingress or service.status.conditions:
        return "an unknown controller"
    return "none" if has_events is False else "not known"


def _serves(writer: FieldsOwner) -> bool:
    """Return whether only the controller of a Service writes these fields."""
    finalizers = writer.fields_v1.get("f:metadata", {}).get("f:finalizers", {})
    return writer.subresource == "status" or _CLEANUP_FIELD in finalizers


def _first(
    names: Iterable[str],
    table: Iterable[tuple[str, Owner]],
    same: Callable[[str, str], bool],
) -> Owner | None:
    return next((owner for mark, owner in table for name in names if same(name, mark)), None)
