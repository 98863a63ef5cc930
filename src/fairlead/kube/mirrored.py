"""The EndpointSlices that the control plane makes of Endpoints objects. Pure.

In: an Endpoints object, and the Services and EndpointSlices beside it. Out: EndpointSlices with the
same addresses. Follows the EndpointSlice mirroring controller of Kubernetes 1.36: only Endpoints of
a Service without a selector are mirrored, at most 1,000 addresses of each subset, and not with the
label or the annotation that prevent it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from fairlead.kube.networks import read_address
from fairlead.kube.objects import (
    SERVICE_NAME_LABEL,
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    ObjectMeta,
    Service,
)
from fairlead.net.address import family_of

_MANAGED_BY: Final = "endpointslice.kubernetes.io/managed-by"
_CONTROLLER: Final = "endpointslicemirroring-controller.k8s.io"
_SKIP: Final = "endpointslice.kubernetes.io/skip-mirror"
_LEADER: Final = "control-plane.alpha.kubernetes.io/leader"
_MAX_ADDRESSES: Final = 1000

Object = Mapping[str, Any]


def awaiting(
    services: Iterable[Service], slices: Iterable[EndpointSlice]
) -> Collection[tuple[str, str]]:
    """Return the Services whose Endpoints the control plane mirrors, and has not mirrored yet."""
    done = {each.service for each in slices if each.metadata.labels.get(_MANAGED_BY) == _CONTROLLER}
    return {each.key for each in services if not each.spec.selector and each.key not in done}


def is_mirrored(endpoints: Object, awaited: Collection[tuple[str, str]]) -> bool:
    """Return whether the control plane mirrors an Endpoints object. `awaited`: see `awaiting`."""
    metadata = endpoints["metadata"]
    skipped = (metadata.get("labels") or {}).get(_SKIP) == "true"
    if skipped or _LEADER in (metadata.get("annotations") or {}):
        return False
    return (metadata["namespace"], metadata["name"]) in awaited


def mirrors(endpoints: Object) -> Iterator[EndpointSlice]:
    """Yield the EndpointSlices: one for each subset and address family."""
    metadata = endpoints["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    labels = {
        **(metadata.get("labels") or {}),
        SERVICE_NAME_LABEL: name,
        _MANAGED_BY: _CONTROLLER,
    }
    for number, subset in enumerate(endpoints.get("subsets") or ()):
        ports = tuple(
            EndpointPort(port.get("name", ""), port.get("port", 0), port.get("protocol") or "TCP")
            for port in subset.get("ports") or ()
        )
        found = list(_endpoints(subset))[:_MAX_ADDRESSES]
        for family in ("IPv4", "IPv6"):
            own = tuple(each for each in found if family_of(each.addresses[0]) == family)
            if own:
                meta = ObjectMeta(f"{name}-{number}-{family.lower()}", namespace, labels=labels)
                yield EndpointSlice(meta, family, own, ports)


def _endpoints(subset: Object) -> Iterator[Endpoint]:
    for field, ready in (("addresses", True), ("notReadyAddresses", False)):
        for each in subset.get(field) or ():
            if (address := read_address(each.get("ip", ""))) is not None:
                yield Endpoint((address,), EndpointConditions(ready), each.get("nodeName"))
