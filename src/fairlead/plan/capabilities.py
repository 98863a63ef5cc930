"""The features that each Octavia provider lacks, and what happens to a Service that requests one.

In: a provider and a feature. Out: an `Unsupported`: whether the Service is refused or served
without the feature, and the explanation. Pure. A feature has the short name of its annotation; only
source ranges are a field of the Service. The tables are results of tests with both providers of
Octavia 19 (ovn-octavia-provider 11): a feature is unsupported if the API answers 501, or if it
accepts the request and does not carry it out."""

from collections.abc import Mapping
from typing import Literal

from fairlead.model import Protocol, Provider, Value

SOURCE_RANGES = "source-ranges"
OTHER_PROVIDER: Mapping[Provider, Provider] = {"amphora": "ovn", "ovn": "amphora"}

METHODS: Mapping[Provider, frozenset[str]] = {
    "amphora": frozenset({"ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP"}),
    "ovn": frozenset({"SOURCE_IP_PORT", "SOURCE_IP"}),
}
PROTOCOLS: frozenset[Protocol] = frozenset({"TCP", "UDP", "SCTP"})
"""The protocols of listeners. Both providers support the same ones."""


class Unsupported(Value, frozen=True):
    """A feature that a provider lacks. `action`: what happens to a Service that requests it.
    `refuse`: the Service would not work without the feature, so it is not served. `substitute`: the
    Service is served without it. `explanation`: what the provider does instead."""

    action: Literal["refuse", "substitute"]
    explanation: str


_UNMODIFIED = "provider ovn forwards packets unmodified"
_HEADER = Unsupported(
    "refuse", f"{_UNMODIFIED}: pods see the client's own address, and get no header"
)
_TIME = Unsupported("substitute", f"{_UNMODIFIED} and closes no connection")
_MACHINE = Unsupported("substitute", "provider ovn creates no virtual machines")

UNSUPPORTED: Mapping[Provider, Mapping[str, Unsupported]] = {
    "amphora": {
        "lb-method": Unsupported(
            "substitute",
            "provider amphora uses round robin, weighted by the number of ready pods",
        ),
    },
    "ovn": {
        "proxy-protocol": _HEADER,
        "x-forwarded-for": _HEADER,
        SOURCE_RANGES: Unsupported("refuse", "provider ovn admits every client"),
        "lb-method": Unsupported(
            "substitute", "provider ovn chooses a node by a hash of both addresses and both ports"
        ),
        "timeout-client-data": _TIME,
        "timeout-member-connect": _TIME,
        "timeout-member-data": _TIME,
        "timeout-tcp-inspect": _TIME,
        "connection-limit": Unsupported(
            "substitute", f"{_UNMODIFIED} and does not count connections"
        ),
        "flavor-id": _MACHINE,
        "availability-zone": _MACHINE,
    },
}
