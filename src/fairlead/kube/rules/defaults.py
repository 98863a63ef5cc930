"""Defaults of a Service that is written, and the fields that an update keeps or drops.

In: a Service as a client sent it, and the Service that it replaces. Out: the same object, modified
in place, ready for allocation and validation. Follows the API server's defaulting
(apis/core/v1/defaults.go) and Service strategy.
"""

from copy import deepcopy

from fairlead.kube.rules.allocation import needs_health_check, needs_node_ports, node_ports_of
from fairlead.kube.rules.causes import Object

_DEFAULT_AFFINITY_TIMEOUT_S = 10800


_OMITTED_WHEN_EMPTY = (
    *(
        "type",
        "sessionAffinity",
        "externalTrafficPolicy",
        "clusterIP",
        "healthCheckNodePort",
        "externalName",
    ),
    *(
        "clusterIPs",
        "ipFamilies",
        "externalIPs",
        "loadBalancerIP",
        "loadBalancerSourceRanges",
        "ports",
    ),
    *("publishNotReadyAddresses", "selector"),
)


def externally_accessible(service: Object) -> bool:
    spec = service["spec"]
    return spec.get("type") in ("LoadBalancer", "NodePort") or (
        spec.get("type") == "ClusterIP" and bool(spec.get("externalIPs"))
    )


def set_defaults(service: Object) -> None:
    """Set the defaults that do not depend on the cluster. Idempotent."""
    spec = service["spec"]
    _drop_empty(spec)
    spec.setdefault("sessionAffinity", "None")
    if spec["sessionAffinity"] == "None":
        spec.pop("sessionAffinityConfig", None)
    elif spec["sessionAffinity"] == "ClientIP":
        config = spec.get("sessionAffinityConfig") or {}
        client = config.get("clientIP") or {}
        client = client | {
            "timeoutSeconds": client.get("timeoutSeconds", _DEFAULT_AFFINITY_TIMEOUT_S)
        }
        spec["sessionAffinityConfig"] = {**config, "clientIP": client}
    spec.setdefault("type", "ClusterIP")
    for port in spec.get("ports") or []:
        if not port.get("protocol"):
            port["protocol"] = "TCP"
        if port.get("targetPort") in (None, 0, ""):
            port["targetPort"] = port.get("port", 0)
    if externally_accessible(service):
        spec.setdefault("externalTrafficPolicy", "Cluster")
    if spec["type"] in ("NodePort", "LoadBalancer", "ClusterIP"):
        spec.setdefault("internalTrafficPolicy", "Cluster")
    if spec["type"] == "LoadBalancer":
        spec.setdefault("allocateLoadBalancerNodePorts", True)
    set_status_defaults(service)


def _drop_empty(spec: Object) -> None:
    """Remove empty values of fields that the API omits when they are empty."""
    for name in _OMITTED_WHEN_EMPTY:
        if spec.get(name) in ("", 0, False, [], {}):
            del spec[name]
    for port in spec.get("ports") or []:
        if port.get("nodePort") == 0:
            del port["nodePort"]


def set_status_defaults(service: Object) -> None:
    """Set `loadBalancer`, which is always present, also without an owner; remove other empty
    fields."""
    status = {"loadBalancer": {}} | (service.get("status") or {})
    service["status"] = status
    balancer = status["loadBalancer"] or {}
    for ingress in balancer.get("ingress") or []:
        if ingress.get("ip") and not ingress.get("ipMode"):
            ingress["ipMode"] = "VIP"
        if ingress.get("ports") == []:
            del ingress["ports"]
    for owner, name in ((balancer, "ingress"), (status, "conditions")):
        if owner.get(name) == []:
            del owner[name]


def prepare_create(service: Object) -> None:
    service["status"] = {"loadBalancer": {}}


