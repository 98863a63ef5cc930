"""The validation of Services. Pure.

In: a Service with its defaults and allocations and, for an update, the Service that it replaces.
Out: the errors; empty if it is valid. Order and messages follow apis/core/validation of the API
server, because kubectl prints them unchanged.
"""

from collections.abc import Collection, Iterable
from typing import Any, Final

from fairlead.kube.objects import SOURCE_RANGES_ANNOTATION
from fairlead.kube.rules import names
from fairlead.kube.rules.causes import (
    Cause,
    Object,
    duplicate,
    forbidden,
    invalid,
    required,
    unsupported,
)

_TYPES: Final = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
PROTOCOLS: Final = ("TCP", "UDP", "SCTP")
_FAMILIES: Final = ("IPv4", "IPv6")
_FAMILY_POLICIES: Final = ("SingleStack", "PreferDualStack", "RequireDualStack")
_TRAFFIC_POLICIES: Final = ("Cluster", "Local")
_DISTRIBUTIONS: Final = ("PreferClose", "PreferSameZone", "PreferSameNode")
_ONLY_LOAD_BALANCER: Final = "may only be used when `type` is 'LoadBalancer'"
_ONLY_HEALTH_CHECK: Final = (
    "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
)
_MAX_AFFINITY_TIMEOUT_S: Final = 86400


def check_service(service: Object, old: Object | None = None) -> list[Cause]:
    """Return the errors of a Service. Addresses that `old`, which it replaces, has already are not
    checked again."""
    spec = service["spec"]
    return [
        *_check_requirements_of_type(spec),
        *_check_ports(spec),
        *_check_labels(spec.get("selector") or {}, "spec.selector"),
        *_check_affinity(spec),
        *check_cluster_addresses(service, old),
        *_check_external_addresses(spec, (old or {"spec": {}})["spec"].get("externalIPs") or ()),
        *([] if spec["type"] in _TYPES else [unsupported("spec.type", spec["type"], _TYPES)]),
        *_check_node_ports(spec),
        *_check_source_ranges(service),
        *_check_node_port_allocation(spec),
        *_check_class(spec),
        *_check_traffic_policies(spec),
    ]


def check_service_update(service: Object, old: Object) -> list[Cause]:
    """Return the errors of an update and of the updated Service."""
    spec, before = service["spec"], old["spec"]
    causes = [*_check_addresses_kept(spec, before), *_check_families_kept(spec, before)]
    both = spec.get("type") == before.get("type") == "LoadBalancer"
    if both and spec.get("loadBalancerClass") != before.get("loadBalancerClass"):
        causes.append(
            invalid(
                "spec.loadBalancerClass", spec.get("loadBalancerClass"), "may not change once set"
            )
        )
    # As in the API server, the class is checked as a change and as a value, so an error is reported
    # twice.
    causes.extend(_check_class(spec))
    local = (
        both and spec.get("externalTrafficPolicy") == before.get("externalTrafficPolicy") == "Local"
    )
    if local and spec.get("healthCheckNodePort") != before.get("healthCheckNodePort"):
        causes.append(forbidden("spec.healthCheckNodePort", "field is immutable"))
    return [*causes, *check_service(service, old)]


