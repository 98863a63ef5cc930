"""Server-side printing: the Table that `kubectl get` shows for each kind. Pure.

In: objects and the time. Out: a `meta.k8s.io/v1` Table. Columns, their order and the texts in the
cells are those of the API server (pkg/printers/internalversion); `-o wide` shows columns of
priority 1.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver import columns
from fairlead.lab.apiserver.kinds import (
    CONFIG_MAPS,
    CUSTOM_RESOURCE_DEFINITIONS,
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    Definition,
    Kind,
)

Cells = list[Any]
Fields = Mapping[str, Any]


def table(
    kind: Kind,
    objects: Iterable[Object],
    metadata: Object,
    now: datetime,
    include: str = "Metadata",
) -> Object:
    """Return a Table of these objects. `include` is the part of the object in each row: `None`,
    `Metadata` or `Object`."""
    if kind.custom is not None:
        return _custom_table(kind.custom, objects, metadata, now, include)
    names, cells = _PRINTERS[kind]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [_column(name) for name in names],
        "rows": [_row(obj, cells(obj, now), include) for obj in objects],
    }


def _custom_table(
    custom: Definition, objects: Iterable[Object], metadata: Object, now: datetime, include: str
) -> Object:
    shown = [
        _column(each.name) | {"type": each.type, "priority": each.priority}
        for each in custom.columns
    ]
    rows = [
        _row(obj, columns.cells(custom.columns, obj, lambda stamp: age(stamp, now)), include)
        for obj in objects
    ]
    head = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return head | {"columnDefinitions": [_column("Name"), *shown], "rows": rows}


def _column(name: str) -> Object:
    wide, name = name.startswith("+"), name.removeprefix("+")
    sort = "integer" if name == "Restarts" else "string"
    return {
        "name": name,
        "type": sort,
        "format": "name" if name == "Name" else "",
        "description": "",
        "priority": 1 if wide else 0,
    }


def _row(obj: Object, cells: Cells, include: str) -> Object:
    row: Object = {"cells": cells}
    if include == "Object":
        row["object"] = obj
    elif include != "None":
        row["object"] = {
            "kind": "PartialObjectMetadata",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": obj["metadata"],
        }
    return row


def age(stamp: str | None, now: datetime) -> str:
    """Return the time since an RFC 3339 timestamp in kubectl's format: `5s`, `3m20s`, `2d4h`."""
    if not stamp:
        return "<unknown>"
    then = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    return duration(
        max(0, int((now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()))
    )


def duration(seconds: int) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return _pair(minutes, "m", seconds % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _pair(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _pair(days, "d", hours % 24, "h")
    if days < 730:
        return f"{days}d"
    return _pair(days // 365, "y", days % 365, "d") if days < 365 * 8 else f"{days // 365}y"


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"


def _joined(values: Iterable[str], empty: str = "<none>") -> str:
    return ",".join(values) or empty


def _service(service: Object, now: datetime) -> Cells:
    spec, metadata = service["spec"], service["metadata"]
    ports = [
        f"{port['port']}:{port['nodePort']}/{port['protocol']}"
        if port.get("nodePort")
        else f"{port['port']}/{port['protocol']}"
        for port in spec.get("ports") or []
    ]
    selector = [f"{key}={value}" for key, value in sorted((spec.get("selector") or {}).items())]
    return [
        metadata["name"],
        spec["type"],
        spec.get("clusterIP") or "<none>",
        _external_address(service),
        _joined(ports),
        age(metadata["creationTimestamp"], now),
        _joined(selector),
    ]


def _external_address(service: Object) -> str:
    spec = service["spec"]
    external = spec.get("externalIPs") or []
    if spec["type"] == "ExternalName":
        return str(spec.get("externalName", ""))
    if spec["type"] != "LoadBalancer":
        return _joined(external)
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
    published = ",".join(
        sorted({entry.get("ip") or entry.get("hostname") or "" for entry in ingress} - {""})
    )
    return _joined([*([published] if published else []), *external], "<pending>")


def _pod(pod: Object, now: datetime) -> Cells:
    spec, status, metadata = pod["spec"], pod.get("status") or {}, pod["metadata"]
    statuses = status.get("containerStatuses") or []
    ready = sum(bool(item.get("ready")) for item in statuses)
    gates = spec.get("readinessGates") or []
    true = {item["type"] for item in status.get("conditions") or [] if item.get("status") == "True"}
    addresses = [item["ip"] for item in status.get("podIPs") or []] or [
        status.get("podIP") or "<none>"
    ]
    return [
        metadata["name"],
        f"{ready}/{len(spec.get('containers') or [])}",
        _pod_state(pod),
        str(sum(item.get("restartCount", 0) for item in statuses)),
        age(metadata["creationTimestamp"], now),
        addresses[0],
        spec.get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        f"{sum(gate['conditionType'] in true for gate in gates)}/{len(gates)}"
        if gates
        else "<none>",
    ]


def _pod_state(pod: Object) -> str:
    status = pod.get("status") or {}
    state = status.get("reason") or status.get("phase") or "Unknown"
    for item in reversed(status.get("containerStatuses") or []):
        current = item.get("state") or {}
        state = (
            (current.get("waiting") or {}).get("reason")
            or (current.get("terminated") or {}).get("reason")
            or state
        )
    return "Terminating" if pod["metadata"].get("deletionTimestamp") else state


def _node(node: Object, now: datetime) -> Cells:
    metadata, status = node["metadata"], node.get("status") or {}
    ready = next(
        (item["status"] for item in status.get("conditions") or [] if item["type"] == "Ready"), None
    )
    states = ["Unknown" if ready is None else "Ready" if ready == "True" else "NotReady"]
    if node["spec"].get("unschedulable"):
        states.append("SchedulingDisabled")
    prefix = "node-role.kubernetes.io/"
    roles = {
        key.removeprefix(prefix) for key in metadata.get("labels") or {} if key.startswith(prefix)
    } - {""}
    info = status.get("nodeInfo") or {}
    return [
        metadata["name"],
        ",".join(states),
        _joined(sorted(roles)),
        age(metadata["creationTimestamp"], now),
        info.get("kubeletVersion", ""),
        _node_address(status, "InternalIP"),
        _node_address(status, "ExternalIP"),
        info.get("osImage") or "<unknown>",
        info.get("kernelVersion") or "<unknown>",
        info.get("containerRuntimeVersion") or "<unknown>",
    ]


def _node_address(status: Fields, sort: str) -> str:
    return next(
        (item["address"] for item in status.get("addresses") or [] if item["type"] == sort),
        "<none>",
    )


def _endpoints(endpoints: Object, now: datetime) -> Cells:
    """Print only ready addresses. An address without ports is printed without a port."""
    ready = [
        f"[{address['ip']}]{port}" if port and ":" in address["ip"] else f"{address['ip']}{port}"
        for subset in endpoints.get("subsets") or []
        for port in [f":{port['port']}" for port in subset.get("ports") or []] or [""]
        for address in subset.get("addresses") or []
    ]
    metadata = endpoints["metadata"]
    return [metadata["name"], _first(ready, 3, "<none>"), age(metadata["creationTimestamp"], now)]


def _endpoint_slice(endpoint_slice: Object, now: datetime) -> Cells:
    ports = [str(port.get("port", "*")) for port in endpoint_slice.get("ports") or []]
    addresses = [
        endpoint["addresses"][0]
        for endpoint in endpoint_slice.get("endpoints") or []
        if endpoint.get("addresses")
    ]
    metadata = endpoint_slice["metadata"]
    return [
        metadata["name"],
        endpoint_slice.get("addressType", ""),
        _first(ports, 3, "<unset>"),
        _first(addresses, 3, "<unset>"),
        age(metadata["creationTimestamp"], now),
    ]


def _first(values: Sequence[str], count: int, empty: str) -> str:
    rest = len(values) - count
    return ",".join(values[:count]) + f" + {rest} more..." if rest > 0 else _joined(values, empty)


def _event(event: Object, now: datetime) -> Cells:
    about, source = event.get("involvedObject") or {}, event.get("source") or {}
    series = event.get("series") or {}
    first = event.get("firstTimestamp") or event.get("eventTime")
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or first
    subject = about.get("kind", "").lower() + (f"/{about['name']}" if about.get("name") else "")
    component = source.get("component") or event.get("reportingComponent") or ""
    return [
        age(last, now),
        event.get("type", ""),
        event.get("reason", ""),
        subject,
        about.get("fieldPath", ""),
        _joined(
            filter(None, (component, source.get("host") or event.get("reportingInstance") or "")),
            "",
        ),
        (event.get("message") or "").strip(),
        age(first, now),
        str(series.get("count") or event.get("count") or 1),
        event["metadata"]["name"],
    ]


def _lease(lease: Object, now: datetime) -> Cells:
    holder = (lease.get("spec") or {}).get("holderIdentity") or ""
    return [lease["metadata"]["name"], holder, age(lease["metadata"]["creationTimestamp"], now)]


def _namespace(namespace: Object, now: datetime) -> Cells:
    metadata = namespace["metadata"]
    return [metadata["name"], namespace["status"]["phase"], age(metadata["creationTimestamp"], now)]


def _config_map(config_map: Object, now: datetime) -> Cells:
    entries = len(config_map.get("data") or {}) + len(config_map.get("binaryData") or {})
    return [
        config_map["metadata"]["name"],
        str(entries),
        age(config_map["metadata"]["creationTimestamp"], now),
    ]


def _definition(crd: Object, now: datetime) -> Cells:
    return [crd["metadata"]["name"], crd["metadata"]["creationTimestamp"]]


def _columns(text: str) -> tuple[str, ...]:
    """Split column names at `|`. A `+` marks a column of `-o wide`."""
    return tuple(name.strip() for name in text.split("|"))


_PRINTERS: Final[dict[Kind, tuple[tuple[str, ...], Callable[[Object, datetime], Cells]]]] = {
    SERVICES: (
        _columns("Name | Type | Cluster-IP | External-IP | Port(s) | Age | +Selector"),
        _service,
    ),
    PODS: (
        _columns(
            "Name | Ready | Status | Restarts | Age | +IP | +Node | +Nominated Node | +Readiness "
            "Gates"
        ),
        _pod,
    ),
    NODES: (
        _columns(
            "Name | Status | Roles | Age | Version"
            "| +Internal-IP | +External-IP | +OS-Image | +Kernel-Version | +Container-Runtime"
        ),
        _node,
    ),
    ENDPOINTS: (_columns("Name | Endpoints | Age"), _endpoints),
    ENDPOINT_SLICES: (_columns("Name | AddressType | Ports | Endpoints | Age"), _endpoint_slice),
    EVENTS: (
        _columns(
            "Last Seen | Type | Reason | Object | +Subobject | +Source | Message | +First Seen | "
            "+Count | +Name"
        ),
        _event,
    ),
    LEASES: (_columns("Name | Holder | Age"), _lease),
    CONFIG_MAPS: (_columns("Name | Data | Age"), _config_map),
    NAMESPACES: (_columns("Name | Status | Age"), _namespace),
    CUSTOM_RESOURCE_DEFINITIONS: (_columns("Name | Created At"), _definition),
}
