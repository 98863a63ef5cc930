"""Compute the EndpointSlices and Endpoints of a Service from its selector and the Pods. Pure.

In: a Service and the Pods of its namespace. Out: slices by name, and the writes that turn the
existing slices into these. Invariant: equal input gives equal slices, names included, so a second
pass writes nothing. Follows the rules of the upstream controller: KEP-752 (EndpointSlice), KEP-1672
(ready, serving, terminating). It differs in one respect: names contain a counter instead of random
characters.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import NamedTuple

import msgspec

from fairlead.kube.objects import (
    HEADLESS_LABEL,
    SERVICE_NAME_LABEL,
    EndpointConditions,
    EndpointPort,
    Service,
)
from fairlead.lab.objects import (
    EndpointAddress,
    Endpoints,
    EndpointSubset,
    Meta,
    OwnerReference,
    Pod,
    Slice,
    SliceEndpoint,
    TargetReference,
)

MANAGED_BY_LABEL = "endpointslice.kubernetes.io/managed-by"
MANAGER = "endpointslice-controller.k8s.io"
ENDPOINTS_MANAGED_BY_LABEL = "endpoints.kubernetes.io/managed-by"
ENDPOINTS_MANAGER = "endpoint-controller"
MAX_ENDPOINTS = 100


class Difference(NamedTuple):
    """The writes that give a Service its desired slices."""

    create: tuple[Slice, ...]
    replace: tuple[Slice, ...]
    delete: tuple[Slice, ...]


def plan_slices(service: Service, pods: Iterable[Pod]) -> Mapping[str, Slice]:
    """Return the Service's slices by name. A Service without a selector gets none: its slices are
    managed by another client."""
    selector = service.spec.selector
    if not selector or service.spec.type == "ExternalName":
        return {}
    chosen = sorted(
        (pod for pod in pods if _selected(selector, pod)), key=lambda pod: pod.metadata.name
    )
    slices: dict[str, Slice] = {}
    for family in service.spec.ip_families or ("IPv4",):
        groups: dict[tuple[EndpointPort, ...], list[SliceEndpoint]] = defaultdict(list)
        for pod in chosen:
            address = _address(pod, family)
            if address is not None:
                groups[_ports(service, pod)].append(_endpoint(service, pod, address))
        for ports in sorted(groups, key=repr):
            endpoints = groups[ports]
            for first in range(0, len(endpoints), MAX_ENDPOINTS):
                name = f"{service.metadata.name}-{family.lower()}-{len(slices)}"
                part = tuple(endpoints[first : first + MAX_ENDPOINTS])
                slices[name] = Slice(_metadata(service, name), family, part, ports)
    return slices


def plan_endpoints(service: Service, pods: Iterable[Pod]) -> Endpoints | None:
    """Return the Service's Endpoints, or None for a Service without a selector. They contain
    addresses of the Service's first family only, and no terminating pods."""
    selector = service.spec.selector
    if not selector or service.spec.type == "ExternalName":
        return None
    family = (service.spec.ip_families or ("IPv4",))[0]
    ready: dict[tuple[EndpointPort, ...], list[EndpointAddress]] = defaultdict(list)
    waiting: dict[tuple[EndpointPort, ...], list[EndpointAddress]] = defaultdict(list)
    for pod in sorted(pods, key=lambda pod: pod.metadata.name):
        terminating = (
            pod.metadata.deletion_timestamp is not None
            and not service.spec.publish_not_ready_addresses
        )
        address = _address(pod, family)
        ports = _ports(service, pod)
        if (
            address is None
            or terminating
            or not _selected(selector, pod)
            or (service.spec.ports and not ports)
        ):
            continue
        serving = pod.ready or service.spec.publish_not_ready_addresses
        (ready if serving else waiting)[ports].append(
            EndpointAddress(address, pod.spec.node_name, _reference(pod))
        )
    subsets = tuple(
        EndpointSubset(tuple(ready.get(ports, ())), tuple(waiting.get(ports, ())), ports)
        for ports in sorted(ready.keys() | waiting.keys(), key=repr)
    )
    labels = dict(service.metadata.labels) | {ENDPOINTS_MANAGED_BY_LABEL: ENDPOINTS_MANAGER}
    if service.spec.cluster_ip == "None":
        labels[HEADLESS_LABEL] = ""
    return Endpoints(
        Meta(service.metadata.name, service.metadata.namespace, labels=labels), subsets
    )


def compare(desired: Mapping[str, Slice], actual: Mapping[str, Slice]) -> Difference:
    """Return the writes from the actual to the desired slices. Fields that the server sets, such as
    the resource version, are not compared; a replacement carries the resource version that it
    replaces."""
    create = tuple(desired[name] for name in desired.keys() - actual.keys())
    replace = []
    for name in desired.keys() & actual.keys():
        new, old = desired[name], actual[name]
        meaning = (old.metadata.labels, old.address_type, old.endpoints or (), old.ports or ())
        if meaning != (new.metadata.labels, new.address_type, new.endpoints, new.ports):
            version = old.metadata.resource_version
            replace.append(
                msgspec.structs.replace(
                    new, metadata=msgspec.structs.replace(new.metadata, resource_version=version)
                )
            )
    return Difference(
        create, tuple(replace), tuple(actual[name] for name in actual.keys() - desired.keys())
    )


def _selected(selector: Mapping[str, str], pod: Pod) -> bool:
    return (
        not pod.finished
        and bool(pod.status.pod_ips)
        and selector.items() <= pod.metadata.labels.items()
    )


def _address(pod: Pod, family: str) -> str | None:
    return next(
        (ip.ip for ip in pod.status.pod_ips if f"IPv{ip_address(ip.ip).version}" == family), None
    )


def _reference(pod: Pod) -> TargetReference:
    return TargetReference("Pod", pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)


def _endpoint(service: Service, pod: Pod, address: str) -> SliceEndpoint:
    metadata = pod.metadata
    terminating = metadata.deletion_timestamp is not None
    ready = service.spec.publish_not_ready_addresses or (pod.ready and not terminating)
    return SliceEndpoint(
        (address,),
        EndpointConditions(ready, pod.ready, terminating),
        pod.spec.node_name,
        _reference(pod),
    )


def _ports(service: Service, pod: Pod) -> tuple[EndpointPort, ...]:
    """Return the Service's ports as this pod has them. A named port is resolved in the pod, and
    left out if the pod does not define it."""
    ports = []
    for port in service.spec.ports:
        target = port.target_port
        number = (
            port.port
            if target is None
            else target
            if isinstance(target, int)
            else _named(pod, target, port.protocol)
        )
        if number:
            ports.append(EndpointPort(port.name, number, port.protocol))
    return tuple(ports)


def _named(pod: Pod, name: str, protocol: str) -> int | None:
    for container in pod.spec.containers:
        for port in container.ports:
            if port.name == name and port.protocol == protocol:
                return port.container_port
    return None


def _metadata(service: Service, name: str) -> Meta:
    labels = dict(service.metadata.labels) | {
        SERVICE_NAME_LABEL: service.metadata.name,
        MANAGED_BY_LABEL: MANAGER,
    }
    if service.spec.cluster_ip == "None":
        labels[HEADLESS_LABEL] = ""
    owner = OwnerReference("v1", "Service", service.metadata.name, service.metadata.uid, True, True)
    return Meta(name, service.metadata.namespace, labels=labels, owner_references=(owner,))
