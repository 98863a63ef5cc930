"""Projections of Kubernetes objects: the fields that plans and drivers read, and nothing else.

In: a decoded object. Out: a smaller object of the same type, or None if the role does not need the
object. A role holds every object of a large cluster, 100,000 endpoints and more. A field that is
dropped takes no memory, and a change of the field (another label of a Node, another condition of a
Service) does not trigger a new plan. Invariant: pure; the plan of the projected objects equals the
plan of the whole objects."""

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from fairlead.config import Config
from fairlead.kube.networks import read_address
from fairlead.kube.objects import (
    ANNOUNCE_LABEL,
    AUTOSCALER_TAINT,
    EXCLUDE_LABEL,
    SERVICE_NAME_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    SOURCE_RANGES_ANNOTATION,
    ZONE_LABEL,
    Endpoint,
    EndpointConditions,
    EndpointSlice,
    FieldsManager,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Service,
    ServiceMeta,
    ServiceStatus,
)
from fairlead.plan.annotations import DRAIN_TIMEOUT, RECORD
from fairlead.plan.proxying import ANNOTATIONS as PROXY_ANNOTATIONS
from fairlead.plan.service import CLAIM_MANAGER, CLASS_ANNOTATION, claimed_class

LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
"""kubectl's copy of the whole manifest."""


_CLAIMED = (FieldsManager(CLAIM_MANAGER),)


class Projection(msgspec.Struct, frozen=True):
    """The projections of one role. Each function may return None: the role then behaves as if the
    object did not exist. If `slice` is None, the role does not watch EndpointSlices."""

    service: Callable[[Service], Service | None]
    slice: Callable[[EndpointSlice], EndpointSlice | None] | None
    node: Callable[[Node], Node | None]


def of_slice(slice_: EndpointSlice, *, hints: bool = False) -> EndpointSlice | None:
    """Return the fields of an EndpointSlice that every role reads: addresses, conditions, nodes and
    ports; None if the slice belongs to no Service.

    Addresses are needed by every role: without them a pod that moves between two slices would count
    twice. Only the service proxy reads hints."""
    if slice_.service is None:
        return None
    metadata = slice_.metadata
    return EndpointSlice(
        ObjectMeta(
            metadata.name,
            sys.intern(metadata.namespace),
            labels=_entries(metadata.labels, (SERVICE_NAME_LABEL,)),
        ),
        slice_.address_type,
        tuple(_endpoint(each, hints) for each in slice_.endpoints or ()),
        slice_.ports,
    )


def of_node(node: Node, labels: Collection[str] = (EXCLUDE_LABEL,)) -> Node:
    """Return the fields of a Node that show how to reach it, and whether it may get traffic."""
    metadata = node.metadata
    return Node(
        ObjectMeta(
            sys.intern(metadata.name),
            labels=_entries(metadata.labels, labels),
            deletion_timestamp=metadata.deletion_timestamp,
            # A Node takes no address from a Service that is older (`exclusions`).
            creation_timestamp=metadata.creation_timestamp,
        ),
        NodeSpec(
            pod_cidrs=node.spec.pod_cidrs,
            taints=tuple(t for t in node.spec.taints if t.key == AUTOSCALER_TAINT),
        ),
        NodeStatus(tuple(_addresses(node))),
    )


def of_labelled_node(node: Node) -> Node:
    """Return the fields of `of_node` and all labels, by which a Service may select nodes."""
    found = of_node(node)
    labelled = msgspec.structs.replace(found.metadata, labels=node.metadata.labels)
    return msgspec.structs.replace(found, metadata=labelled)


def _addresses(node: Node) -> Iterator[NodeAddress]:
    """Yield the InternalIPs and ExternalIPs of a node without invalid ones, which the API server
    does not reject."""
    for each in node.status.addresses:
        if each.type not in ("InternalIP", "ExternalIP"):
            continue
        if (address := read_address(each.address)) is not None:
            yield NodeAddress(each.type, address)


def whole_service(service: Service) -> Service:
    """Return what the controller reads of a Service: almost everything, because the controller also
    writes Services. Unknown annotations stay, because the controller reports them."""
    metadata = service.metadata
    claimed = any(each.manager == CLAIM_MANAGER for each in metadata.managed_fields)
    annotations = metadata.annotations
    if LAST_APPLIED_ANNOTATION in annotations:
        annotations = {
            name: text for name, text in annotations.items() if name != LAST_APPLIED_ANNOTATION
        }
    kept = msgspec.structs.replace(
        metadata, annotations=annotations, managed_fields=_CLAIMED if claimed else ()
    )
    return msgspec.structs.replace(service, metadata=kept)


