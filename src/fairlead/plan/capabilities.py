"""What each of Octavia's providers cannot do, and what comes of it when a Service asks for it.

In: a provider and a wish. Out: an `Unsupported`: whether a Service with this wish is refused or
served otherwise, and the explanation. Pure. Found by asking both providers of Octavia 19
(ovn-octavia-provider 11): what the API refuses with 501, and what it takes and does not carry out.
Names of wishes are those of annotations; source ranges are a field of the Service."""

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
"""Of ports; both providers have the same."""


class Unsupported(Value, frozen=True):
    """Something that a provider cannot do for any Service, and what comes of it for one that asks
    for it. `refuse`: the Service would not work without it, so it is not served. `substitute`: the
    Service is served all the same. `explanation`: what the provider does instead."""

    action: Literal["refuse", "substitute"]
    explanation: str


_AS_THEY_ARE = "provider ovn passes packets on as they are"
_HEADER = Unsupported(
    "refuse", f"{_AS_THEY_ARE}: pods see the client's own address, and get no header"
)
_TIME = Unsupported("substitute", f"{_AS_THEY_ARE} and cuts no connection")
_MACHINE = Unsupported("substitute", "provider ovn needs no machines of its own")

UNSUPPORTED: Mapping[Provider, Mapping[str, Unsupported]] = {
    "amphora": {
        "lb-method": Unsupported(
            "substitute", "provider amphora shares connections in turn, by the number of ready pods"
        ),
    },
    "ovn": {
        "proxy-protocol": _HEADER,
        "x-forwarded-for": _HEADER,
        SOURCE_RANGES: Unsupported("refuse", "provider ovn lets everybody in"),
        "lb-method": Unsupported(
            "substitute", "provider ovn chooses a node by both addresses and ports of a connection"
        ),
        "timeout-client-data": _TIME,
        "timeout-member-connect": _TIME,
        "timeout-member-data": _TIME,
        "timeout-tcp-inspect": _TIME,
        "connection-limit": Unsupported(
            "substitute", f"{_AS_THEY_ARE} and does not count connections"
        ),
        "flavor-id": _MACHINE,
        "availability-zone": _MACHINE,
    },
}
