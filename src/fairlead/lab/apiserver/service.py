"""What the API server makes of a Service that is written: defaults, what it keeps, what it drops.

In: a Service as a client sent it, the state that it replaces, the cluster's address families. Out: the same object,
changed in place, ready for allocation and checking.
Follows the API server's defaulting (apis/core/v1/defaults.go) and Service strategy; rules A1 and A2 of the tests.
"""

from collections.abc import Sequence

from fairlead.lab.apiserver.allocation import needs_health_check, needs_node_ports, node_ports_of
from fairlead.lab.apiserver.failure import Object, invalid, rejected
from fairlead.lab.apiserver.names import family_of
from fairlead.lab.apiserver.service_rules import check_cluster_addresses

_DEFAULT_AFFINITY_TIMEOUT_S = 10800


def externally_accessible(service: Object) -> bool:
    spec = service["spec"]
    return spec.get("type") in ("LoadBalancer", "NodePort") or (
        spec.get("type") == "ClusterIP" and bool(spec.get("externalIPs"))
    )


def set_defaults(service: Object) -> None:
    """Fill in what the API defaults whatever the cluster. It may run any number of times."""
    spec = service["spec"]
    _drop_empty(spec)
    spec.setdefault("sessionAffinity", "None")
    if spec["sessionAffinity"] == "None":
        spec.pop("sessionAffinityConfig", None)
    elif spec["sessionAffinity"] == "ClientIP":
        config = spec.get("sessionAffinityConfig") or {}
        client = config.get("clientIP") or {}
        client = client | {"timeoutSeconds": client.get("timeoutSeconds", _DEFAULT_AFFINITY_TIMEOUT_S)}
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
    """Empty stands for absent in these fields, as they are omitted when empty."""
    for name in ("type", "sessionAffinity", "externalTrafficPolicy", "clusterIP", "healthCheckNodePort", "externalName"):
        if spec.get(name) in ("", 0):
            del spec[name]
    for name in ("clusterIPs", "ipFamilies", "externalIPs", "loadBalancerSourceRanges", "ports"):
        if spec.get(name) == []:
            del spec[name]
    for port in spec.get("ports") or []:
        if port.get("nodePort") == 0:
            del port["nodePort"]


def set_status_defaults(service: Object) -> None:
    """`loadBalancer` is always there, even if nobody owns anything in it."""
    status = {"loadBalancer": {}} | (service.get("status") or {})
    service["status"] = status
    for ingress in (status["loadBalancer"] or {}).get("ingress") or []:
        if ingress.get("ip") and not ingress.get("ipMode"):
            ingress["ipMode"] = "VIP"


def prepare_create(service: Object) -> None:
    service["status"] = {"loadBalancer": {}}


def prepare_update(service: Object, old: Object) -> None:
    """Keep what the client need not repeat; drop what the new type has no use for and the client left as it was."""
    _keep_allocated(service, old)
    _match_cluster_addresses(service, old)
    _drop_for_type(service, old)
    service["status"] = old.get("status", {"loadBalancer": {}})
    if service["spec"].get("type") != "LoadBalancer":
        status = {name: value for name, value in service["status"].items() if name != "loadBalancer"}
        service["status"] = status | {"loadBalancer": {}}


def _wants_node_ports(service: Object) -> bool:
    return needs_node_ports(service) and (
        service["spec"]["type"] == "NodePort" or service["spec"].get("allocateLoadBalancerNodePorts") is not False
    )


def _has_cluster_addresses(service: Object) -> bool:
    return bool(service["spec"].get("type") != "ExternalName")


def _keep_allocated(service: Object, old: Object) -> None:
    spec, before = service["spec"], old["spec"]
    if _has_cluster_addresses(service) and _has_cluster_addresses(old):
        if "clusterIP" not in spec and "clusterIP" in before:
            spec["clusterIP"] = before["clusterIP"]
            if "clusterIPs" not in spec:
                spec["clusterIPs"] = list(before["clusterIPs"])
        elif "clusterIPs" not in spec and spec.get("clusterIP") == before.get("clusterIP"):
            spec["clusterIPs"] = list(before.get("clusterIPs") or [])
    if _wants_node_ports(service) and _wants_node_ports(old):
        held = {port.get("name", ""): port.get("nodePort", 0) for port in before.get("ports") or []}
        used = set(node_ports_of(service)) & set(node_ports_of(old))
        for port in spec.get("ports") or []:
            known = held.get(port.get("name", ""), 0)
            if not port.get("nodePort") and known and known not in used:
                port["nodePort"] = known
    if needs_health_check(service) and needs_health_check(old) and not spec.get("healthCheckNodePort"):
        spec["healthCheckNodePort"] = before.get("healthCheckNodePort", 0)


