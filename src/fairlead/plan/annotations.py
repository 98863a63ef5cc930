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

from fairlead.announce_sections import AnnounceMethod
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

ANNOUNCE = ("fairlead.io/announce",)
"""How hosts announce the addresses: `l2`, `bgp` or `none`; overrides the pool of an address."""
BGP_PEERS = ("fairlead.io/bgp-peers",)
"""The names of the BGP peers that get the routes, separated by commas; overrides the pool."""

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
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(h|ms|m|s)")

MAX_QUOTE_LENGTH = 60
"""Maximum length of a quoted value in a message. An Event holds 1,024 characters, and the remedy at
the end of the message has to fit in."""

OFF = {
    "proxy-protocol": "false",
    "x-forwarded-for": "false",
    "enable-health-monitor": "false",
    "connection-limit": "-1",
    "internal": "false",
}
"""By short name, the value with which an annotation requests nothing."""

_METHODS: Mapping[str, AnnounceMethod] = {"bgp": "bgp", "l2": "l2", "none": "none"}
_MARK = "fairlead.io/class"
"""The controller writes this annotation: the class that serves the Service."""
_KNOWN = frozenset(
    [ADDRESSES[0], POOL[0], SHARING_KEY[0], KEEP_ADDRESS[0], INTERNAL[0], DRAIN_TIMEOUT[0]]
    + [ANNOUNCE[0], BGP_PEERS[0]]
    + [
        _OURS + short_name
        for short_name in (*PROXY_ANNOTATIONS, *OCTAVIA_ANNOTATIONS, "hostname-suffix")
    ]
) - {_MARK}
"""The annotations of Fairlead that users may set."""


def found(annotations: Mapping[str, str], names: Sequence[str]) -> tuple[str, str]:
    """Return name and value of the first of these annotations that is set and not empty; two empty
    strings if there is none."""
    for name in names:
        if value := annotations.get(name, "").strip():
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
    units h, m, s and ms. Return seconds; None if the text is neither."""
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return float(text)
    parts = _PART.findall(text) if text.isascii() else []
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def drain_timeout_s(annotations: Mapping[str, str]) -> float | None:
    """Return the drain timeout in seconds; None if it is not set, or invalid."""
    _, text = found(annotations, DRAIN_TIMEOUT)
    return seconds_of(text) if text else None


def announce_method(annotations: Mapping[str, str]) -> AnnounceMethod | None:
    """Return how the Service requests its addresses to be announced; None if it requests nothing,
    or something invalid."""
    return _METHODS.get(found(annotations, ANNOUNCE)[1].lower())


def bgp_peers(annotations: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of the BGP peers that the Service requests, sorted; None if it requests
    none."""
    _, text = found(annotations, BGP_PEERS)
    return tuple(sorted({name for each in text.split(",") if (name := each.strip())})) or None


def not_understood(annotations: Mapping[str, str]) -> list[Finding]:
    """Return a Finding for each annotation of Fairlead with an invalid value or an unknown name."""
    notes = []
    name, text = found(annotations, DRAIN_TIMEOUT)
    if name and seconds_of(text) is None:
        message = (
            f"{name} is {quoted(text)}, which is not a duration; the default of the gateway applies"
        )
        remedy = "write seconds, as in 300, or a duration of h, m and s, as in 5m or 1h30m"
        notes.append(Finding(NOT_UNDERSTOOD, message, remedy=remedy))
    name, text = found(annotations, ANNOUNCE)
    if name and announce_method(annotations) is None:
        message = f"{name} is {quoted(text)}, which is no way to announce; the pool decides"
        notes.append(Finding(NOT_UNDERSTOOD, message, remedy=f"write {', '.join(_METHODS)}"))
    return [*notes, *unknown(annotations)]


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
    """Return a Finding for each annotation with Fairlead's prefix that does not exist, most likely
    because of a typing error."""
    known = {_MARK, *_KNOWN}
    notes = []
    for name in sorted(annotations):
        if name.startswith(_OURS) and name not in known:
            like = difflib.get_close_matches(name, sorted(known), 1, 0.75)
            hint = (
                f"did you mean {like[0]}?"
                if like
                else f"known annotations: {', '.join(sorted(known))}"
            )
            notes.append(
                Finding(
                    NOT_UNDERSTOOD,
                    f"unknown annotation {name} ({quoted(annotations[name])})",
                    remedy=hint,
                )
            )
    return notes
