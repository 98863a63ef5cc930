"""The validation of EndpointSlices. Pure.

In: an EndpointSlice. Out: the errors; empty if it is valid. Messages follow the API server's
apis/discovery/validation."""

from collections.abc import Iterable

from fairlead.kube.rules import names
from fairlead.kube.rules.causes import Cause, Object, invalid, required, unsupported


def check_slice(endpoint_slice: Object) -> Iterable[Cause]:
    """Yield the errors of an EndpointSlice. A protocol that is absent is TCP."""
    kind = endpoint_slice.get("addressType")
    kinds = ("IPv4", "IPv6", "FQDN")
    if not kind:
        yield required("addressType")
    elif kind not in kinds:
        yield unsupported("addressType", kind, kinds)
    for index, endpoint in enumerate(endpoint_slice.get("endpoints") or []):
        path = f"endpoints[{index}].addresses"
        addresses = endpoint.get("addresses") or []
        if not addresses:
            yield required(path, "must contain at least 1 address")
        for text in addresses:
            yield from (invalid(path, text, problem) for problem in _address_problems(kind, text))
    protocols = ("TCP", "UDP", "SCTP")
    for index, port in enumerate(endpoint_slice.get("ports") or []):
        if port.get("protocol", "TCP") not in protocols:
            yield unsupported(f"ports[{index}].protocol", port["protocol"], protocols)


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
