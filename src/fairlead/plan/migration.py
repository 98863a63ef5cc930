"""The migration of Services from MetalLB or cloud-provider-openstack, with their addresses.

In: Services as those systems leave them, MetalLB's IPAddressPools, the pools of Fairlead. Out:
AddressPools to apply first, and for each Service what stays, what changes, and what its owner has
to do. An address that a Service shows when Fairlead takes it over is granted before any other
(`plan.addresses`), so a migration never changes an address. A pool that contains the address only
avoids the warning that no pool has it. Invariant: pure. Resource types and annotations follow
MetalLB 0.16 (`metallb.io/v1beta1`) and cloud-provider-openstack 1.34."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from fairlead.errors import Refused
from fairlead.kube.crds import GROUP_VERSION, AddressPool
from fairlead.kube.objects import CLEANUP_FINALIZER, Service
from fairlead.mistakes import explain
from fairlead.model import Finding, about
from fairlead.plan.addresses import held_by, shown_address
from fairlead.plan.annotations import without_effect
from fairlead.plan.classes import CLASSES, service_class_of
from fairlead.plan.pools import Pools
from fairlead.plan.service import CLASS_ANNOTATION

SUGGESTED = next(each for each in CLASSES.values() if each.addresses == "pool")
"""The class to suggest for Services of another system: a class whose addresses come from pools."""

IP_ADDRESS_POOL = ("metallb.io/v1beta1", "IPAddressPool")
FIELDS = frozenset(("addresses", "autoAssign", "avoidBuggyIPs", "serviceAllocation"))
"""The fields of an IPAddressPool's spec that an AddressPool has too: all fields of MetalLB 0.16."""
TAKEN_OVER = "taken-over"
"""The name of the pool for addresses that are in no other pool."""

NO_CLASS = "NoClass"
OTHER_CLASS = "ClassOfAnotherController"
NOT_IN_POOL = "AddressInNoPool"
HOSTNAME_ONLY = "HostnameOnly"
FOREIGN_FINALIZER = "FinalizerOfAnotherController"
"""Codes of Findings about a Service that is to be migrated."""

System = Literal["fairlead", "metallb", "openstack", "unknown"]

_MARKS: tuple[tuple[str, System], ...] = (
    (CLASS_ANNOTATION, "fairlead"),
    ("metallb.io/ip-allocated-from-pool", "metallb"),
    ("metallb.universe.tf/ip-allocated-from-pool", "metallb"),
    ("loadbalancer.openstack.org/load-balancer-id", "openstack"),
    ("loadbalancer.openstack.org/load-balancer-address", "openstack"),
)
"""The annotations that each system writes on the Services it serves."""


class Inventory(msgspec.Struct, frozen=True):
    """The objects before a migration: Services, AddressPools, and MetalLB's pools as decoded
    JSON."""

    services: tuple[Service, ...]
    address_pools: tuple[AddressPool, ...]
    metallb_pools: tuple[Mapping[str, Any], ...]


class Takeover(msgspec.Struct, frozen=True):
    """What a migration means for one Service. `pools`: the pool of each address, empty for an
    address in no pool. `ready`: no change of the Service is necessary."""

    service: str
    system: System
    addresses: tuple[str, ...]
    pools: tuple[str, ...]
    ready: bool
    findings: tuple[Finding, ...] = ()


def translated(pool: Mapping[str, Any]) -> dict[str, Any]:
    """Return MetalLB's IPAddressPool as an AddressPool: the fields have the same names and meaning.
    Raise Refused if it has an unknown field, because that may be a restriction."""
    metadata, spec = pool.get("metadata") or {}, pool.get("spec") or {}
    name = metadata.get("name")
    if not name or not spec.get("addresses"):
        raise Refused(
            f"IPAddressPool {name or '(without a name)'} has no spec.addresses",
            fix="correct the IPAddressPool in MetalLB",
        )
    made = {
        "apiVersion": GROUP_VERSION,
        "kind": "AddressPool",
        "metadata": {"name": name},
        "spec": spec,
    }
    fix = "write an AddressPool for it by hand (docs/addresses.md)"
    if unknown := sorted(spec.keys() - FIELDS):
        raise Refused(f"IPAddressPool {name}: spec.{unknown[0]} is not known", fix=fix)
    try:
        msgspec.convert(made, AddressPool)
    except msgspec.ValidationError as problem:
        said = explain(problem, AddressPool)
        raise Refused(f"IPAddressPool {name}: {said}", fix=fix) from None
    return made


