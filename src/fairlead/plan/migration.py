"""The migration of Services from MetalLB, cloud-provider-openstack or another system, with their
addresses.

In: Services as those systems leave them, their pools, the pools of Fairlead, and the plan of all
Services as it will be after the migration (`plan.services`). Out: AddressPools to apply first, and
for each Service what stays, what changes, and what its owner has to do. An address that a Service
shows when Fairlead takes it over is granted before any other (`plan.addresses`). A pool that
contains the address only avoids the warning that no pool has it. Invariants: pure; a Service is
ready only if the plan accepts it with the addresses that it has. Annotations follow MetalLB 0.16,
cloud-provider-openstack 1.34, kube-vip 1.0 and Cilium 1.18."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from fairlead.config import Config
from fairlead.errors import Refused
from fairlead.kube.objects import CLEANUP_FINALIZER, Service
from fairlead.model import Finding, LoadBalancer, ServiceKey, about
from fairlead.net.address import family_of
from fairlead.plan import annotations, refusals
from fairlead.plan.addresses import address_request_of, shown_address
from fairlead.plan.classes import CLASSES, ServiceClass, service_class_of
from fairlead.plan.migrated_pools import (
    SUGGESTED,
    assumed_class,
    is_balanced,
    is_unreachable,
    shown_addresses,
)
from fairlead.plan.pools import Pools
from fairlead.plan.service import CLASS_ANNOTATION

NO_CLASS = "NoClass"
OTHER_CLASS = "ClassOfAnotherController"
NOT_IN_POOL = "AddressInNoPool"
NOT_VALID = "AddressNotValid"
HOSTNAME_ONLY = "HostnameOnly"
FOREIGN_FINALIZER = "FinalizerOfAnotherController"
NOT_ACCEPTED = "NotAccepted"
OTHER_ADDRESS = "AddressWouldChange"
SHARED = "AddressSharedWithoutKey"
NOT_READ = "RequestNotRead"
NOT_ADOPTED = "LoadBalancerNotAdopted"
BY_CLOUD = "AddressFromCloud"
AT_OCTAVIA = "AddressOfOctavia"
"""Codes of Findings about a Service that is to be migrated."""

OF_PLAN = frozenset(
    (
        refusals.EXCLUDED,
        refusals.CLAIMED,
        refusals.STRANDED,
        refusals.SKIPPED,
        annotations.NOT_UNDERSTOOD,
        annotations.WITHOUT_EFFECT,
    )
)
"""Codes of the Findings of the plan that a migration shows, besides those about ports that are not
served."""

System = Literal["fairlead", "metallb", "openstack", "kube-vip", "unknown"]

_MARKS: tuple[tuple[str, System], ...] = (
    (CLASS_ANNOTATION, "fairlead"),
    ("metallb.io/ip-allocated-from-pool", "metallb"),
    ("metallb.universe.tf/ip-allocated-from-pool", "metallb"),
    ("loadbalancer.openstack.org/load-balancer-id", "openstack"),
    ("loadbalancer.openstack.org/load-balancer-address", "openstack"),
    ("kube-vip.io/vipHost", "kube-vip"),
    ("kube-vip.io/loadbalancerIPs", "kube-vip"),
)
"""The annotations that each system writes on the Services it serves."""
_REQUESTS_NOT_READ = (
    "kube-vip.io/loadbalancerIPs",
    "lbipam.cilium.io/ips",
    "io.cilium/lb-ipam-ips",
    "purelb.io/addresses",
)
"""Annotations of other systems that request addresses and that Fairlead does not read."""


class Planned(NamedTuple):
    """The plan of all Services after the migration. `config`: the configuration now. `sharing`:
    returns another Service that has an address of a Service and does not share it with this one,
    so that only one of them could get it again."""

    config: Config
    balancers: Mapping[ServiceKey, LoadBalancer | Refused]
    sharing: Callable[[ServiceKey, str], ServiceKey | None]


class Takeover(msgspec.Struct, frozen=True):
    """What a migration means for one Service. `pools`: the pool of each address, empty for an
    address in no pool. `ready`: no change of the Service is necessary, and the plan accepts it."""

    service: str
    system: System
    addresses: tuple[str, ...]
    pools: tuple[str, ...]
    ready: bool
    findings: tuple[Finding, ...] = ()


def takeovers(services: Iterable[Service], pools: Pools, planned: Planned) -> list[Takeover]:
    """Return a Takeover for each Service of type LoadBalancer, sorted by namespace and name.
    `pools`: the pools as they are now."""
    return [
        _takeover(each, pools, planned)
        for each in sorted(services, key=lambda each: each.key)
        if is_balanced(each)
    ]


def system_of(service: Service) -> System:
    """Return the system that serves the Service now, by the annotations in `_MARKS`."""
    return next(
        (system for mark, system in _MARKS if service.metadata.annotations.get(mark)), "unknown"
    )


def annotate(service: Service, name: str, value: str) -> str:
    """Return the command that sets an annotation of the Service."""
    meta = service.metadata
    return f"kubectl annotate service -n {meta.namespace} {meta.name} --overwrite {name}={value}"


def _takeover(service: Service, pools: Pools, planned: Planned) -> Takeover:
    ingress = service.status.load_balancer.ingress
    addresses = shown_addresses(service)
    places = [pools.find(address) for address in addresses]
    obstacle = _class_obstacle(service, addresses, planned.config)
    findings = [obstacle] if obstacle else []
    class_ = service_class_of(service, assumed_class(planned.config)) or SUGGESTED
    from_pool = class_.addresses == "pool"
    if obstacle is None or obstacle.code == NO_CLASS:
        findings += _of_plan(service, class_, planned)
        findings += _of_cloud(service, class_, addresses, planned.config)
    findings += _request_not_read(service, addresses)
    findings += _not_valid(service)
    for address, place in zip(addresses, places, strict=True):
        if (
            place is None
            and from_pool
            and not is_unreachable(address)
            and pools.exclusions.find(address) is None
        ):
            findings.append(
                Finding(
                    NOT_IN_POOL,
                    f"{address} is in no pool: the Service keeps it, with a warning until a pool "
                    "contains it (see `fairlead migrate pools`)",
                )
            )
    if any(entry.hostname and not entry.ip and shown_address(entry) is None for entry in ingress):
        whence = "of a pool" if from_pool else "of the cloud"
        findings.append(
            Finding(
                HOSTNAME_ONLY,
                f"it shows a hostname and no address: it gets an address {whence}; update DNS "
                "accordingly",
            )
        )
    if (
        service.metadata.annotations.get(CLASS_ANNOTATION) is None
        and CLEANUP_FINALIZER in service.metadata.finalizers
    ):
        findings.append(_foreign_finalizer(service))
    found = tuple(dict.fromkeys(about(f"Service {service.key}", findings)))
    return Takeover(
        str(service.key),
        system_of(service),
        addresses,
        tuple(place[0].name if place and from_pool else "" for place in places),
        not any(each.severity == "error" for each in found),
        found,
    )


def _of_plan(service: Service, class_: ServiceClass, planned: Planned) -> list[Finding]:
    """Return what the plan says about the Service: why it refuses it, gives it other addresses, or
    does not serve all its ports."""
    ineffective = annotations.without_effect(service.metadata.annotations, class_.substitutes)
    match planned.balancers.get(service.key):
        case Refused() as refused:
            remedy = _keep_command(service, class_) or refused.fix
            refusal = Finding(NOT_ACCEPTED, refused.message, severity="error", remedy=remedy)
            return [refusal, *ineffective]
        case LoadBalancer() as balancer:
            findings = [
                # A Service that keeps such an address would not get it again.
                msgspec.structs.replace(each, severity="error")
                if each.code == refusals.STRANDED
                else each
                for each in balancer.notes
                if each.code in OF_PLAN or each.blocks == "Programmed"
            ]
            if class_.addresses == "pool":
                findings += _other_addresses(service, class_, balancer)
                findings += _not_shared(service, planned)
            return findings
        case _:
            return ineffective


def _other_addresses(
    service: Service, class_: ServiceClass, balancer: LoadBalancer
) -> list[Finding]:
    """Return the Finding about the addresses that the Service shows and would not keep."""
    addresses = shown_addresses(service)
    if not (lost := [each for each in addresses if each not in balancer.addresses]):
        return []
    gets = ", ".join(balancer.addresses)
    remedy = _keep_command(service, class_)
    if not remedy:
        families = {family_of(each) for each in addresses}
        remedy = (
            "a Service has one address of each family: let clients use the one that stays"
            if len(families) < len(addresses)
            else "add the family to spec.ipFamilies"
        )
    return [
        Finding(
            OTHER_ADDRESS,
            f"it shows {', '.join(addresses)} and would get {gets}, without {', '.join(lost)}",
            severity="error",
            remedy=remedy,
        )
    ]


def _keep_command(service: Service, class_: ServiceClass) -> str:
    """Return the command after which the Service requests the addresses that it shows; empty if it
    requests no others."""
    addresses = shown_addresses(service)
    if not addresses or class_.addresses != "pool":
        return ""
    if len({family_of(each) for each in addresses}) < len(addresses):
        return ""
    try:
        if set(address_request_of(service).requested) <= set(addresses):
            return ""
    except Refused:
        pass  # nothing valid is requested
    own = annotate(service, annotations.ADDRESSES[0], ",".join(addresses))
    return f"to keep the address, request it: {own}"


def _not_shared(service: Service, planned: Planned) -> list[Finding]:
    """Return a Finding for each address that another Service has too and does not share with this
    one by Fairlead's rules."""
    findings = []
    for address in shown_addresses(service):
        if (other := planned.sharing(service.key, address)) is None:
            continue
        same = other.namespace == service.metadata.namespace
        remedy = (
            f"give both the same annotation {annotations.SHARING_KEY[0]}"
            if same
            else "Services of two namespaces cannot share an address: request another one for one "
            f"of them by {annotations.ADDRESSES[0]}"
        )
        findings.append(
            Finding(
                SHARED,
                f"Service {other} has {address} too: both keep it, but whichever is recreated will "
                "not get it again",
                severity="error",
                remedy=remedy,
            )
        )
    return findings


