"""The annotations that a Service is read by: our own, and those that it brings from another system.

In: a Service's annotations. Out: what they say, by the first name of each list that is there: our
own comes first; and Findings on those that say something which the class of the Service does
otherwise, or that nobody knows. What is said of connections that end at the balancer is read in
`proxying.py`. So manifests written for MetalLB or for OpenStack's cloud controller work unchanged
where the wish can be met, and where it cannot, their owner is told what comes instead. Nothing is
passed over in silence. Invariant: pure. Names and meanings: MetalLB 0.16 (`metallb.universe.tf` is
its old prefix), cloud-provider-openstack 1.34."""

import difflib
import re
from collections.abc import Mapping, Sequence

from fairlead.model import Finding

_METALLB = ("metallb.io/", "metallb.universe.tf/")
_OURS = "fairlead.io/"
_OPENSTACK = "loadbalancer.openstack.org/"

ADDRESSES = ("fairlead.io/addresses", *(f"{prefix}loadBalancerIPs" for prefix in _METALLB))
"""Addresses a Service asks for by name, separated by commas; at most one of each family."""
POOL = ("fairlead.io/address-pool", *(f"{prefix}address-pool" for prefix in _METALLB))
"""The pool a Service wants its addresses from."""
SHARING_KEY = ("fairlead.io/sharing-key", *(f"{prefix}allow-shared-ip" for prefix in _METALLB))
"""Services with the same key may have one address, each its own ports."""
KEEP_ADDRESS = ("fairlead.io/keep-address", f"{_OPENSTACK}keep-floatingip")
"""`true`: the address stays reserved for a Service of this name when this one is deleted."""

INTERNAL = ("fairlead.io/internal", "service.beta.kubernetes.io/openstack-internal-load-balancer")
"""`true`: a load balancer of OpenStack is reached from inside alone, and has no floating IP."""

DRAIN_TIMEOUT = ("fairlead.io/drain-timeout",)
"""How long a node that gets no new connections keeps those it has: seconds (`300`), or as Go writes
it (`5m`, `1h30m`)."""

PROXY_WISHES = (
    "proxy-protocol",
    "x-forwarded-for",
    "timeout-client-data",
    "timeout-member-connect",
    "timeout-member-data",
    "timeout-tcp-inspect",
    "connection-limit",
    "lb-method",
    "enable-health-monitor",
    "health-monitor-delay",
    "health-monitor-timeout",
    "health-monitor-max-retries",
    "health-monitor-max-retries-down",
)
"""What a balancer that ends connections can do: `fairlead.io/NAME`, or OpenStack's name for the
same."""

OCTAVIA_WISHES = (
    "octavia-provider",
    "subnet-id",
    "network-id",
    "port-id",
    "member-subnet-id",
    "flavor-id",
    "availability-zone",
    "load-balancer-id",
    "class",
    "node-selector",
    "members",
    "hostname",
    "floating-network-id",
    "floating-subnet",
    "floating-subnet-id",
    "floating-subnet-tags",
)
"""What only OpenStack's load balancers have, under the same names; `octavia-provider` and `members`
are ours alone."""

LOAD_BALANCER_ID = "load-balancer-id"
"""The load balancer that a Service is to be on, beside others; cloud-provider-openstack writes
there the one that it made."""

WITHOUT_EFFECT = "AnnotationWithoutEffect"
NOT_UNDERSTOOD = "AnnotationNotUnderstood"

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(h|ms|m|s)")

LONGEST_QUOTE = 60
"""Events hold 1,024 characters."""

OFF = {
    "proxy-protocol": "false",
    "x-forwarded-for": "false",
    "enable-health-monitor": "false",
    "connection-limit": "-1",
    "internal": "false",
}
"""Values that wish for nothing, of those that have one."""


_MARK = "fairlead.io/class"
"""Written by the controller: which class serves the Service."""
_KNOWN = frozenset(
    [ADDRESSES[0], POOL[0], SHARING_KEY[0], KEEP_ADDRESS[0], INTERNAL[0], DRAIN_TIMEOUT[0]]
    + [_OURS + wish for wish in (*PROXY_WISHES, *OCTAVIA_WISHES, "hostname-suffix")]
) - {_MARK}
"""What a Service may say of ours."""


def found(annotations: Mapping[str, str], names: Sequence[str]) -> tuple[str, str]:
    """(name, value) of the first of these annotations that is there and not empty; two empty texts
    if none is."""
    for name in names:
        if value := annotations.get(name, "").strip():
            return name, value
    return "", ""


def names_of(wish: str) -> tuple[str, str]:
    """The annotations that say it; ours first, but for one that the controller writes to say
    something else."""
    ours = _OURS + wish
    return (ours if ours != _MARK else _OPENSTACK + wish), _OPENSTACK + wish


def quoted(text: str) -> str:
    """As much of it as leaves room for the remedy."""
    text = text.strip()
    return repr(text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}...")


def seconds_of(text: str) -> float | None:
    """A number of seconds, or a duration as Go's time.ParseDuration reads it, of h, m, s and ms;
    None if it is neither."""
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return float(text)
    parts = _PART.findall(text) if text.isascii() else []
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def drain_timeout_s(annotations: Mapping[str, str]) -> float | None:
    """What the Service says; None if it says nothing that can be understood."""
    _, text = found(annotations, DRAIN_TIMEOUT)
    return seconds_of(text) if text else None


def not_understood(annotations: Mapping[str, str]) -> list[Finding]:
    """Annotations of ours that mean nothing, by their values or their names."""
    name, text = found(annotations, DRAIN_TIMEOUT)
    if not name or seconds_of(text) is not None:
        return unknown(annotations)
    message = f"{name} is {quoted(text)}, which is no time; the gateways' own limit holds"
    note = Finding(
        NOT_UNDERSTOOD,
        message,
        remedy="write seconds, as in 300, or a duration of h, m and s, as in 5m or 1h30m",
    )
    return [note, *unknown(annotations)]


def without_effect(annotations: Mapping[str, str], instead: Mapping[str, str]) -> list[Finding]:
    """What this Service asks for and its class does otherwise: one Finding for each thing done
    instead."""
    without: dict[str, list[str]] = {}
    for name in sorted(annotations):
        wish = name.removeprefix(_OPENSTACK if name.startswith(_OPENSTACK) else _OURS)
        ours = name in _KNOWN
        wished = wish in instead and annotations[name].strip().lower() != OFF.get(wish)
        if wished and (ours or name.startswith(_OPENSTACK)):
            without.setdefault(instead[wish], []).append(name)
    return [
        Finding(
            WITHOUT_EFFECT,
            f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {what}",
        )
        for what, names in without.items()
    ]


def unknown(annotations: Mapping[str, str]) -> list[Finding]:
    """Annotations with our prefix that mean nothing to us: most likely a slip of the pen."""
    known = {_MARK, *_KNOWN}
    notes = []
    for name in sorted(annotations):
        if name.startswith(_OURS) and name not in known:
            like = difflib.get_close_matches(name, sorted(known), 1, 0.75)
            hint = f"did you mean {like[0]}?" if like else f"known are {', '.join(sorted(known))}"
            notes.append(
                Finding(
                    NOT_UNDERSTOOD,
                    f"{name} ({quoted(annotations[name])}) is no annotation of ours",
                    remedy=hint,
                )
            )
    return notes