def check_service_status(service: Object, old: Object) -> list[Cause]:
    """Return the errors of `status.loadBalancer`. Addresses that were published before are not
    checked again."""
    balancer = (service.get("status") or {}).get("loadBalancer") or {}
    entries = balancer.get("ingress") or []
    if entries and service["spec"].get("type") != "LoadBalancer":
        return [
            forbidden(
                "status.loadBalancer.ingress", "may only be used when `spec.type` is 'LoadBalancer'"
            )
        ]
    known = {
        entry.get("ip")
        for entry in ((old.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
        if entry.get("ip")
    }
    return [
        cause
        for index, entry in enumerate(entries)
        for cause in _check_ingress(entry, known, f"status.loadBalancer.ingress[{index}]")
    ]


def _check_ingress(entry: Object, known: set[str | None], path: str) -> Iterable[Cause]:
    address, mode, hostname = entry.get("ip"), entry.get("ipMode"), entry.get("hostname")
    if address and address not in known:
        yield from (invalid(f"{path}.ip", address, problem) for problem in names.address(address))
    if address and mode is None:
        yield required(f"{path}.ipMode", "must be specified when `ip` is set")
    if not address and mode is not None:
        yield forbidden(f"{path}.ipMode", "may not be specified when `ip` is not set")
    elif mode is not None and mode not in ("VIP", "Proxy"):
        yield unsupported(f"{path}.ipMode", mode, ("VIP", "Proxy"))
    if hostname:
        yield from (
            invalid(f"{path}.hostname", hostname, problem)
            for problem in names.dns_subdomain(hostname)
        )
        if names.parse_address(hostname):
            yield invalid(f"{path}.hostname", hostname, "must be a DNS name, not an IP address")


def _check_requirements_of_type(spec: Object) -> Iterable[Cause]:
    kind, headless = spec["type"], _headless(spec)
    if not spec.get("ports") and not headless and kind != "ExternalName":
        yield required("spec.ports")
    if kind in ("LoadBalancer", "NodePort") and headless:
        yield invalid("spec.clusterIPs[0]", "None", f"may not be set to 'None' for {kind} services")
    if kind == "ExternalName":
        for field in ("clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if spec.get(field):
                yield forbidden(f"spec.{field}", "may not be set for ExternalName services")
        name = (spec.get("externalName") or "").removesuffix(".")
        if name:
            yield from (
                invalid("spec.externalName", name, problem) for problem in names.dns_subdomain(name)
            )
        else:
            yield required("spec.externalName")


def _check_ports(spec: Object) -> Iterable[Cause]:
    ports = spec.get("ports") or []
    seen_names: set[str] = set()
    for index, port in enumerate(ports):
        path = f"spec.ports[{index}]"
        name = port.get("name") or ""
        if name:
            yield from (invalid(f"{path}.name", name, problem) for problem in names.dns_label(name))
            if name in seen_names:
                yield duplicate(f"{path}.name", name)
            seen_names.add(name)
        elif len(ports) > 1:
            yield required(f"{path}.name")
        yield from _check_port(port, path)


def _check_port(port: Object, path: str) -> Iterable[Cause]:
    yield from (
        invalid(f"{path}.port", port.get("port", 0), problem)
        for problem in names.port_number(port.get("port", 0))
    )
    if port["protocol"] not in PROTOCOLS:
        yield unsupported(f"{path}.protocol", port["protocol"], PROTOCOLS)
    target = port.get("targetPort")
    if isinstance(target, str):
        yield from (
            invalid(f"{path}.targetPort", target, problem) for problem in names.port_name(target)
        )
    elif target is not None:
        yield from (
            invalid(f"{path}.targetPort", target, problem) for problem in names.port_number(target)
        )
    yield from check_app_protocol(port, path)


def check_app_protocol(port: Object, path: str) -> Iterable[Cause]:
    """Yield the errors of the appProtocol of a port of a Service or of endpoints."""
    if (application := port.get("appProtocol")) is not None:
        yield from (
            invalid(f"{path}.appProtocol", application, problem)
            for problem in names.qualified_name(application)
        )


def _check_labels(labels: dict[str, Any], path: str) -> Iterable[Cause]:
    for key, value in labels.items():
        yield from (invalid(path, key, problem) for problem in names.qualified_name(key))
        yield from (invalid(path, value, problem) for problem in names.label_value(value))


def _check_affinity(spec: Object) -> Iterable[Cause]:
    affinity, config = spec["sessionAffinity"], spec.get("sessionAffinityConfig")
    if affinity not in ("ClientIP", "None"):
        yield unsupported("spec.sessionAffinity", affinity, ("ClientIP", "None"))
    if affinity == "None" and config is not None:
        yield forbidden(
            "spec.sessionAffinityConfig", "must not be set when session affinity is None"
        )
    if affinity == "ClientIP":
        path = "spec.sessionAffinityConfig.clientIP"
        client = (config or {}).get("clientIP")
        if client is None:
            yield required(path, "when session affinity type is ClientIP")
        elif not 0 < client["timeoutSeconds"] <= _MAX_AFFINITY_TIMEOUT_S:
            detail = f"must be greater than 0 and less than {_MAX_AFFINITY_TIMEOUT_S}"
            yield invalid(f"{path}.timeoutSeconds", client["timeoutSeconds"], detail)


def check_cluster_addresses(service: Object, old: Object | None = None) -> list[Cause]:
    """Check that clusterIP, clusterIPs, ipFamilies and ipFamilyPolicy agree. Addresses that `old`
    has are assumed to be well-formed."""
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return []
    addresses, families = spec.get("clusterIPs") or [], spec.get("ipFamilies") or []
    malformed = list(_check_form(addresses, (old or {"spec": {}})["spec"].get("clusterIPs") or []))
    causes = [
        *_check_address_pair(spec.get("clusterIP"), addresses),
        *_check_families(families, spec.get("ipFamilyPolicy")),
        *malformed,
    ]
    if len(addresses) > 2:
        causes.append(invalid("spec.clusterIPs", addresses, "may only hold up to 2 values"))
    return causes if malformed else [*causes, *_check_addresses(addresses, families)]


def _check_address_pair(first: str | None, addresses: list[str]) -> Iterable[Cause]:
    if first and not addresses:
        yield required("spec.clusterIPs")
    elif first and addresses[0] != first:
        yield invalid("spec.clusterIPs", addresses, "first value must match `clusterIP`")
    elif not first and addresses:
        yield invalid(
            "spec.clusterIPs", addresses, "must be empty when `clusterIP` is not specified"
        )


def _check_form(addresses: list[str], known: list[str]) -> Iterable[Cause]:
    for index, address in enumerate(addresses):
        if index == 0 and address == "None":
            if len(addresses) > 1:
                yield invalid(
                    "spec.clusterIPs", addresses, "'None' must be the first and only value"
                )
        elif address not in known:
            yield from (
                invalid(f"spec.clusterIPs[{index}]", address, problem)
                for problem in names.address(address)
            )


def _check_addresses(addresses: list[str], families: list[str]) -> Iterable[Cause]:
    kinds = [names.family_of(address) for address in addresses]
    if len(kinds) > 1 and (len(set(kinds)) < 2 or len(kinds) > 2):
        yield invalid(
            "spec.clusterIPs", addresses, "may specify no more than one IP for each IP family"
        )
    if addresses[:1] == ["None"]:
        return
    for index, (address, kind, family) in enumerate(zip(addresses, kinds, families, strict=False)):
        if family in _FAMILIES and kind != family:
            detail = f"expected an {family} value as indicated by `ipFamilies[{index}]`"
            yield invalid(f"spec.clusterIPs[{index}]", address, detail)


def _check_families(families: list[str], policy: str | None) -> Iterable[Cause]:
    for index, family in enumerate(families):
        if family not in _FAMILIES:
            yield unsupported(f"spec.ipFamilies[{index}]", family, _FAMILIES)
        if family in families[:index]:
            yield duplicate(f"spec.ipFamilies[{index}]", family)
    if policy is not None and policy not in _FAMILY_POLICIES:
        yield unsupported("spec.ipFamilyPolicy", policy, _FAMILY_POLICIES)


def _check_external_addresses(spec: Object, known: Collection[str]) -> Iterable[Cause]:
    for index, address in enumerate(spec.get("externalIPs") or []):
        problems = ([] if address in known else names.address(address)) or names.special_address(
            address
        )
        yield from (invalid(f"spec.externalIPs[{index}]", address, problem) for problem in problems)


def _check_node_ports(spec: Object) -> Iterable[Cause]:
    ports = spec.get("ports") or []
    if spec["type"] == "ClusterIP":
        for index, port in enumerate(ports):
            if port.get("nodePort"):
                yield forbidden(
                    f"spec.ports[{index}].nodePort", "may not be used when `type` is 'ClusterIP'"
                )
    seen: set[tuple[str, int]] = set()
    for index, port in enumerate(ports):
        pair = (port["protocol"], port.get("nodePort") or 0)
        if pair[1] and pair in seen:
            yield duplicate(f"spec.ports[{index}].nodePort", pair[1])
        seen.add(pair)
    seen.clear()
    for index, port in enumerate(ports):
        pair = (port["protocol"], port.get("port", 0))
        if pair in seen:
            shown = {
                "Name": "",
                "Protocol": pair[0],
                "AppProtocol": None,
                "Port": pair[1],
                "TargetPort": 0,
                "NodePort": 0,
            }
            yield duplicate(f"spec.ports[{index}]", shown)
        seen.add(pair)


def _check_source_ranges(service: Object) -> Iterable[Cause]:
    """Check the source ranges. The field takes precedence over the annotation. For compatibility,
    entries may have spaces around them."""
    spec = service["spec"]
    annotations = service["metadata"].get("annotations") or {}
    ranges = spec.get("loadBalancerSourceRanges") or []
    if ranges:
        # The capital L is in the API server's own message.
        path = "spec.LoadBalancerSourceRanges"
        places = [(f"{path}[{index}]", text) for index, text in enumerate(ranges)]
    elif SOURCE_RANGES_ANNOTATION in annotations:
        path = f"metadata.annotations[{SOURCE_RANGES_ANNOTATION}]"
        text = annotations[SOURCE_RANGES_ANNOTATION].strip()
        places = [(path, part) for part in text.split(",")] if text else []
    else:
        return
    if spec["type"] != "LoadBalancer":
        yield forbidden(path, _ONLY_LOAD_BALANCER)
    for where, text in places:
        yield from (invalid(where, text.strip(), problem) for problem in names.cidr(text.strip()))


def _check_node_port_allocation(spec: Object) -> Iterable[Cause]:
    if spec["type"] != "LoadBalancer" and spec.get("allocateLoadBalancerNodePorts") is not None:
        yield forbidden("spec.allocateLoadBalancerNodePorts", _ONLY_LOAD_BALANCER)


def _check_class(spec: Object) -> Iterable[Cause]:
    name = spec.get("loadBalancerClass")
    if name is None:
        return
    if spec["type"] == "LoadBalancer":
        yield from (
            invalid("spec.loadBalancerClass", name, problem)
            for problem in names.qualified_name(name)
        )
    else:
        yield forbidden("spec.loadBalancerClass", _ONLY_LOAD_BALANCER)


def _check_traffic_policies(spec: Object) -> Iterable[Cause]:
    external = spec.get("externalTrafficPolicy")
    reachable = spec["type"] in ("LoadBalancer", "NodePort") or (
        spec["type"] == "ClusterIP" and bool(spec.get("externalIPs"))
    )
    if external and not reachable:
        yield invalid(
            "spec.externalTrafficPolicy",
            external,
            "may only be set for externally-accessible services",
        )
    if reachable and external not in _TRAFFIC_POLICIES:
        yield unsupported("spec.externalTrafficPolicy", external, _TRAFFIC_POLICIES)
    health_port = spec.get("healthCheckNodePort") or 0
    if spec["type"] == "LoadBalancer" and external == "Local":
        yield from (
            invalid("spec.healthCheckNodePort", health_port, problem)
            for problem in names.port_number(health_port)
        )
    elif health_port:
        yield invalid("spec.healthCheckNodePort", health_port, _ONLY_HEALTH_CHECK)
    internal = spec.get("internalTrafficPolicy")
    if internal is not None and internal not in _TRAFFIC_POLICIES:
        yield unsupported("spec.internalTrafficPolicy", internal, _TRAFFIC_POLICIES)
    distribution = spec.get("trafficDistribution")
    if distribution is not None and distribution not in _DISTRIBUTIONS:
        # In the order of the API, not sorted as `unsupported` does.
        choices = ", ".join(f'"{choice}"' for choice in _DISTRIBUTIONS)
        message = f'Unsupported value: "{distribution}": supported values: {choices}'
        yield Cause("FieldValueNotSupported", "spec.trafficDistribution", message)


def _check_addresses_kept(spec: Object, before: Object) -> Iterable[Cause]:
    if "ExternalName" in (spec.get("type"), before.get("type")) or (
        _headless(spec) and _headless(before)
    ):
        return
    new, old = spec.get("clusterIPs") or [], before.get("clusterIPs") or []
    if old and not new:
        yield invalid("spec.clusterIPs[0]", new, "primary clusterIP can not be unset")
    changed = [
        index for index, (now, then) in enumerate(zip(new, old, strict=False)) if now != then
    ]
    for index in changed if len(new) == len(old) else [index for index in changed if index == 0]:
        yield invalid(f"spec.clusterIPs[{index}]", new, "may not change once set")
    if len(new) == 1 < len(old) and spec.get("ipFamilyPolicy") != "SingleStack":
        detail = "must be set to 'SingleStack' when releasing the secondary clusterIP"
        yield invalid("spec.ipFamilyPolicy", spec.get("ipFamilyPolicy"), detail)


def _check_families_kept(spec: Object, before: Object) -> Iterable[Cause]:
    if (
        "ExternalName" in (spec.get("type"), before.get("type"))
        or _headless(spec)
        or _headless(before)
    ):
        return
    new, old = spec.get("ipFamilies") or [], before.get("ipFamilies") or []
    path, detail = "spec.ipFamilies[0]", "may not change once set"
    if len(new) == len(old):
        yield from (
            invalid(path, new, detail) for now, then in zip(new, old, strict=True) if now != then
        )
    elif new and old and new[0] != old[0]:
        # As upstream, the message prints clusterIPs and not ipFamilies.
        yield invalid(path, spec.get("clusterIPs") or [], detail)
    if len(new) == 1 < len(old) and spec.get("ipFamilyPolicy") != "SingleStack":
        detail = "must be set to 'SingleStack' when releasing the secondary ipFamily"
        yield invalid("spec.ipFamilyPolicy", spec.get("ipFamilyPolicy"), detail)


def _headless(spec: Object) -> bool:
    return bool(spec.get("clusterIPs") == ["None"])