def _of_cloud(
    service: Service, class_: ServiceClass, addresses: Sequence[str], config: Config
) -> list[Finding]:
    """Return the Finding about an address that belongs to a load balancer of OpenStack, or that a
    cloud would assign."""
    system = system_of(service)
    if class_.addresses == "pool" and system == "openstack" and addresses:
        message = (
            f"{', '.join(addresses)} belongs to its load balancer in Octavia, and OpenStack "
            f"delivers the packets there, not to class {class_.name}"
        )
        remedy = (
            "class fairlead.io/octavia takes the load balancer over with the address "
            "(docs/octavia.md)"
        )
        return [Finding(AT_OCTAVIA, message, remedy=remedy)]
    if class_.addresses != "cloud" or system == "fairlead" or config.octavia is None:
        return []
    if system == "openstack" and config.octavia.adopt_from:
        return []
    if system == "openstack":
        message = "it would get a new load balancer, with another address"
        remedy = (
            "set octavia.adoptFrom to the --cluster-name of cloud-provider-openstack (kubernetes "
            "by default): then its load balancer is taken over (docs/octavia.md)"
        )
        return [Finding(NOT_ADOPTED, message, severity="error", remedy=remedy)]
    if not addresses:
        return []
    message = (
        f"the cloud assigns the addresses of class {class_.name}: the Service keeps "
        f"{', '.join(addresses)} only if the cloud has that address"
    )
    remedy = f"to keep it, serve the Service by class {SUGGESTED.name}"
    return [Finding(BY_CLOUD, message, severity="error", remedy=remedy)]


