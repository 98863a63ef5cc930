"""The annotations of Services: those of Fairlead, and the supported ones of other systems.

In: the annotations of a Service. Out: their values, and Findings about annotations that are
unknown, invalid, or without effect in the class of the Service. Where several annotations have the
same meaning, the first one in their list counts; Fairlead's own is always the first. Manifests
written for MetalLB or cloud-provider-openstack therefore work unchanged where Fairlead supports the
request; where it does not, a Finding tells the owner what the class does instead. No annotation is
ignored silently. `proxying.py` reads the annotations about connections that end at the load
balancer. Invariant: pure. Names and meanings: MetalLB 0.16 (`metallb.universe.tf` is its old
prefix), cloud-provider-openstack 1.34.

A short name is the part after the prefix, such as `subnet-id`. A short name in the tables below
stands for two annotations, `fairlead.io/NAME` and `loadbalancer.openstack.org/NAME`."""

import difflib
import re
from collections.abc import Mapping, Sequence

from fairlead.model import Finding

_METALLB = ("metallb.io/", "metallb.universe.tf/")
_OURS = "fairlead.io/"
_OPENSTACK = "loadbalancer.openstack.org/"

ADDRESSES = ("fairlead.io/addresses", *(f"{prefix}loadBalancerIPs" for prefix in _METALLB))
"""The addresses that a Service requests, separated by commas; at most one of each family."""
POOL = ("fairlead.io/address-pool", *(f"{prefix}address-pool" for prefix in _METALLB))
"""The name of the pool from which the Service requests its addresses."""
SHARING_KEY = ("fairlead.io/sharing-key", *(f"{prefix}allow-shared-ip" for prefix in _METALLB))
"""Services of one namespace with the same key may use one address, each with its own ports."""
KEEP_ADDRESS = ("fairlead.io/keep-address", f"{_OPENSTACK}keep-floatingip")
"""`true`: after the Service is deleted, its addresses stay reserved for a Service of this name."""

INTERNAL = ("fairlead.io/internal", "service.beta.kubernetes.io/openstack-internal-load-balancer")
"""`true`: the OpenStack load balancer is reachable only at its own address, without a floating
IP."""

DRAIN_TIMEOUT = ("fairlead.io/drain-timeout",)
"""How long a node that gets no new connections keeps its open ones: seconds (`300`), or a duration
in the format of Go (`5m`, `1h30m`)."""