def pool_for_unpooled(services: Iterable[Service], pools: Pools) -> dict[str, Any] | None:
    """Return an AddressPool of the addresses that LoadBalancer Services show and no pool contains;
    None if there is no such address. With `autoAssign: false`, a new Service gets an address of
    this pool only on request."""
    shown = {
        address for service in services if _is_balanced(service) for address in held_by(service)
    }
    if not (left := sorted(address for address in shown if pools.find(address) is None)):
        return None
    spec = {"addresses": left, "autoAssign": False}
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "AddressPool",
        "metadata": {"name": TAKEN_OVER},
        "spec": spec,
    }


def takeovers(
    services: Iterable[Service], pools: Pools, default_class: str | None
) -> list[Takeover]:
    """Return a Takeover for each Service of type LoadBalancer, sorted by namespace and name."""
    return [
        _takeover(each, pools, default_class)
        for each in sorted(services, key=lambda each: each.key)
        if _is_balanced(each)
    ]


def system_of(service: Service) -> System:
    """Return the system that serves the Service now, by the annotations in `_MARKS`."""
    return next(
        (system for mark, system in _MARKS if service.metadata.annotations.get(mark)), "unknown"
    )


def _takeover(service: Service, pools: Pools, default_class: str | None) -> Takeover:
    ingress = service.status.load_balancer.ingress
    addresses = held_by(service)
    found = [pools.find(address) for address in addresses]
    obstacle = _class_obstacle(service, addresses, default_class)
    findings = [obstacle] if obstacle else []
    class_ = service_class_of(service, default_class) or SUGGESTED
    findings += without_effect(service.metadata.annotations, class_.substitutes)
    for address, place in zip(addresses, found, strict=True):
        if place is None:
            findings.append(
                Finding(
                    NOT_IN_POOL,
                    f"{address} is in no pool: the Service keeps it, with a warning until a pool "
                    "contains it (see `fairlead migrate pools`)",
                )
            )
    if any(entry.hostname and shown_address(entry) is None for entry in ingress):
        findings.append(
            Finding(
                HOSTNAME_ONLY,
                "it shows a hostname and no address: it gets an address of a pool; update DNS "
                "accordingly",
            )
        )
    if (
        service.metadata.annotations.get(CLASS_ANNOTATION) is None
        and CLEANUP_FINALIZER in service.metadata.finalizers
    ):
        findings.append(_foreign_finalizer(service))
    return Takeover(
        str(service.key),
        system_of(service),
        addresses,
        tuple(place[0].name if place else "" for place in found),
        not obstacle,
        about(f"Service {service.key}", findings),
    )


def _foreign_finalizer(service: Service) -> Finding:
    """Return the Finding about the finalizer of another controller. All such controllers use the
    same finalizer, so Fairlead cannot know whether the other one still needs it."""
    left = [name for name in service.metadata.finalizers if name != CLEANUP_FINALIZER]
    patch = msgspec.json.encode({"metadata": {"finalizers": left}}).decode()
    return Finding(
        FOREIGN_FINALIZER,
        "another controller has set its finalizer",
        remedy="after that controller has been stopped for good, remove the finalizer (Fairlead "
        "sets its own at once); otherwise the Service cannot be deleted: "
        f"kubectl patch service -n {service.metadata.namespace} {service.metadata.name} "
        f"--type=merge -p '{patch}'",
    )


def _class_obstacle(
    service: Service, addresses: Sequence[str], default_class: str | None
) -> Finding | None:
    """Return why the class of the Service prevents the migration; None if it does not. The API does
    not allow a change of `spec.loadBalancerClass`."""
    name = service.spec.load_balancer_class
    if (name or default_class) in CLASSES:
        return None
    if not name:
        return Finding(
            NO_CLASS,
            "it has no class: set defaultClass in the configuration once the other "
            "controller is stopped",
            severity="error",
        )
    same = f" and annotation fairlead.io/addresses={','.join(addresses)}" if addresses else ""
    return Finding(
        OTHER_CLASS,
        f"its class is {name}, which cannot be changed in place: set spec.type to NodePort and "
        "spec.loadBalancerClass to null, "
        f"then back to LoadBalancer with class {SUGGESTED.name}{same}; it is not served in between",
        severity="error",
    )


def _is_balanced(service: Service) -> bool:
    return service.spec.type == "LoadBalancer" and service.metadata.deletion_timestamp is None