def balanced_service(service: Service) -> Service | None:
    """Return what a gateway reads of a Service; None if it has no load balancer."""
    return _served(service, selector=True) if service.spec.type == "LoadBalancer" else None


def node_service(service: Service) -> Service | None:
    """Return what a service proxy reads of a Service; None if it does not serve the Service, by the
    rules of kube-proxy."""
    labels = service.metadata.labels
    if service.spec.type == "ExternalName" or SERVICE_PROXY_NAME_LABEL in labels:
        return None
    return _served(service, selector=False)


def published_service(service: Service) -> Service | None:
    """Return what a node that only terminates tunnels reads of a Service; None if the Service
    cannot have load-balancer addresses."""
    return node_service(service) if service.spec.type == "LoadBalancer" else None


CONTROLLER = Projection(whole_service, of_slice, of_node)
CLOUD_CONTROLLER = Projection(whole_service, of_slice, of_labelled_node)
GATEWAY = Projection(
    balanced_service,
    of_slice,
    functools.partial(of_node, labels=(EXCLUDE_LABEL, ANNOUNCE_LABEL)),
)
NODE = Projection(
    node_service,
    functools.partial(of_slice, hints=True),
    functools.partial(of_node, labels=(ZONE_LABEL,)),
)
TUNNEL_NODE = Projection(published_service, None, of_node)
"""For a node that only terminates tunnels, because kube-proxy is its service proxy."""


def of_controller(config: Config) -> Projection:
    """Return the projection of a controller with this configuration."""
    projection = CONTROLLER if config.octavia is None else CLOUD_CONTROLLER
    return including_excluded(projection) if config.announce.ignore_exclude_label else projection


def including_excluded(projection: Projection) -> Projection:
    """Return a projection in which no Node has the label that excludes it from the traffic of load
    balancers."""

    def unlabelled(node: Node) -> Node | None:
        found = projection.node(node)
        return without_exclude_label(found) if found is not None else None

    return msgspec.structs.replace(projection, node=unlabelled)


def without_exclude_label(node: Node) -> Node:
    """Return the Node without the label that excludes it from the traffic of load balancers."""
    labels = node.metadata.labels
    if EXCLUDE_LABEL not in labels:
        return node
    left = {name: each for name, each in labels.items() if name != EXCLUDE_LABEL}
    return msgspec.structs.replace(
        node, metadata=msgspec.structs.replace(node.metadata, labels=left)
    )


def _served(service: Service, *, selector: bool) -> Service:
    """Return the fields that a role reads if it serves Services but does not write them."""
    metadata, spec = service.metadata, service.spec
    annotations = _entries(
        metadata.annotations, (SOURCE_RANGES_ANNOTATION, *DRAIN_TIMEOUT, *PROXY_ANNOTATIONS)
    )
    claimed = bool(annotations) and bool(claimed_class(service))
    if claimed:
        # If one of these annotations is not understood, its last value is in force.
        annotations = {**annotations, **_entries(metadata.annotations, (CLASS_ANNOTATION, RECORD))}
    return Service(
        ServiceMeta(
            metadata.name,
            sys.intern(metadata.namespace),
            uid=metadata.uid,
            labels=_entries(metadata.labels, (SERVICE_PROXY_NAME_LABEL,)),
            annotations=annotations,
            deletion_timestamp=metadata.deletion_timestamp,
            creation_timestamp=metadata.creation_timestamp,
            managed_fields=_CLAIMED if claimed else (),
        ),
        msgspec.structs.replace(
            spec,
            selector=spec.selector if selector else None,
            cluster_ip="" if spec.cluster_ips else spec.cluster_ip,
        ),
        ServiceStatus(service.status.load_balancer),
    )


_NONE: Mapping[str, str] = {}


def _entries(texts: Mapping[str, str], names: Collection[str]) -> Mapping[str, str]:
    """Return the entries with these names. An empty result is one shared mapping, because each
    empty dict takes 64 bytes."""
    return {name: texts[name] for name in names if name in texts} or _NONE


def _endpoint(endpoint: Endpoint, hints: bool) -> Endpoint:
    """Return an endpoint with its first address only, as consumers must ignore the others
    (EndpointSlice API reference). Equal node names and equal conditions share one object."""
    conditions = endpoint.conditions
    return Endpoint(
        endpoint.addresses[:1],
        _conditions(conditions.ready, conditions.serving, conditions.terminating),
        sys.intern(endpoint.node_name) if endpoint.node_name is not None else None,
        endpoint.hints if hints else None,
    )


@functools.cache
def _conditions(
    ready: bool | None, serving: bool | None, terminating: bool | None
) -> EndpointConditions:
    return EndpointConditions(ready, serving, terminating)
