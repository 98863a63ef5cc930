"""The requests by which another system gives Services the addresses that they have.

In: Services that Fairlead serves, the system that is to serve them next, and the pools of MetalLB
that the cluster has. Out: for each Service the fields with which it requests its addresses from
that system, as an object to apply; and remarks about Services that need something else. When
Fairlead releases a Service, its status has no address any more, so the next system chooses one by
these requests alone. Pure. Invariant: a request never names an address that the Service does not
have. Annotations follow MetalLB 0.16, kube-vip 1.0 and Cilium 1.18; cloud-provider-openstack 1.34
reads spec.loadBalancerIP."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from fairlead.config import parse_range
from fairlead.kube.objects import Service
from fairlead.model import ServiceKey
from fairlead.plan.annotations import ADDRESSES, SHARING_KEY, found
from fairlead.plan.classes import CLASSES
from fairlead.plan.metallb import translations
from fairlead.plan.migrated_pools import is_balanced, is_unreachable, shown_addresses
from fairlead.plan.service import CLASS_ANNOTATION

Next = Literal["metallb", "kube-vip", "cilium", "openstack"]
"""The system that is to serve the Services next."""


class _Annotations(NamedTuple):
    """The annotations of a system that request addresses, and those with a sharing key; each list
    begins with the present name. Without one, the system reads spec.loadBalancerIP alone."""

    request: Sequence[str] = ()
    share: Sequence[str] = ()


_SYSTEMS: Mapping[Next, _Annotations] = {
    "metallb": _Annotations(ADDRESSES[1:], SHARING_KEY[1:]),
    "kube-vip": _Annotations(("kube-vip.io/loadbalancerIPs",)),
    "cilium": _Annotations(
        ("lbipam.cilium.io/ips", "io.cilium/lb-ipam-ips"),
        ("lbipam.cilium.io/sharing-key", "io.cilium/lb-ipam-sharing-key"),
    ),
    "openstack": _Annotations(),
}


def requests(
    services: Iterable[Service], to: Next, of_metallb: Iterable[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a partial Service for each Service without a class that Fairlead serves and that does
    not request its addresses from the next system yet; and remarks. `of_metallb`: see
    `plan.metallb.translations`."""
    bodies, remarks = [], []
    services = sorted(services, key=lambda each: each.key)
    # An older version of the system knows only the older prefix, and it has served some of them.
    seen = {name.partition("/")[0] for each in services for name in each.metadata.annotations}
    handed: list[Service] = []
    for service in services:
        claimed = service.metadata.annotations.get(CLASS_ANNOTATION, "")
        if not is_balanced(service) or not claimed or not shown_addresses(service):
            continue
        if service.spec.load_balancer_class:
            remarks.append(
                f"Service {service.key} names class {service.spec.load_balancer_class} and stays "
                "with Fairlead; to hand it over, recreate it without the class"
            )
        elif claimed in CLASSES and CLASSES[claimed].addresses == "cloud":
            remarks.append(
                f"Service {service.key} has a load balancer of class {claimed}, which is deleted "
                "when Fairlead releases the Service; stop Fairlead's controller first "
                "(docs/migration.md)"
            )
        elif to == "metallb" and len(shown_addresses(service)) < len(service.spec.cluster_ips):
            remarks.append(
                f"Service {service.key} has two address families and one address, and MetalLB "
                "accepts only a request for both; first set spec.ipFamilyPolicy to SingleStack"
            )
        else:
            handed.append(service)
            body, remark = _request(service, to, seen)
            if "spec" in body or "annotations" in body["metadata"]:
                bodies.append(body)
            if remark:
                remarks.append(remark)
    if to == "metallb":
        remarks += [*_in_no_pool(handed, of_metallb), *_not_sharing(handed)]
    return bodies, remarks


def _in_no_pool(
    services: Iterable[Service], of_metallb: Iterable[Mapping[str, Any]]
) -> Iterable[str]:
    """Yield a remark for each address that no pool of MetalLB has, if its pools are known."""
    ranges = []
    for pool in translations(of_metallb)[0]:
        for text in pool.body["spec"]["addresses"]:
            with suppress(ValueError):
                ranges.append(parse_range(text))
    for service in services if ranges else ():
        for address in shown_addresses(service):
            if is_unreachable(address):
                continue
            version, value, _ = parse_range(address)
            if not any(v == version and low <= value <= high for v, low, high in ranges):
                yield (
                    f"Service {service.key}: {address} is in no pool of MetalLB, which would "
                    "refuse the request; add the address to an IPAddressPool"
                )


def _not_sharing(services: Iterable[Service]) -> Iterable[str]:
    """Yield a remark for each two Services that have one address, and not the same backends as
    MetalLB defines them: with policy Local the selector, with policy Cluster any."""
    first: dict[str, Service] = {}
    told = set[tuple[ServiceKey, ServiceKey]]()
    for service in services:
        for address in shown_addresses(service):
            other = first.setdefault(address, service)
            pair = (other.key, service.key)
            if _backends(other) != _backends(service) and pair not in told:
                told.add(pair)
                yield (
                    f"Services {other.key} and {service.key} have {address}, which MetalLB gives "
                    "to both only if both have externalTrafficPolicy Cluster, or Local and the "
                    "same selector; change one of them, or it gets no address"
                )


def _backends(service: Service) -> Mapping[str, str] | None:
    return (
        (service.spec.selector or {}) if service.spec.external_traffic_policy == "Local" else None
    )


def _request(service: Service, to: Next, seen: Collection[str]) -> tuple[dict[str, Any], str]:
    """Return the Service with the fields that it does not have yet, and a remark or "". `seen`: the
    prefixes of all annotations of Services."""
    system, addresses, key = _SYSTEMS[to], shown_addresses(service), service.key
    present, in_spec = service.metadata.annotations, service.spec.load_balancer_ip
    annotations: dict[str, str] = {}
    sharing_key = found(present, SHARING_KEY)[1]
    if sharing_key and system.share and found(present, system.share)[1] != sharing_key:
        annotations[_name(present, system.share, seen)] = sharing_key
    remark, spec = "", {}
    requested = found(present, system.request)[1]
    if not system.request or (in_spec and not requested and len(addresses) == 1):
        if in_spec != addresses[0]:
            spec = {"loadBalancerIP": addresses[0]}
        if others := addresses[1:]:
            remark = (
                f"Service {key}: {to} is not asked for {', '.join(others)}, only for one address"
            )
    elif {part.strip() for part in requested.split(",")} != set(addresses):
        annotations[_name(present, system.request, seen)] = ",".join(addresses)
        if in_spec and to == "metallb":
            remark = (
                f"Service {key}: remove spec.loadBalancerIP, which MetalLB does not accept "
                f"together with an annotation: kubectl patch service -n {key.namespace} {key.name} "
                """--type=merge -p '{"spec":{"loadBalancerIP":null}}'"""
            )
    metadata: dict[str, Any] = {"name": key.name, "namespace": key.namespace}
    if annotations:
        metadata["annotations"] = annotations
    body = {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
    return body | ({"spec": spec} if spec else {}), remark


def _name(present: Mapping[str, str], names: Sequence[str], seen: Collection[str]) -> str:
    """Return the name to write: the one that is present, else the first one whose prefix a Service
    uses."""
    used = [name for name in names if name.partition("/")[0] in seen]
    return next((name for name in names if name in present), (used or [names[0]])[0])