def prepare_update(service: Object, old: Object) -> None:
    """Keep the fields that a client need not repeat. Drop the fields that the new type does not use
    and that the client left unchanged."""
    _keep_allocated(service, old)
    _match_cluster_addresses(service, old)
    _drop_for_type(service, old)
    service["status"] = old.get("status", {"loadBalancer": {}})
    if service["spec"].get("type") != "LoadBalancer":
        status = {
            name: value for name, value in service["status"].items() if name != "loadBalancer"
        }
        service["status"] = status | {"loadBalancer": {}}


def _wants_node_ports(service: Object) -> bool:
    return needs_node_ports(service) and (
        service["spec"]["type"] == "NodePort"
        or service["spec"].get("allocateLoadBalancerNodePorts") is not False
    )


def _has_cluster_addresses(service: Object) -> bool:
    return bool(service["spec"].get("type") != "ExternalName")


def _keep_allocated(service: Object, old: Object) -> None:
    spec, before = service["spec"], old["spec"]
    if _has_cluster_addresses(service) and _has_cluster_addresses(old):
        for field in ("clusterIP", "clusterIPs"):
            if field not in spec and field in before:
                spec[field] = deepcopy(before[field])
    if _wants_node_ports(service) and _wants_node_ports(old):
        held = {port.get("name", ""): port.get("nodePort", 0) for port in before.get("ports") or []}
        used = set(node_ports_of(service)) & set(node_ports_of(old))
        for port in spec.get("ports") or []:
            known = held.get(port.get("name", ""), 0)
            if not port.get("nodePort") and known and known not in used:
                port["nodePort"] = known
    if (
        needs_health_check(service)
        and needs_health_check(old)
        and not spec.get("healthCheckNodePort")
    ):
        spec["healthCheckNodePort"] = before.get("healthCheckNodePort", 0)


def _match_cluster_addresses(service: Object, old: Object) -> None:
    """Make `clusterIP` and `clusterIPs` agree, for clients that know only the older field."""
    spec, before = service["spec"], old["spec"]
    if (
        "clusterIPs" not in spec
        and "clusterIPs" in before
        and spec.get("clusterIP") == before.get("clusterIP")
    ):
        spec["clusterIPs"] = list(before["clusterIPs"])
    if spec.get("clusterIP") != before.get("clusterIP") and spec.get("clusterIPs") == before.get(
        "clusterIPs"
    ):
        if spec.get("clusterIP"):
            spec["clusterIPs"] = [spec["clusterIP"]]
        else:
            spec.pop("clusterIPs", None)


def complete_addresses(service: Object) -> None:
    """Set `clusterIPs` for a Service that was written with `clusterIP` alone."""
    spec = service["spec"]
    if spec.get("clusterIP") and not spec.get("clusterIPs"):
        spec["clusterIPs"] = [spec["clusterIP"]]


def _drop_for_type(service: Object, old: Object) -> None:
    spec, before = service["spec"], old["spec"]
    if _has_cluster_addresses(old) and not _has_cluster_addresses(service):
        if all(spec.get(field) == before.get(field) for field in ("clusterIP", "clusterIPs")):
            _drop_same(spec, before, "clusterIP", "clusterIPs")
        _drop_same(spec, before, "ipFamilies", "ipFamilyPolicy")
    node_ports_same = set(node_ports_of(service)) <= set(node_ports_of(old))
    if needs_node_ports(old) and not needs_node_ports(service) and node_ports_same:
        for port in spec.get("ports") or []:
            port.pop("nodePort", None)
    if needs_health_check(old) and not needs_health_check(service):
        _drop_same(spec, before, "healthCheckNodePort")
    if before.get("type") == "LoadBalancer" != spec.get("type"):
        _drop_same(spec, before, "allocateLoadBalancerNodePorts", "loadBalancerClass")
    if externally_accessible(old) and not externally_accessible(service):
        _drop_same(spec, before, "externalTrafficPolicy")


def _drop_same(spec: Object, before: Object, *names: str) -> None:
    for name in names:
        if name in spec and spec[name] == before.get(name):
            del spec[name]
