"""The validation of EndpointSlices and Endpoints. Pure.

In: an object whose fields have the right types. Out: the errors; empty if it is valid. Messages
follow the API server's apis/discovery/validation and apis/core/validation."""

from collections.abc import Iterable

from fairlead.kube.rules import names
from fairlead.kube.rules.causes import (
    Cause,
    Object,
    duplicate,
    invalid,
    required,
    too_many,
    unsupported,
)
from fairlead.kube.rules.service import PROTOCOLS, check_app_protocol

_MAX_ENDPOINTS, _MAX_ADDRESSES = 1000, 100


def check_slice(endpoint_slice: Object) -> Iterable[Cause]:
    """Yield the errors of an EndpointSlice. An absent protocol is TCP; an empty one is invalid."""
    kind = endpoint_slice.get("addressType")
    kinds = ("IPv4", "IPv6", "FQDN")
    if not kind:
        yield required("addressType")
    elif kind not in kinds:
        yield unsupported("addressType", kind, kinds)
    yield from _check_slice_ports(endpoint_slice.get("ports") or [])
    endpoints = endpoint_slice.get("endpoints") or []
    if len(endpoints) > _MAX_ENDPOINTS:
        yield too_many("endpoints", len(endpoints), _MAX_ENDPOINTS)
        return
    for index, endpoint in enumerate(endpoints):
        path = f"endpoints[{index}].addresses"
        addresses = endpoint.get("addresses") or []
        if not addresses:
            yield required(path, "must contain at least 1 address")
        if len(addresses) > _MAX_ADDRESSES:
            yield too_many(path, len(addresses), _MAX_ADDRESSES)
        for text in addresses:
            yield from (invalid(path, text, problem) for problem in _address_problems(kind, text))
        yield from _check_node_name(f"endpoints[{index}].nodeName", endpoint)


def check_endpoints(endpoints: Object) -> Iterable[Cause]:
    """Yield the errors of an Endpoints object. A protocol that is absent or empty is TCP."""
    for index, subset in enumerate(endpoints.get("subsets") or []):
        path = f"subsets[{index}]"
        if not subset.get("addresses") and not subset.get("notReadyAddresses"):
            yield required(path, "must specify `addresses` or `notReadyAddresses`")
        for field in ("addresses", "notReadyAddresses"):
            for at, each in enumerate(subset.get(field) or []):
                where, text = f"{path}.{field}[{at}]", each.get("ip", "")
                problems = names.address(text) or names.special_address(text)
                yield from (invalid(f"{where}.ip", text, problem) for problem in problems)
                yield from _check_node_name(f"{where}.nodeName", each)
        ports = subset.get("ports") or []
        for at, port in enumerate(ports):
            where, number = f"{path}.ports[{at}]", port.get("port", 0)
            if len(ports) > 1 and not port.get("name"):
                yield required(f"{where}.name")
            yield from _check_port(where, {**port, "protocol": port.get("protocol") or "TCP"})
            yield from (
                invalid(f"{where}.port", number, problem) for problem in names.port_number(number)
            )


def _check_slice_ports(ports: list[Object]) -> Iterable[Cause]:
    seen: set[str] = set()
    for index, port in enumerate(ports):
        path, name = f"ports[{index}]", port.get("name") or ""
        if name in seen:
            yield duplicate(f"{path}.name", name)
        seen.add(name)
        yield from _check_port(path, port)


def _check_port(path: str, port: Object) -> Iterable[Cause]:
    if name := port.get("name"):
        yield from (invalid(f"{path}.name", name, problem) for problem in names.dns_label(name))
    if port.get("protocol", "TCP") not in PROTOCOLS:
        yield unsupported(f"{path}.protocol", port["protocol"], PROTOCOLS)
    yield from check_app_protocol(port, path)


def _check_node_name(path: str, endpoint: Object) -> Iterable[Cause]:
    if (node := endpoint.get("nodeName")) is not None:
        yield from (invalid(path, node, problem) for problem in names.dns_subdomain(node))


def _address_problems(kind: str | None, text: str) -> list[str]:
    if kind == "FQDN":
        return names.dns_subdomain(text.removesuffix("."))
    if kind not in ("IPv4", "IPv6"):
        return []
    if problems := names.address(text):
        return problems
    if names.family_of(text) != kind:
        return [f"must be an {kind} address"]
    return names.special_address(text)
