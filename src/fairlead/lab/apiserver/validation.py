"""Validation of metadata of all kinds, and defaults and validation of the kinds other than
Services.

In: an object that is being written, and the object that it replaces. Out: the object with defaults
(in place), and the errors; empty if it is valid. Only the rules that a load-balancer controller may
violate are implemented; every field that is set is kept. Messages follow the API server's
apis/*/validation.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from fairlead.kube.rules import metadata, names
from fairlead.kube.rules.causes import Cause, Object, forbidden, invalid, required, unsupported
from fairlead.kube.rules.endpoints import check_slice
from fairlead.lab.apiserver import definitions, structural
from fairlead.lab.apiserver.kinds import (
    CUSTOM_RESOURCE_DEFINITIONS,
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    Kind,
)

_NAME_RULES: Final[dict[Kind, Callable[[str], list[str]]]] = {
    SERVICES: names.dns_label_name,
    NAMESPACES: names.dns_label_name,
}
_POD_CHANGEABLE: Final = (
    "activeDeadlineSeconds",
    "tolerations",
    "terminationGracePeriodSeconds",
    "schedulingGates",
)
_POD_RULE: Final = (
    "pod updates may not change fields other than "
    "`spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def check_metadata(kind: Kind, obj: Object) -> Iterable[Cause]:
    return metadata.check_metadata(obj, _NAME_RULES.get(kind, names.dns_subdomain))


def check_metadata_update(kind: Kind, obj: Object, old: Object) -> Iterable[Cause]:
    metadata, before = obj["metadata"], old["metadata"]
    if before.get("deletionTimestamp"):
        new = [
            text
            for text in metadata.get("finalizers") or []
            if text not in (before.get("finalizers") or [])
        ]
        if new:
            shown = ", ".join(f'"{text}"' for text in new)
            detail = (
                "no new finalizers can be added if the object is being deleted, found new "
                f"finalizers []string{{{shown}}}"
            )
            yield forbidden("metadata.finalizers", detail)
    yield from check_metadata(kind, obj)


def set_defaults(kind: Kind, obj: Object) -> None:
    """Set the API's defaults for kinds other than Services."""
    if kind.custom is not None:
        structural.prune_and_default(kind.custom.schema, obj)
    elif kind is PODS:
        _set_pod_defaults(obj)
    elif kind is NAMESPACES:
        obj.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
        labels = obj["metadata"].setdefault("labels", {})
        if obj["metadata"].get("name"):
            labels["kubernetes.io/metadata.name"] = obj["metadata"]["name"]
    elif kind is ENDPOINT_SLICES:
        for port in obj.get("ports") or []:
            port.setdefault("name", "")
            port.setdefault("protocol", "TCP")
    elif kind is ENDPOINTS:
        for subset in obj.get("subsets") or []:
            for port in subset.get("ports") or []:
                port.setdefault("protocol", "TCP")