PROXY_ANNOTATIONS = (
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
"""Short names of annotations about connections, for classes `proxy` and `octavia`."""

OCTAVIA_ANNOTATIONS = (
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
"""Short names of annotations for class octavia alone. cloud-provider-openstack does not have
`octavia-provider` and `members`."""

LOAD_BALANCER_ID = "load-balancer-id"
"""The id of an existing load balancer that the Service shares with other Services. Into the same
annotation, cloud-provider-openstack writes the id of the load balancer that it created."""

WITHOUT_EFFECT = "AnnotationWithoutEffect"
NOT_UNDERSTOOD = "AnnotationNotUnderstood"

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
# The quantifiers are possessive, so a match takes a time that is linear in the length of the text.
_NUMBER = re.compile(r"\d++(?:\.\d++)?", re.ASCII)
_PART = re.compile(r"(\d++(?:\.\d++)?|\.\d++)(h|ms|m|s)", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})++", re.ASCII)
_MAX_S = 1e9
"""No duration is as long as this: 31 years. A number with 309 digits would be infinite."""

MAX_VALUE_LENGTH = 1024
"""Maximum length of a value. An API server accepts 256 KiB in all annotations of an object."""

MAX_QUOTE_LENGTH = 60
"""Maximum length of a quoted value in a message. An Event holds 1,024 characters, and the remedy at
the end of the message has to fit in."""

MAX_SUGGESTED = 3
"""The number of unknown annotations that a message names. Finding a similar name takes a
millisecond."""

OFF = {
    "proxy-protocol": "false",
    "x-forwarded-for": "false",
    "enable-health-monitor": "false",
    "connection-limit": "-1",
    "internal": "false",
}
"""By short name, the value with which an annotation requests nothing."""

_MARK = "fairlead.io/class"
"""The controller writes this annotation: the class that serves the Service."""
RECORD = "fairlead.io/understood"
"""The controller writes this annotation: the values of annotations that are in force (see
`plan.understood`)."""
_KNOWN = frozenset(
    [ADDRESSES[0], POOL[0], SHARING_KEY[0], KEEP_ADDRESS[0], INTERNAL[0], DRAIN_TIMEOUT[0]]
    + [
        _OURS + short_name
        for short_name in (*PROXY_ANNOTATIONS, *OCTAVIA_ANNOTATIONS, "hostname-suffix")
    ]
) - {_MARK}
"""The annotations of Fairlead that users may set."""
_ALL = _KNOWN | {_MARK, RECORD}

REPORT = f"{_OPENSTACK}load-balancer-address"
"""cloud-provider-openstack writes the address of the Service into this annotation."""
READ = frozenset(
    [*ADDRESSES, *POOL, *SHARING_KEY, *KEEP_ADDRESS, *INTERNAL, *_KNOWN, REPORT]
    + [_OPENSTACK + short_name for short_name in (*PROXY_ANNOTATIONS, *OCTAVIA_ANNOTATIONS)]
)
"""All annotations of users whose value is read, without the one of source ranges, which has a limit
of its own (`plan.service`)."""


def found(
    annotations: Mapping[str, str], names: Sequence[str], *, blank: bool = False
) -> tuple[str, str]:
    """Return name and value of the first of these annotations that is set and not blank; two empty
    strings if there is none. `blank`: also return an annotation that is blank."""
    for name in names:
        if (value := annotations.get(name, "").strip()) or (blank and name in annotations):
            return name, value
    return "", ""


def names_of(short_name: str) -> tuple[str, str]:
    """Return the annotations with this short name, Fairlead's first. `fairlead.io/class` is never
    among them, because the controller writes it with another meaning."""
    ours = _OURS + short_name
    return (ours if ours != _MARK else _OPENSTACK + short_name), _OPENSTACK + short_name


def quoted(text: str) -> str:
    """Return the text in quotes, shortened to MAX_QUOTE_LENGTH."""
    text = text.strip()
    return repr(text if len(text) <= MAX_QUOTE_LENGTH else f"{text[:MAX_QUOTE_LENGTH]}...")


def seconds_of(text: str) -> float | None:
    """Parse a number of seconds, or a duration in the format of Go's time.ParseDuration with the
    units h, m, s and ms. Return seconds; None if the text is neither, or exceeds 31 years."""
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif _DURATION.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    else:
        return None
    return seconds if seconds < _MAX_S else None


def drain_timeout_s(annotations: Mapping[str, str]) -> float | None:
    """Return the drain timeout in seconds; None if it is not set, or invalid."""
    _, text = found(annotations, DRAIN_TIMEOUT)
    return seconds_of(text) if text else None


def without_effect(annotations: Mapping[str, str], instead: Mapping[str, str]) -> list[Finding]:
    """Return the Findings about annotations that have no effect in the class of the Service: one
    Finding for all annotations with the same substitute. `instead`: by short name, the substitute,
    which is what the class does instead."""
    without: dict[str, list[str]] = {}
    for name in sorted(annotations):
        short_name = name.removeprefix(_OPENSTACK if name.startswith(_OPENSTACK) else _OURS)
        ours = name in _KNOWN
        requested = short_name in instead and annotations[name].strip().lower() != OFF.get(
            short_name
        )
        if requested and (ours or name.startswith(_OPENSTACK)):
            without.setdefault(instead[short_name], []).append(name)
    return [
        Finding(
            WITHOUT_EFFECT,
            f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {what}",
        )
        for what, names in without.items()
    ]


def unknown(annotations: Mapping[str, str]) -> list[Finding]:
    """Return one Finding about all annotations with Fairlead's prefix that do not exist, most
    likely because of a typing error. It names the first ones, with the annotations that they
    resemble."""
    found = sorted(name for name in annotations if name.startswith(_OURS) and name not in _ALL)
    if not found:
        return []
    known = sorted(_KNOWN)
    first = found[:MAX_SUGGESTED]
    texts = [f"{name} ({quoted(annotations[name])})" for name in first]
    more = f" and {len(found) - len(first):,} more" if len(found) > len(first) else ""
    resembled = [
        match for name in first for match in difflib.get_close_matches(name, known, 1, 0.75)
    ]
    return [
        Finding(
            NOT_UNDERSTOOD,
            f"unknown annotation{'s' * (len(found) > 1)} {', '.join(texts)}{more}",
            remedy=f"did you mean {', '.join(dict.fromkeys(resembled))}?"
            if resembled
            else f"known after {_OURS}: " + ", ".join(name.removeprefix(_OURS) for name in known),
        )
    ]
