"""What a Service's owner should know about the gateways in front of it.

In: which gateways are alive, and what each says that it cannot serve. Out: Notes, which keep the Service from being Ready.
Invariant: pure; a note is the same as long as the matter is: it names no gateway that has only gone silent, and no time.
"""

from collections.abc import Mapping

import msgspec

from fairlead.model import Note, ServiceKey

NO_GATEWAY = "NoGateway"
NOT_SERVED = "GatewayNotServing"
MOST_NAMED = 3
SEE_THERE = "the Event `SyncGatewayFailed`, and `fairlead status` on that host, say why"


class Gateways(msgspec.Struct, frozen=True):
    """The gateways as the controller observes them. `refusals`: the Services that some of the gateways that are alive cannot
    serve, with the message of each such gateway."""

    alive: frozenset[str] = frozenset()
    refusals: Mapping[ServiceKey, Mapping[str, str]] = msgspec.field(default_factory=dict)


def gateway_notes(gateways: Gateways | None, key: ServiceKey) -> tuple[Note, ...]:
    """What is wrong for this Service. None: the gateways are not known, yet or because nothing may be read of them."""
    if gateways is None:
        return ()
    if not gateways.alive:
        message = "no gateway is alive that could serve it; its address stays, and reaches pods only through what a gateway"
        remedy = "start `fairlead gateway`, and see `fairlead status --cluster`"
        return (Note(NO_GATEWAY, f"{message} that has stopped left in its kernel: {remedy}", "Ready"),)
    refusals = gateways.refusals.get(key, {})
    if not refusals:
        return ()
    told = [f"gateway {name} cannot serve it: {message or SEE_THERE}" for name, message in sorted(refusals.items())]
    more = f"; and {len(told) - MOST_NAMED} more gateways" if len(told) > MOST_NAMED else ""
    return (Note(NOT_SERVED, "; ".join(told[:MOST_NAMED]) + more, "Ready"),)
