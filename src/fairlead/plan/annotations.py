"""The annotations that a Service is read by: our own, and those that it brings from another system.

In: a Service's annotations. Out: what they say, by the first name of each list that is there: our own comes first; and Notes on
those of other systems that say something which class `fairlead.io/direct` does otherwise.
So manifests written for MetalLB or for OpenStack's cloud controller work unchanged where the wish can be met, and where it
cannot, their owner is told what comes instead. Nothing is passed over in silence.
Invariant: pure. Names and meanings: MetalLB 0.16 (`metallb.universe.tf` is its old prefix), cloud-provider-openstack 1.34.
"""

import re
from collections.abc import Mapping, Sequence

from fairlead.model import Note

_METALLB = ("metallb.io/", "metallb.universe.tf/")
_OPENSTACK = "loadbalancer.openstack.org/"

ADDRESSES = ("fairlead.io/addresses", *(f"{prefix}loadBalancerIPs" for prefix in _METALLB))
"""Addresses a Service asks for by name, separated by commas; at most one of each family."""
POOL = ("fairlead.io/address-pool", *(f"{prefix}address-pool" for prefix in _METALLB))
"""The pool a Service wants its addresses from."""
SHARING_KEY = ("fairlead.io/sharing-key", *(f"{prefix}allow-shared-ip" for prefix in _METALLB))
"""Services with the same key may have one address, each its own ports."""
KEEP_ADDRESS = ("fairlead.io/keep-address", f"{_OPENSTACK}keep-floatingip")
"""`true`: the address stays reserved for a Service of this name when this one is deleted."""

DRAIN_TIMEOUT = ("fairlead.io/drain-timeout",)
"""How long a node that gets no new connections keeps those it has: seconds (`300`), or as Go writes it (`5m`, `1h30m`)."""

WITHOUT_EFFECT = "AnnotationWithoutEffect"
NOT_UNDERSTOOD = "AnnotationNotUnderstood"

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(h|ms|m|s)")

_HEADER = "pods see the client's own address without any header; make them expect none"
_PASSED_ON = "packets are passed on as they are, so it is for the pods to decide"
_BY_PLAN = "nodes with ready pods get their share by the number of these pods, and are watched without asking"
_BY_POOL = "addresses come from pools; choose one by fairlead.io/address-pool"

INSTEAD = {
    "proxy-protocol": _HEADER,
    "x-forwarded-for": _HEADER,
    "timeout-client-data": _PASSED_ON,
    "timeout-member-connect": _PASSED_ON,
    "timeout-member-data": _PASSED_ON,
    "timeout-tcp-inspect": _PASSED_ON,
    "connection-limit": _PASSED_ON,
    "default-tls-container-ref": _PASSED_ON,
    "lb-method": "every ready pod gets the same share; for one pod per client use spec.sessionAffinity",
    "enable-health-monitor": _BY_PLAN,
    "health-monitor-delay": _BY_PLAN,
    "health-monitor-timeout": _BY_PLAN,
    "health-monitor-max-retries": _BY_PLAN,
    "health-monitor-max-retries-down": _BY_PLAN,
    "node-selector": "to keep nodes out, label them node.kubernetes.io/exclude-from-external-load-balancers",
    "hostname": "the address itself is published",
    "class": _BY_POOL,
    "floating-network-id": _BY_POOL,
    "floating-subnet": _BY_POOL,
    "floating-subnet-id": _BY_POOL,
    "floating-subnet-tags": _BY_POOL,
    "subnet-id": _BY_POOL,
    "network-id": _BY_POOL,
    "port-id": _BY_POOL,
    "member-subnet-id": _BY_POOL,
    "load-balancer-id": "no load balancer of OpenStack serves this Service; delete that one there if nobody needs it",
    "flavor-id": "no load balancer of OpenStack serves this Service",
    "availability-zone": "no load balancer of OpenStack serves this Service",
}
"""What comes in the place of each of OpenStack's wishes. `load-balancer-address` is a report, not a wish."""

OFF = {"proxy-protocol": "false", "x-forwarded-for": "false", "enable-health-monitor": "false", "connection-limit": "-1"}
"""Values that wish for nothing, of those that have one."""


def found(annotations: Mapping[str, str], names: Sequence[str]) -> tuple[str, str]:
    """(name, value) of the first of these annotations that is there and not empty; two empty texts if none is."""
    for name in names:
        if value := annotations.get(name, "").strip():
            return name, value
    return "", ""


def seconds_of(text: str) -> float | None:
    """A number of seconds, or a duration as Go's time.ParseDuration reads it, of h, m, s and ms; None if it is neither."""
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return float(text)
    parts = _PART.findall(text) if text.isascii() else []
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def drain_timeout_s(annotations: Mapping[str, str]) -> float | None:
    """What the Service says; None if it says nothing that can be understood."""
    return seconds_of(found(annotations, DRAIN_TIMEOUT)[1])


def not_understood(annotations: Mapping[str, str]) -> list[Note]:
    """Annotations of ours whose values mean nothing."""
    name, text = found(annotations, DRAIN_TIMEOUT)
    if not name or seconds_of(text) is not None:
        return []
    message = f"{name} is {text!r}, which is no time; the gateways' own limit holds"
    return [Note(NOT_UNDERSTOOD, f"{message}; write seconds, as in 300, or a duration of h, m and s, as in 5m or 1h30m")]


def without_effect(annotations: Mapping[str, str]) -> list[Note]:
    """What other systems would do for this Service, and class direct does otherwise: one Note for each thing done instead."""
    instead: dict[str, list[str]] = {}
    for name in sorted(annotations):
        wish = name.removeprefix(_OPENSTACK)
        if wish != name and wish in INSTEAD and annotations[name].strip().lower() != OFF.get(wish):
            instead.setdefault(INSTEAD[wish], []).append(name)
    return [
        Note(WITHOUT_EFFECT, f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {what}")
        for what, names in instead.items()
    ]
