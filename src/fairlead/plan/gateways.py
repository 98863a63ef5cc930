"""Findings about the gateways of a Service.

In: the live gateways, and the Services that each of them cannot serve. Out: Findings that prevent
the condition Ready of a Service. Pure. Invariant: a Finding does not change while its cause lasts.
It therefore names neither a time nor a gateway that has merely stopped renewing its Lease."""

from collections.abc import Mapping

import msgspec

from fairlead.model import Finding, ServiceKey

NO_GATEWAY = "NoGateway"
NOT_SERVED = "GatewayNotServing"
MAX_NAMED = 3
"""Maximum number of gateways that a message names."""
SEE_THERE = "see the Event `SyncGatewayFailed`, or `fairlead status` on that host"
"""The text for a gateway that reports no message."""


class Gateways(msgspec.Struct, frozen=True):
    """The gateways as the controller observes them. `refusals`: the Services that some live
    gateways cannot serve, with the message of each of these gateways. `problems`: why some live
    gateways cannot serve any Service now."""

    alive: frozenset[str] = frozenset()
    refusals: Mapping[ServiceKey, Mapping[str, str]] = msgspec.field(default_factory=dict)
    problems: Mapping[str, str] = msgspec.field(default_factory=dict)


def gateway_notes(gateways: Gateways | None, key: ServiceKey) -> tuple[Finding, ...]:
    """Return the Findings for this Service. `gateways`: None while the gateways are unknown, or if
    the controller may not read their Leases."""
    if gateways is None:
        return ()
    if not gateways.alive:
        message = (
            "no gateway is alive; the address stays, but works only while the kernel of a "
            "stopped gateway still forwards packets"
        )
        remedy = "start `fairlead gateway`, and check `fairlead status --cluster`"
        return (Finding(NO_GATEWAY, message, severity="error", remedy=remedy, blocks="Ready"),)
    refusals = {**gateways.refusals.get(key, {}), **gateways.problems}
    if not refusals:
        return ()
    reports = [
        f"gateway {name} cannot serve it: {message or SEE_THERE}"
        for name, message in sorted(refusals.items())
    ]
    more = f"; and {len(reports) - MAX_NAMED} more gateways" if len(reports) > MAX_NAMED else ""
    message = "; ".join(reports[:MAX_NAMED]) + more
    return (Finding(NOT_SERVED, message, severity="error", blocks="Ready"),)