def _set_pod_defaults(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("securityContext", {})
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        tag = str(container.get("image", "")).rpartition("/")[2].partition(":")[2]
        container.setdefault(
            "imagePullPolicy", "Always" if tag in ("", "latest") else "IfNotPresent"
        )
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("resources", {})
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")


def first_status(kind: Kind, obj: Object) -> Object | None:
    """Return the status of a new object, whatever the client sent. None keeps the client's, as for
    a Node."""
    if kind is PODS:
        return {"phase": "Pending", "qosClass": "BestEffort"}
    if kind is NAMESPACES:
        return {"phase": "Active"}
    return None


def check(kind: Kind, obj: Object) -> Iterable[Cause]:
    """Return the errors of an object, except those of its metadata."""
    if kind is PODS:
        return _check_pod(obj)
    if kind is NODES:
        return _check_node(obj)
    if kind is ENDPOINT_SLICES:
        return check_slice(obj)
    if kind is LEASES:
        return _check_lease(obj)
    if kind is EVENTS:
        return _check_event(obj)
    if kind is CUSTOM_RESOURCE_DEFINITIONS:
        return definitions.check(obj)
    if kind.custom is not None:
        return structural.check(kind.custom.schema, obj, None)
    return ()


def check_update(kind: Kind, obj: Object, old: Object) -> Iterable[Cause]:
    """Yield the errors of an update and of the updated object."""
    if kind is PODS and _fixed(obj["spec"]) != _fixed(old["spec"]):
        yield forbidden("spec", _POD_RULE)
    if kind is ENDPOINT_SLICES and obj.get("addressType") != old.get("addressType"):
        yield invalid("addressType", obj.get("addressType"), "field is immutable")
    if kind is NODES:
        before, now = old["spec"].get("podCIDRs") or [], obj["spec"].get("podCIDRs") or []
        if before and now != before:
            yield forbidden(
                "spec.podCIDRs", 'node updates may not change podCIDR except from "" to valid'
            )
    if kind.custom is not None:
        yield from structural.check(kind.custom.schema, obj, old)
    else:
        yield from check(kind, obj)


def _fixed(spec: Object) -> Object:
    """Return the immutable part of a pod's spec."""
    fixed = {name: value for name, value in spec.items() if name not in _POD_CHANGEABLE}
    for field in ("containers", "initContainers"):
        if field in fixed:
            fixed[field] = [
                {name: value for name, value in item.items() if name != "image"}
                for item in fixed[field]
            ]
    return fixed


def _check_pod(pod: Object) -> Iterable[Cause]:
    containers = pod["spec"].get("containers") or []
    if not containers:
        yield required("spec.containers")
    seen: set[str] = set()
    for index, container in enumerate(containers):
        path = f"spec.containers[{index}]"
        name = container.get("name") or ""
        if not name:
            yield required(f"{path}.name")
        else:
            yield from (invalid(f"{path}.name", name, problem) for problem in names.dns_label(name))
        if name and name in seen:
            yield Cause("FieldValueDuplicate", f"{path}.name", f'Duplicate value: "{name}"')
        seen.add(name)
        if not container.get("image"):
            yield required(f"{path}.image")
        yield from _check_container_ports(container.get("ports") or [], f"{path}.ports")


def _check_container_ports(ports: list[dict[str, Any]], path: str) -> Iterable[Cause]:
    for index, port in enumerate(ports):
        number, name = port.get("containerPort") or 0, port.get("name") or ""
        if not number:
            yield required(f"{path}[{index}].containerPort")
        else:
            yield from (
                invalid(f"{path}[{index}].containerPort", number, problem)
                for problem in names.port_number(number)
            )
        if name:
            yield from (
                invalid(f"{path}[{index}].name", name, problem) for problem in names.port_name(name)
            )


def _check_node(node: Object) -> Iterable[Cause]:
    spec = node.setdefault("spec", {})
    for index, text in enumerate(spec.get("podCIDRs") or []):
        yield from (
            invalid(f"spec.podCIDRs[{index}]", text, problem) for problem in names.cidr(text)
        )
    for index, taint in enumerate(spec.get("taints") or []):
        path = f"metadata.taints[{index}]"
        yield from (
            invalid(f"{path}.key", taint.get("key", ""), problem)
            for problem in names.qualified_name(taint.get("key", ""))
        )
        effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
        if not taint.get("effect"):
            yield required(f"{path}.effect")
        elif taint["effect"] not in effects:
            yield unsupported(f"{path}.effect", taint["effect"], effects)


def _check_lease(lease: Object) -> Iterable[Cause]:
    spec = lease.get("spec") or {}
    for field in ("leaseDurationSeconds", "leaseTransitions"):
        value = spec.get(field)
        limit = 1 if field == "leaseDurationSeconds" else 0
        if value is not None and value < limit:
            detail = "must be greater than 0" if limit else "must be greater than or equal to 0"
            yield invalid(f"spec.{field}", value, detail)


def _check_event(event: Object) -> Iterable[Cause]:
    namespace = (event.get("involvedObject") or {}).get("namespace", "")
    if namespace and namespace != event["metadata"]["namespace"]:
        yield invalid("involvedObject.namespace", namespace, "does not match event.namespace")