def _not_valid(service: Service) -> Iterator[Finding]:
    """Yield a Finding for each entry of the status that clients cannot use as an address."""
    remedy = "correct status.loadBalancer.ingress, or export the Service from its cluster again"
    for entry in service.status.load_balancer.ingress:
        if entry.ip and (address := shown_address(entry)) is None:
            yield Finding(
                NOT_VALID,
                f"it shows {annotations.quoted(entry.ip)}, which is no address: Fairlead would "
                "assign another one",
                severity="error",
                remedy=remedy,
            )
        elif entry.ip and address is not None and is_unreachable(address):
            yield Finding(
                NOT_VALID,
                f"it shows {address}, which no client outside of its host or link reaches",
                severity="error",
                remedy=remedy,
            )


def _request_not_read(service: Service, addresses: Sequence[str]) -> list[Finding]:
    """Return a Finding about a request for addresses that Fairlead does not read."""
    name, text = annotations.found(service.metadata.annotations, _REQUESTS_NOT_READ)
    own = annotations.found(service.metadata.annotations, annotations.ADDRESSES)[0]
    if not name or own or service.spec.load_balancer_ip:
        return []
    own_request = annotate(
        service, annotations.ADDRESSES[0], _one_of_each_family(addresses) or "ADDRESS"
    )
    return [
        Finding(
            NOT_READ,
            f"{name} ({annotations.quoted(text)}) is not read: a Service that is recreated gets "
            "any address",
            remedy=f"request it: {own_request}",
        )
    ]


def _one_of_each_family(addresses: Sequence[str]) -> str:
    """Return the first address of each family as a request."""
    first: dict[str, str] = {}
    for each in addresses:
        first.setdefault(family_of(each), each)
    return ",".join(first.values())


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


def _class_obstacle(service: Service, addresses: Sequence[str], config: Config) -> Finding | None:
    """Return why the class of the Service prevents the migration; None if it does not. The API does
    not allow a change of `spec.loadBalancerClass`."""
    name = service.spec.load_balancer_class
    if (name or config.default_class) in CLASSES:
        return None
    if not name:
        assumed = assumed_class(config)
        return Finding(
            NO_CLASS,
            "it has no class",
            severity="error",
            remedy="set defaultClass in the configuration once the other controller is stopped "
            f"(here {assumed} is assumed)",
        )
    wanted = _one_of_each_family(addresses)
    same = f" and annotation fairlead.io/addresses={wanted}" if wanted else ""
    return Finding(
        OTHER_CLASS,
        f"its class is {name}, which cannot be changed in place: set spec.type to NodePort and "
        "spec.loadBalancerClass to null, "
        f"then back to LoadBalancer with class {SUGGESTED.name}{same}; it is not served in between",
        severity="error",
    )