def _match_cluster_addresses(service: Object, old: Object | None) -> None:
    """Make `clusterIP` and `clusterIPs` agree, for clients that know only the older one."""
    spec = service["spec"]
    if old is None:
        if spec.get("clusterIP") and "clusterIPs" not in spec:
            spec["clusterIPs"] = [spec["clusterIP"]]
        return
    before = old["spec"]
    same = spec.get("clusterIP") == before.get("clusterIP")
    if not same and spec.get("clusterIPs") == before.get("clusterIPs"):
        if not spec.get("clusterIP"):
            spec.pop("clusterIPs", None)
        else:
            spec["clusterIPs"] = [spec["clusterIP"]]


def _drop_for_type(service: Object, old: Object) -> None:
    spec, before = service["spec"], old["spec"]
    if _has_cluster_addresses(old) and not _has_cluster_addresses(service):
        if spec.get("clusterIPs") == before.get("clusterIPs"):
            spec.pop("clusterIP", None)
            spec.pop("clusterIPs", None)
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


def set_families(service: Object, old: Object | None, families: Sequence[str]) -> None:
    """Settle `ipFamilyPolicy` and `ipFamilies` from what the client said, what was, and what the cluster has.

    Raises ApiFailure 422 if they contradict each other or the cluster.
    """
    _match_cluster_addresses(service, None)
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return
    headless_alone = spec.get("clusterIP") == "None" and not spec.get("selector")
    before = old["spec"] if old else {}
    if "ipFamilyPolicy" not in spec:
        spec["ipFamilyPolicy"] = before.get("ipFamilyPolicy") or ("RequireDualStack" if headless_alone else "SingleStack")
    causes = check_cluster_addresses(service)
    if causes:
        raise rejected("Service", "", service["metadata"].get("name", ""), causes)
    if old is not None and "ipFamilies" not in spec and before.get("ipFamilies"):
        spec["ipFamilies"] = list(before["ipFamilies"])
    if spec["ipFamilyPolicy"] == "SingleStack" and old is not None:
        if spec.get("clusterIPs") == before.get("clusterIPs") and len(spec.get("clusterIPs") or []) > 1:
            spec["clusterIPs"] = spec["clusterIPs"][:1]
        if spec.get("ipFamilies") == before.get("ipFamilies") and len(spec.get("ipFamilies") or []) > 1:
            spec["ipFamilies"] = spec["ipFamilies"][:1]
    _infer_families(service, families, headless_alone=headless_alone, reduced_from=before)


def _infer_families(service: Object, families: Sequence[str], *, headless_alone: bool, reduced_from: Object) -> None:
    spec = service["spec"]
    policy = spec["ipFamilyPolicy"]
    wanted = list(spec.get("ipFamilies") or [])
    addresses = [address for address in spec.get("clusterIPs") or [] if address != "None"]
    causes = []
    if policy == "SingleStack":
        rule = "must be 'RequireDualStack' or 'PreferDualStack' when multiple {} are specified"
        if len(addresses) == 2:
            causes.append(invalid("spec.ipFamilyPolicy", policy, rule.format("cluster IPs")))
        if len(wanted) == 2:
            causes.append(invalid("spec.ipFamilyPolicy", policy, rule.format("IP families")))
    else:
        rule = "must be 'SingleStack' to release the secondary {}"
        if 0 < len(addresses) < len(reduced_from.get("clusterIPs") or []):
            causes.append(invalid("spec.ipFamilyPolicy", policy, rule.format("cluster IP")))
        if 0 < len(wanted) < len(reduced_from.get("ipFamilies") or []):
            causes.append(invalid("spec.ipFamilyPolicy", policy, rule.format("IP family")))
    for place, address in enumerate(addresses[len(wanted) :], len(wanted)):
        if family_of(address) not in families:
            told = f"{family_of(address)} is not configured on this cluster"
            causes.append(invalid(f"spec.clusterIPs[{place}]", spec["clusterIPs"], told))
        wanted.append(family_of(address))
    if policy == "RequireDualStack" and len(families) < 2 and not headless_alone:
        causes.append(invalid("spec.ipFamilyPolicy", policy, "this cluster is not configured for dual-stack services"))
    for place, family in enumerate(wanted):
        if family not in families and not headless_alone and not causes:
            causes.append(invalid(f"spec.ipFamilies[{place}]", family, "not configured on this cluster"))
    if causes:
        raise rejected("Service", "", service["metadata"].get("name", ""), causes)
    wanted = wanted or [families[0]]
    if (
        policy != "SingleStack"
        and len(wanted) == 1
        and (headless_alone or len(families) == 2)
        and not _settled(spec, reduced_from)
    ):
        wanted.append("IPv6" if wanted[0] == "IPv4" else "IPv4")
    spec["ipFamilies"] = wanted


def _settled(spec: Object, before: Object) -> bool:
    """PreferDualStack with one family that was so before: a cluster that became dual-stack does not change it."""
    same = ("ipFamilyPolicy", "ipFamilies", "clusterIPs")
    return (
        spec["ipFamilyPolicy"] == "PreferDualStack"
        and bool(before)
        and all(spec.get(name) == before.get(name) for name in same)
    )
