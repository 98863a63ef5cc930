"""What the owner of a Service should know about its gateways.

In: the gateways that are alive, and the Services that each of them cannot serve. Out: Findings,
which keep the Service from being Ready. Pure. Invariant: a Finding does not change while its cause
lasts: it names no time, and no gateway that has only gone silent."""

from collections.abc import Mapping

import msgspec

from fairlead.model import Finding, ServiceKey

NO_GATEWAY = "NoGateway"
NOT_SERVED = "GatewayNotServing"
MOST_NAMED = 3
SEE_THERE = "the Event `SyncGatewayFailed`, and `fairlead status` on that host, say why"


class Gateways(msgspec.Struct, frozen=True):
    """The gateways as the controller observes them. `refusals`: the Services that some live
    gateways cannot serve, with the message of each of these gateways."""

    alive: frozenset[str] = frozenset()
    refusals: Mapping[ServiceKey, Mapping[str, str]] = msgspec.field(default_factory=dict)


def gateway_notes(gateways: Gateways | None, key: ServiceKey) -> tuple[Finding, ...]:
    """What is wrong for this Service. `gateways`: None while the gateways are not known, or if
    their Leases may not be read."""
    if gateways is None:
        return ()
    if not gateways.alive:
        message = (
            "no gateway is alive; the address stays, and works only where the kernel of a "
            "stopped gateway still forwards"
        )
        remedy = "start `fairlead gateway`, and see `fairlead status --cluster`"
        return (Finding(NO_GATEWAY, message, severity="error", remedy=remedy, blocks="Ready"),)
    refusals = gateways.refusals.get(key, {})
    if not refusals:
        return ()
    told = [
        f"gateway {name} cannot serve it: {message or SEE_THERE}"
        for name, message in sorted(refusals.items())
    ]
    more = f"; and {len(told) - MOST_NAMED} more gateways" if len(told) > MOST_NAMED else ""
    message = "; ".join(told[:MOST_NAMED]) + more
    return (Finding(NOT_SERVED, message, severity="error", blocks="Ready"),)
