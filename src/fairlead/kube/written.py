"""What the API server refuses in objects other than Services, and what has no effect there. Pure.

In: an object as it was written, without null fields and with a name. Out: why the server would
refuse it, and the fields that its kind does not have. `kube.submission` does the same for Services.
The rules are those of `kube.rules`; for AddressPools and AddressGrants, the fields and types of
`deploy/crds`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from fairlead.kube.rules import fields, names
from fairlead.kube.rules.causes import Cause, Object, joined, required
from fairlead.kube.rules.endpoints import check_endpoints, check_slice
from fairlead.kube.rules.endpoints_fields import Endpoints
from fairlead.kube.rules.metadata import check_metadata
from fairlead.kube.rules.types import complaint, without_effect, wrong_time


class _AddressPoolSpec(fields.Fields):
    addresses: list[str] | None = None
    auto_assign: bool | None = None
    avoid_buggy_ips: bool | None = None
    service_allocation: fields.AnyObject | None = None


class _AddressPool(fields.KindFields):
    spec: _AddressPoolSpec | None = None
    status: fields.AnyObject | None = None


class _AddressGrantSpec(fields.Fields):
    address: str | None = None
    pool: str | None = None
    sharing_key: str | None = None
    keep: bool | None = None
    holders: list[fields.AnyObject] | None = None


class _AddressGrant(fields.KindFields):
    spec: _AddressGrantSpec | None = None


_FIELDS: Final[Mapping[str, type[fields.KindFields]]] = {
    "EndpointSlice": fields.EndpointSlice,
    "Endpoints": Endpoints,
    "Node": fields.Node,
    "Namespace": fields.Namespace,
    "AddressPool": _AddressPool,
    "AddressGrant": _AddressGrant,
}


def _check_pool(pool: Object) -> Iterator[Cause]:
    if not (pool.get("spec") or {}).get("addresses"):
        yield required("spec.addresses")


_CHECKS: Final[Mapping[str, Callable[[Object], Iterable[Cause]]]] = {
    "EndpointSlice": check_slice,
    "Endpoints": check_endpoints,
    "AddressPool": _check_pool,
}


def refusal(kind: str, written: Mapping[str, Any]) -> str:
    """Return why the API server would refuse the object; empty if it would accept it.

    An object with a UID comes from a server, which may have accepted more in the past: only its
    types are checked."""
    object_ = dict(written)
    try:
        msgspec.convert(object_, _FIELDS[kind])
    except msgspec.ValidationError as problem:
        return complaint(problem, object_, _FIELDS[kind])
    if (problem_with_time := wrong_time(object_)) or object_["metadata"].get("uid"):
        return problem_with_time
    rule = names.dns_label if kind == "Namespace" else names.dns_subdomain
    causes = list(check_metadata(object_, rule))
    if kind in _CHECKS:
        causes += _CHECKS[kind](object_)
    return joined(causes) if causes else ""


def remarks(kind: str, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field that the kind does not have."""
    if not written["metadata"].get("uid"):
        yield from without_effect(_FIELDS[kind], kind, dict(written))
